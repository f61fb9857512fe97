"""These tests need the packages of `make test-optimum`; in other environments they are not collected."""

from __future__ import annotations

from importlib import util

collect_ignore_glob = [] if util.find_spec("optimum") else ["test_*.py"]

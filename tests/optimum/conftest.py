"""These tests need the packages of `make test-optimum`; in other environments they are not collected."""

from __future__ import annotations

from importlib import util

# Not the package `optimum` itself: this folder has its name and would be found.
collect_ignore_glob = [] if util.find_spec("transformers") else ["test_*.py"]

"""These tests need the onnxruntime of `make test-openvino`; in other environments they are not collected."""

from __future__ import annotations

import onnxruntime

collect_ignore_glob = [] if "OpenVINOExecutionProvider" in onnxruntime.get_available_providers() else ["test_*.py"]

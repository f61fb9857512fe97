"""These tests need the onnxruntime of `make test-webgpu`; in other environments they are not collected."""

from __future__ import annotations

import onnxruntime

collect_ignore_glob = [] if "WebGpuExecutionProvider" in onnxruntime.get_available_providers() else ["test_*.py"]

"""Weights in, bundles out: GGUF files and Hugging Face folders become ONNX bundles for edgespec, without torch."""

from __future__ import annotations

from edgespec_export.exporter import export_model
from edgespec_export.options import ExportOptions
from edgespec_export.parity import CheckOptions

__all__ = ["CheckOptions", "ExportOptions", "export_model"]

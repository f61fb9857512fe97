"""Weights in, bundles out: GGUF files and Hugging Face folders become ONNX bundles for edgespec, without torch."""

from __future__ import annotations

from edgespec_export.drafts import export_draft
from edgespec_export.exporter import export_model
from edgespec_export.gguf_out import write_gguf
from edgespec_export.hf_out import write_hf_folder, write_hf_model
from edgespec_export.options import ExportOptions
from edgespec_export.parity import CheckOptions
from edgespec_export.static_export import export_static, export_static_draft
from edgespec_export.static_options import StaticOptions
from edgespec_export.via_optimum import export_with_optimum

__all__ = [
    "CheckOptions",
    "ExportOptions",
    "StaticOptions",
    "export_draft",
    "export_model",
    "export_static",
    "export_static_draft",
    "export_with_optimum",
    "write_gguf",
    "write_hf_folder",
    "write_hf_model",
]

"""edgespec: lossless speculative decoding for small hardware.

Importing this package loads numpy and nothing heavier; runtimes are imported on use.
"""

from __future__ import annotations

from edgespec.errors import EdgeSpecError
from edgespec.llm import LLM
from edgespec.outputs import CompletionOutput, Delta, RequestOutput
from edgespec.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Delta", "EdgeSpecError", "RequestOutput", "SamplingParams", "__version__"]

__version__ = "0.1.0"

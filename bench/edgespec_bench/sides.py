"""The list of sides: every engine and setting that can be asked to decode, edgespec's own among them.

Each peer stands at the best sensible setting that was found for it here (the figures are in bench/LOG.md); its note
says what it is, and what could not be had. Processes are in `protocol`, environments in `peers`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from edgespec.errors import ConfigError
from edgespec_bench.peers import GENAI, LLAMACPP, OPENVINO, TRANSFORMERS
from edgespec_bench.protocol import Side, SideProcess, What, decode_tok_s, open_sides

__all__ = ["Side", "SideProcess", "decode_tok_s", "edgespec_side", "find_side", "list_sides", "open_sides"]


def edgespec_side(setting: str, what: What, note: str = "", **options: Any) -> Side:
    """edgespec under EngineOptions; `native=True` is plain decoding one row a step on its fastest graph."""
    return Side("edgespec", setting, what, options, note)


_OWN = (
    edgespec_side("plain", "plain", "one row a step, the fastest kernel", native=True, draft="none", exact=False),
    edgespec_side("exact-plain", "plain", "plain decoding on rows that agree bit for bit", draft="none", exact=True),
    edgespec_side("ngram-3", "speculative", "n-grams of a fixed length", draft="ngram", num_speculative_tokens=3),
    edgespec_side("ngram-5", "speculative", "longer, where texts are copied", draft="ngram", num_speculative_tokens=5),
    edgespec_side(
        "ngram,table-3",
        "speculative",
        "n-grams, else the table that ships",
        draft="ngram,table",
        num_speculative_tokens=3,
    ),
    edgespec_side("ngram,table-5", "speculative", "the same, longer", draft="ngram,table", num_speculative_tokens=5),
    edgespec_side("eagle-2", "speculative", "the trained draft that ships", draft="eagle", num_speculative_tokens=2),
    edgespec_side(
        "ngram,eagle-3", "speculative", "n-grams first, else EAGLE", draft="ngram,eagle", num_speculative_tokens=3
    ),
    edgespec_side("auto", "speculative", "what the plan chooses for this machine", draft="auto"),
)

_llamacpp = partial(Side, "llama.cpp", peer=LLAMACPP, child="program/llamacpp_child")
_PURE = {"part": "q4_0-pure"}
_LLAMACPP = (
    _llamacpp(
        "plain",
        "plain",
        _PURE,
        "llama.cpp without Python; Q4_0 by its own quantizer, embedding and head too: its fastest file",
        parts=("q4_0-pure", "program"),
    ),
    _llamacpp(
        "plain-q4_0",
        "plain",
        {"part": "q4_0"},
        "as llama-quantize makes it by default: embedding and head in Q8_0",
        parts=("q4_0", "program"),
    ),
    _llamacpp(
        "plain-as-is",
        "plain",
        {"part": "as-is"},
        "the pair's own file (Q4_1), the very weights that all the others approximate: slower, and closest to them",
        parts=("as-is", "program"),
    ),
    _llamacpp(
        "ngram",
        "speculative",
        {**_PURE, "types": ["ngram-simple"], "size_n": 3, "size_m": 4},
        "its n-gram speculation; its defaults of 12 and 48 tokens never draft in texts this short",
        parts=("q4_0-pure", "program"),
    ),
    _llamacpp(
        "draft",
        "speculative",
        {**_PURE, "types": ["draft-simple"], "draft": "draft-q4_0", "n_max": 2, "p_min": 0.6},
        "its draft-model speculation with our TinyDraft in Q4_0; slower than plain at every length tried",
        parts=("q4_0-pure", "draft-q4_0", "program"),
    ),
)

_binding = partial(Side, "llama-cpp-python", peer=LLAMACPP, child="llamacpp_python_child.py", parts=("q4_0-pure",))
_FLASH = {**_PURE, "llama": {"flash_attn": True}}
_BINDING = (
    _binding("plain", "plain", _FLASH, "the Python binding of llama.cpp, its own generate loop, the same file"),
    _binding(
        "prompt-lookup",
        "speculative",
        {**_FLASH, "lookup": {"max_ngram_size": 2, "num_pred_tokens": 2}},
        "LlamaPromptLookupDecoding, the one draft that the binding has; 5 and 10 tokens are slower",
    ),
)

_genai = partial(Side, "onnxruntime-genai", peer=GENAI, child="genai_child.py")
_GENAI = (
    _genai("plain", "plain", {"part": "int4"}, "its own builder's int4, block 32", parts=("int4",)),
    _genai(
        "ngram",
        "speculative",
        {"part": "int4", "speculative": {"ngram_size": 3, "max_draft_tokens": 4, "cooldown": True}},
        "its n-gram speculation; its adaptive length and chained lookup are no faster",
        parts=("int4",),
    ),
    _genai(
        "draft",
        "speculative",
        {"part": "draft", "speculative": {"max_draft_tokens": 2}},
        "its draft-model speculation with our TinyDraft in its builder's int4; slower than plain at every length tried",
        parts=("int4", "draft"),
    ),
)

_openvino = partial(Side, "openvino-genai", peer=OPENVINO, child="openvino_child.py")
_READ = {"part": "as-is", "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32}}
_OPENVINO = (
    _openvino(
        "plain", "plain", _READ, "its reader's form of the pair's GGUF (Q4_1, zero points rounded)", parts=("as-is",)
    ),
    _openvino(
        "plain-int4",
        "plain",
        {"part": "int4", "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 64}},
        "int4 in groups of 64 by NNCF, embedding and head too: faster, but its text suffers on so small a model",
        parts=("int4",),
    ),
    _openvino(
        "prompt-lookup",
        "speculative",
        {**_READ, "prompt_lookup": True, "generation": {"num_assistant_tokens": 2, "max_ngram_size": 2}},
        "its prompt lookup",
        parts=("as-is",),
    ),
    _openvino(
        "draft",
        "speculative",
        {**_READ, "draft": "draft", "generation": {"num_assistant_tokens": 1}},
        "its draft-model speculation with our TinyDraft in int4 by NNCF",
        parts=("as-is", "draft"),
    ),
)

_transformers = partial(Side, "transformers", peer=TRANSFORMERS, child="transformers_child.py")
_FLOAT = {"part": "float", "dtype": "bfloat16"}
_TRANSFORMERS = (
    _transformers(
        "plain", "plain", _FLOAT, "bfloat16, faster than float32: it has no int4 kernels for CPUs", parts=("float",)
    ),
    _transformers(
        "prompt-lookup",
        "speculative",
        {**_FLOAT, "generation": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}},
        "its prompt lookup",
        parts=("float",),
    ),
    _transformers(
        "assisted",
        "speculative",
        {
            **_FLOAT,
            "assistant": "draft",
            "assisting": {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4},
        },
        "its assisted generation with our TinyDraft",
        parts=("float", "draft"),
    ),
)


def list_sides() -> tuple[Side, ...]:
    """Every side there is, edgespec's own first."""
    return (*_OWN, *_LLAMACPP, *_BINDING, *_GENAI, *_OPENVINO, *_TRANSFORMERS)


def find_side(name: str) -> Side:
    """The side of that name. Raises ConfigError listing the names."""
    for side in list_sides():
        if side.name == name:
            return side
    raise ConfigError(f"there is no side {name!r}: use one of {', '.join(side.name for side in list_sides())}")

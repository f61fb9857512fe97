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
    edgespec_side("eagle-1", "speculative", "the trained draft that ships", draft="eagle", num_speculative_tokens=1),
    edgespec_side(
        "ngram,eagle-1", "speculative", "n-grams first, else EAGLE", draft="ngram,eagle", num_speculative_tokens=1
    ),
    edgespec_side(
        "adaptive",
        "speculative",
        "the controller weighs n-grams, EAGLE and plain steps each round",
        draft="ngram,eagle",
        controller="adaptive",
        num_speculative_tokens=4,
    ),
    edgespec_side("auto", "speculative", "what the plan chooses for this machine", draft="auto"),
)

_llamacpp = partial(Side, "llama.cpp", peer=LLAMACPP, child="program/llamacpp_child")
_Q4_0 = {"part": "q4_0"}
_LLAMACPP = (
    _llamacpp(
        "plain",
        "plain",
        _Q4_0,
        "llama.cpp without Python, Q4_0 by its own quantizer, which leaves the embedding (and head) in Q8_0",
        parts=("q4_0", "program"),
    ),
    _llamacpp("plain-as-is", "plain", {"part": "as-is"}, "the pair's own file (Q4_1)", parts=("as-is", "program")),
    _llamacpp(
        "ngram",
        "speculative",
        {**_Q4_0, "types": ["ngram-simple"], "size_n": 3, "size_m": 4},
        "its n-gram speculation; its defaults of 12 and 48 tokens never draft in texts this short",
        parts=("q4_0", "program"),
    ),
    _llamacpp(
        "draft",
        "speculative",
        {**_Q4_0, "types": ["draft-simple"], "draft": "draft-q4_0", "n_max": 2, "p_min": 0.6},
        "its draft-model speculation with our TinyDraft in Q4_0; slower than plain at every length tried",
        parts=("q4_0", "draft-q4_0", "program"),
    ),
)

_binding = partial(Side, "llama-cpp-python", peer=LLAMACPP, child="llamacpp_python_child.py", parts=("q4_0",))
_FLASH = {**_Q4_0, "llama": {"flash_attn": True}}
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
        {"part": "int4", "speculative": {"ngram_size": 3, "max_draft_tokens": 3}},
        "its n-gram speculation",
        parts=("int4",),
    ),
    _genai(
        "draft",
        "speculative",
        {"part": "draft", "speculative": {"max_draft_tokens": 1}},
        "its draft-model speculation with our TinyDraft in its builder's int4",
        parts=("int4", "draft"),
    ),
)

_openvino = partial(Side, "openvino-genai", peer=OPENVINO, child="openvino_child.py")
_GROUPS = {"part": "int4", "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 64}}
_OPENVINO = (
    _openvino(
        "plain",
        "plain",
        _GROUPS,
        "int4 in groups of 64 by NNCF, embedding and head too; activations quantized in the same groups",
        parts=("int4",),
    ),
    _openvino("plain-as-is", "plain", {"part": "as-is"}, "its reader's form of the pair's GGUF", parts=("as-is",)),
    _openvino(
        "prompt-lookup",
        "speculative",
        {**_GROUPS, "prompt_lookup": True, "generation": {"num_assistant_tokens": 2, "max_ngram_size": 2}},
        "its prompt lookup",
        parts=("int4",),
    ),
    _openvino(
        "draft",
        "speculative",
        {**_GROUPS, "draft": "draft", "generation": {"num_assistant_tokens": 1}},
        "its draft-model speculation with our TinyDraft in the same int4",
        parts=("int4", "draft"),
    ),
)

_transformers = partial(Side, "transformers", peer=TRANSFORMERS, child="transformers_child.py")
_FLOAT = {"part": "float", "dtype": "float32"}
_TRANSFORMERS = (
    _transformers("plain", "plain", _FLOAT, "float weights: it has no int4 kernels for CPUs", parts=("float",)),
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

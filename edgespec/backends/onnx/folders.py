"""What a model folder says about itself: our bundle, an onnxruntime-genai folder, or an optimum folder.

Reads configuration files only. What a graph really does is for `signature` and `probe`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.backends.onnx.vocabulary import ReducedVocabulary
from edgespec.bundle import Bundle, static_graph
from edgespec.errors import BackendError, ConfigError

__all__ = ["GRAPHS", "ModelFolder", "read_folder"]

_log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 2048  # for a folder that declares none

FUSE = "fuse.onnx"
FLAVOURS = ("cpu", "npu")

# What a bundle can be loaded as: the graphs that it takes, and how to get a bundle that has them.
GRAPHS: dict[str, tuple[tuple[str, ...], str]] = {
    "model": (("model.onnx",), ""),
    "tree": (("tree.onnx",), "--tree"),
    "split": (("lower.onnx", "upper.onnx", "head.onnx"), "--exit-layer"),
}


@dataclass(frozen=True)
class ModelFolder:
    """The graph of a folder and what its configuration declares; None where it declares nothing.

    graphs: all of them where the model is split in several, of which `graph` is the first.
    """

    kind: str
    graph: Path
    name: str
    n_ctx: int
    eos_ids: tuple[int, ...] = ()
    n_vocab: int | None = None
    n_layers: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    tokenizer_hash: str | None = None
    taps: tuple[str, ...] = ()
    content: str | None = None  # hash of the files, where the folder holds one
    names: Mapping[str, str] = field(default_factory=dict)  # role -> port name
    notes: tuple[str, ...] = ()
    graphs: tuple[Path, ...] = ()
    reduced: ReducedVocabulary | None = None  # what a draft's logits are over
    draft: Mapping[str, Any] | None = None  # what a bundle says of the draft that it is
    fuse: Path | None = None  # a draft's graph that fuses features of the target
    synthetic: str | None = None  # see ModelInfo
    is_static: bool = False  # graphs of fixed shapes, of which `graph` is the widest

    @property
    def content_key(self) -> str:
        """What tells this model from another: the folder's own hash, or sizes and times of the graph's files."""
        if self.content is not None:
            return self.content
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return hashlib.sha256(repr((str(self.graph.resolve()), stats)).encode()).hexdigest()[:32]

    @property
    def files(self) -> list[Path]:
        """The graphs and the data files named after them, or all data files of the folder where none is."""
        graphs = self.graphs or (self.graph,)
        own = sorted(path for graph in graphs for path in graph.parent.glob(f"{graph.name}*") if path.is_file())
        if len(own) == len(graphs):
            folder = self.graph.parent.iterdir()
            own += sorted(path for path in folder if path.suffix in (".data", ".onnx_data", ".bin"))
        return own

    @property
    def weight_bytes(self) -> int:
        """Size of the graph and its data on disk."""
        return sum(path.stat().st_size for path in self.files)


def read_folder(path: Path, kind: str, use: str = "model") -> ModelFolder:
    """Read the configuration of a folder of `kind` "bundle", "genai" or "optimum".

    use: which of a bundle's graphs are wanted, a key of GRAPHS. Raises BundleError for a broken bundle, ConfigError for
    graphs that the folder lacks, ConfigError or BackendError for what cannot be run.
    """
    if kind == "bundle":
        folder = _read_bundle(path, use)
    elif use != "model":
        raise ConfigError(
            f"{path} is no bundle, and only a bundle has graphs for {use}=True: export one with edgespec."
        )
    else:
        folder = _read_genai(path) if kind == "genai" else _read_optimum(path)
    if not folder.graph.is_file():
        raise BackendError(f"{path} names the graph {folder.graph.name}, which is not there.")
    for note in folder.notes:
        _log.warning("%s: %s", folder.name, note)
    return folder


def _read_bundle(path: Path, use: str) -> ModelFolder:
    bundle = Bundle.open(path)
    info = bundle.info
    if info.flavour not in FLAVOURS:
        raise ConfigError(
            f"{path} is a bundle of flavour {info.flavour!r}; the ONNX backend runs {' and '.join(FLAVOURS)}."
        )
    names, option = GRAPHS[use]
    if info.static is not None and use != "split":  # trees run on the same graphs
        names = (static_graph(max(info.static["widths"])),)
    missing = [name for name in names if not bundle.has(name)]
    if use != "model" and missing:
        raise ConfigError(f"{path} has no {', '.join(missing)}, which {use}=True runs: export it with {option}.")
    hashes = "".join(bundle.files[name]["sha256"] for name in sorted(bundle.files))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:32]
    graphs = tuple(bundle.path(name) for name in names)
    return ModelFolder(
        kind="bundle",
        graph=graphs[0],
        graphs=graphs,
        name=info.name,
        n_ctx=info.n_ctx,
        eos_ids=info.eos_ids,
        n_vocab=info.n_vocab,
        n_layers=info.n_layers,
        n_kv_heads=info.n_kv_heads,
        head_dim=info.head_dim,
        tokenizer_hash=info.tokenizer_hash,
        taps=info.taps,
        content=content if use == "model" else f"{content}-{use}",
        reduced=ReducedVocabulary.of(bundle),
        draft=info.draft,
        fuse=bundle.path(FUSE) if bundle.has(FUSE) else None,
        synthetic=info.synthetic,
        is_static=info.static is not None,
    )


def _read_genai(path: Path) -> ModelFolder:
    config = _read_json(path / "genai_config.json")
    model = config.get("model", {})
    decoder = model.get("decoder", {})
    if "filename" not in decoder or decoder.get("pipeline") or "encoder" in model:
        raise BackendError(
            f"{path}: genai_config.json describes a {model.get('type', 'model')} of several graphs; "
            "edgespec runs single decoder graphs."
        )
    eos_ids, notes = _drop_openers(path, _ids(model.get("eos_token_id")))
    ports = {**decoder.get("inputs", {}), **decoder.get("outputs", {})}
    roles = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions", "logits": "logits"}
    return ModelFolder(
        kind="genai",
        graph=path / decoder["filename"],
        name=path.resolve().name,
        n_ctx=model.get("context_length") or config.get("search", {}).get("max_length") or DEFAULT_CONTEXT,
        eos_ids=eos_ids,
        n_vocab=model.get("vocab_size"),
        n_layers=decoder.get("num_hidden_layers"),
        n_kv_heads=decoder.get("num_key_value_heads"),
        head_dim=decoder.get("head_size"),
        names={roles[key]: value for key, value in ports.items() if key in roles and isinstance(value, str)},
        notes=notes,
    )


def _read_optimum(path: Path) -> ModelFolder:
    config = _read_json(path / "config.json")
    config = {**config, **config.get("text_config", {})}
    eos = config.get("eos_token_id")
    if (path / "generation_config.json").is_file():
        eos = _read_json(path / "generation_config.json").get("eos_token_id", eos)
    eos_ids, notes = _drop_openers(path, _ids(eos))
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    return ModelFolder(
        kind="optimum",
        graph=_find_graph(path),
        name=path.resolve().name,
        n_ctx=config.get("max_position_embeddings") or config.get("n_positions") or DEFAULT_CONTEXT,
        eos_ids=eos_ids,
        n_vocab=config.get("vocab_size"),
        n_layers=config.get("num_hidden_layers"),
        n_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (width // heads if heads and width else None),
        notes=notes,
    )


def _find_graph(path: Path) -> Path:
    """model.onnx, or the folder's only .onnx file."""
    if (path / "model.onnx").is_file():
        return path / "model.onnx"
    graphs = sorted(path.glob("*.onnx"))
    if len(graphs) == 1:
        return graphs[0]
    raise ConfigError(
        f"{path} holds {', '.join(graph.name for graph in graphs)} and no model.onnx: keep the one decoder with past "
        "that is to be run, as model.onnx."
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _drop_openers(path: Path, eos_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """EOS ids without those that open a turn in the chat template, and a note for each that was dropped.

    onnxruntime-genai's builder declares SmolLM2's <|im_start|> an EOS beside <|im_end|>, so that a chat ends when the
    model begins the next turn's header. An only EOS id is never dropped.
    """
    template = _chat_template(path)
    if len(eos_ids) < 2 or not template:
        return eos_ids, ()
    texts = _added_tokens(path)
    openers = [token for token in eos_ids if token in texts and _opens_turn(template, texts[token])]
    if len(openers) == len(eos_ids):
        return eos_ids, ()
    notes = tuple(
        f"its configuration declares {texts[token]} (id {token}) an end-of-text token, but the chat template opens "
        "turns with it; edgespec does not stop at it."
        for token in openers
    )
    return tuple(token for token in eos_ids if token not in openers), notes


def _opens_turn(template: str, text: str) -> bool:
    """True where the template writes `text` right before a role."""
    return re.search(re.escape(text) + r"[^<\n]{0,20}?\b(?:role|system|user|assistant)\b", template) is not None


def _chat_template(path: Path) -> str:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if (path / "tokenizer_config.json").is_file():
        template = _read_json(path / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else ""
    return ""


def _added_tokens(path: Path) -> dict[int, str]:
    if not (path / "tokenizer.json").is_file():
        return {}
    tokens = _read_json(path / "tokenizer.json").get("added_tokens", [])
    return {token["id"]: token["content"] for token in tokens}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a JSON {type(fields).__name__}, not an object.")
    return fields

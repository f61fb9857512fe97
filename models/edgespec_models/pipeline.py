"""From a target's name to a finished zoo folder: corpus, features, training, acceptance, card, plots.

Owns the order of the work and where its files lie. What each step does is in its own module; nothing here needs torch
before the training itself.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import Bundle
from edgespec.errors import ConfigError, FormatError, IncompatibleError, MissingDependencyError
from edgespec_models.acceptance import SETTINGS, evaluate_zoo, held_out_prompts
from edgespec_models.conversation import DataSettings, write_corpus
from edgespec_models.corpus import Corpus, JoinedRows, recipe_path
from edgespec_models.features import dump_features

if TYPE_CHECKING:
    from edgespec_models.training import StepReport

__all__ = ["KINDS", "Target", "TrainRequest", "check_torch", "make_corpus", "train_draft"]

KINDS = ("tinydraft", "eagle", "medusa", "exit")
LOG = "log.jsonl"
QUICK_PROMPTS, FULL_PROMPTS = 8, 24
QUICK_TOKENS, FULL_TOKENS = 64, 128

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True)
class Target:
    """The model that drafts are made for. label: how commands name it; weights: its float source, None if unknown."""

    folder: Path
    label: str
    weights: Path | None = None
    license: str | None = None
    threads: int | None = None

    @property
    def bundle(self) -> Bundle:
        return Bundle.open(self.folder)

    def open_model(self) -> Any:
        """The loaded target."""
        from edgespec.backends import load_model

        return load_model(self.folder, threads=self.threads)


@dataclass(frozen=True)
class TrainRequest:
    """What `edgespec train KIND` was asked for. corpora: one or more. features: of one corpus, None is beside it.
    taps: None takes the bundle's.
    """

    kind: str
    target: Target
    corpora: tuple[Path, ...]
    out: Path
    features: Path | None = None
    taps: tuple[str, ...] | None = None
    steps: int = 600
    batch_rows: int = 8
    lr: float = 1e-3
    dropout: float = 0.1
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    n_vocab_draft: int = 8192
    checkpoint_every: int = 100
    eval_every: int = 100
    patience: int = 0
    resume: bool = False
    keep_checkpoint: bool = False
    max_seconds: float | None = None
    commands: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def check_torch() -> None:
    """Raise MissingDependencyError, naming the extra, where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError("training needs torch: pip install 'edgespec[train]'") from error


def make_corpus(target: Target, out: Path, settings: DataSettings, progress: Progress | None = None) -> Corpus:
    """The target writes a corpus of `settings.rows` rows to `out` (or goes on with one that was interrupted)."""
    from edgespec.backends.onnx.batch import BatchSession
    from edgespec.text import Tokenizer

    bundle = target.bundle
    info = bundle.info
    facts = {
        "target": info.name,
        "target_sha256": bundle.files["model.onnx.data"]["sha256"] if bundle.has("model.onnx.data") else None,
        "tokenizer_hash": info.tokenizer_hash,
        "n_vocab": info.n_vocab,
        "n_ctx": info.n_ctx,
    }
    model = target.open_model()
    try:
        return write_corpus(
            lambda n: BatchSession(model, n, settings.length),
            Tokenizer.load(target.folder),
            out,
            settings,
            facts,
            progress,
        )
    finally:
        model.close()


def train_draft(
    request: TrainRequest,
    progress: Progress | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> dict[str, Any]:
    """Train and leave a zoo folder with card and plots in `request.out`; its config.json as a dict.

    Raises ConfigError or IncompatibleError before any work where the request cannot be met.
    """
    taps = _taps(request.kind, request.target.bundle, request.taps)
    corpora = _corpora(request)
    corpus = Corpus.join(corpora)
    setup_facts = _facts(request.target)
    prompts = held_out_prompts(corpus, FULL_PROMPTS)
    features = _features(request, corpora, corpus.sources, tuple(dict.fromkeys([*taps, "final"])), progress)
    k = request.options.get("n_medusa", 3) if request.kind == "medusa" else 4

    def evaluate(zoo: Path) -> dict[str, Any]:
        return evaluate_zoo(
            zoo, request.target.folder, request.kind, prompts[:QUICK_PROMPTS], k=k, max_tokens=QUICK_TOKENS,
            threads=request.threads,
        )  # fmt: skip

    _train(request, taps, corpus, features, setup_facts, _Log(request.out, request.resume, on_step), evaluate)
    if progress is not None:
        progress("measuring acceptance", 0, None)
    found = evaluate_zoo(
        request.out,
        request.target.folder,
        request.kind,
        prompts,
        k=k,
        max_tokens=FULL_TOKENS,
        settings=tuple(SETTINGS),
        threads=request.threads,
    )
    return _finish(request, found)


def _train(
    request: TrainRequest,
    taps: tuple[str, ...],
    corpus: Corpus,
    features: Mapping[str, Any],
    facts: Any,
    log: _Log,
    evaluate: Callable[[Path], dict[str, Any]],
) -> None:
    from edgespec_models.training import TrainSetup, train

    same = (
        "steps", "batch_rows", "lr", "dropout", "seed", "device", "threads", "n_vocab_draft", "checkpoint_every",
        "eval_every",
    )  # fmt: skip
    setup = TrainSetup(
        tokens=corpus.tokens,
        assistant=corpus.assistant,
        features=features,
        facts=facts,
        out=request.out,
        taps=taps,
        target=request.target.bundle.info.name,
        n_held_out=corpus.n_held_out,
        patience=request.patience,
        resume=request.resume,
        max_seconds=request.max_seconds,
        options=request.options,
        training={
            "corpus": {"rows": len(corpus), "length": corpus.length, "sha256": corpus.hash},
            "commands": list(request.commands),
            "license": request.target.license,
        },
        **{name: getattr(request, name) for name in same},
    )
    train(request.kind, setup, log, evaluate)


class _Log:
    """Every step's figures as a line of `log.jsonl`, for the plots; a resumed run goes on in the same file."""

    def __init__(self, out: Path, is_resumed: bool, on_step: Callable[[StepReport], None] | None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / LOG
        self._on_step = on_step
        if not is_resumed:
            self._path.unlink(missing_ok=True)

    def __call__(self, report: StepReport) -> None:
        names = ("step", "loss", "parts", "lr", "tokens_s", "survival", "acceptance")
        entry = {name: getattr(report, name) for name in names if getattr(report, name) is not None}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._on_step is not None:
            self._on_step(report)


def read_log(out: Path) -> list[dict[str, Any]]:
    """The steps of a run in order; where a resumed run repeated some, its own, and nothing beyond its last."""
    path = out / LOG
    if not path.is_file():
        return []
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    last = entries[-1]["step"] if entries else 0
    return [entry for step, entry in sorted({entry["step"]: entry for entry in entries}.items()) if step <= last]


def _finish(request: TrainRequest, found: dict[str, Any]) -> dict[str, Any]:
    """Put the final acceptance into config.json, draw, write the card, and tidy up."""
    from edgespec_models.card import write_card
    from edgespec_models.plots import plot_acceptance, plot_loss

    path = request.out / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["acceptance"] = {**config["acceptance"], **found}
    title = f"{request.kind} for {config['target']}"
    steps = read_log(request.out)
    history: list[dict[str, Any]] = [
        {name: entry[name] for name in ("step", "loss", "survival", "acceptance") if name in entry}
        for entry in steps
        if "survival" in entry
    ]  # the weights that stayed may be of an earlier step than the last
    config["training"]["history"] = history or config["training"]["history"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if steps:
        plot_loss(request.out / "loss.png", steps, title)
    if history:
        plot_acceptance(request.out / "acceptance.png", history, title)
    write_card(request.out)
    shutil.rmtree(request.out / "candidate", ignore_errors=True)
    if not request.keep_checkpoint:
        for name in ("checkpoint.safetensors", LOG):
            (request.out / name).unlink(missing_ok=True)
    return config


def _taps(kind: str, bundle: Bundle, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The taps that a draft looks at; raises IncompatibleError where the bundle does not give them out."""
    info = bundle.info
    if info.draft is not None:
        raise IncompatibleError(f"{bundle.folder} is itself a draft: give the target that it is for")
    if kind == "exit":
        if info.exit_layer is None:
            raise IncompatibleError(
                f"{bundle.folder} was exported without an exit: export the target with an exit layer, and with the tap "
                "of the layer before it"
            )
        taps: tuple[str, ...] = (f"layer.{info.exit_layer - 1}",)
    else:
        taps = () if kind == "tinydraft" else wanted or info.taps
    needed = tuple(dict.fromkeys([*taps, "final"]))
    missing = [tap for tap in needed if tap not in info.taps]
    if missing:
        raise IncompatibleError(
            f"{kind} needs the features {', '.join(needed)} and {bundle.folder} gives out "
            f"{', '.join(info.taps) or 'none'}: export the target with "
            f"--taps {','.join(dict.fromkeys([*info.taps, *needed]))}"
        )
    if kind == "medusa" and taps[-1] != "final":
        raise ConfigError(f"medusa's last tap is {taps[-1]}, but it has to be final: give the taps in that order")
    return taps


def _corpora(request: TrainRequest) -> list[Corpus]:
    corpora = [Corpus.load(path) for path in request.corpora]
    info = request.target.bundle.info
    for corpus in corpora:
        corpus.check_vocabulary(info.n_vocab, info.tokenizer_hash)
        if corpus.length > info.n_ctx:
            raise ConfigError(f"rows of {corpus.path} have {corpus.length} tokens, the target's context {info.n_ctx}")
    if request.features is not None and len(corpora) > 1:
        raise ConfigError(f"features={request.features} are of one corpus, and {len(corpora)} are given: leave it out")
    return corpora


def _facts(target: Target) -> Any:
    """The target's shape and float weights, for the cores."""
    from edgespec_export.sources import open_source
    from edgespec_export.target_tables import TargetTables

    from edgespec_models.core import Facts

    bundle = target.bundle
    info = bundle.info
    if target.weights is None:
        raise ConfigError(
            f"{target.folder} is a bundle, and training starts from the target's own float weights: give them with "
            "--weights (a .gguf file or a folder with safetensors)"
        )
    source = open_source(target.weights)
    names = ("n_vocab", "n_embd", "n_layers", "n_heads", "n_kv_heads", "head_dim")
    differing = [
        f"{name} {getattr(source.config, name)} against {getattr(info, name)}"
        for name in names
        if getattr(source.config, name) != getattr(info, name)
    ]
    if differing:
        raise IncompatibleError(
            f"the weights {target.weights} are not those of {target.folder} ({'; '.join(differing)}): give the source "
            "that the bundle was made from"
        )
    tables = TargetTables.read(bundle)
    ids = np.arange(info.n_vocab)

    def tensor(name: str) -> NDArray[np.float32]:
        """Embedding and head as the bundle rounded them, which is what a draft will meet; the rest in float."""
        table = {"embed_tokens.weight": tables.embedding, "lm_head.weight": tables.head}.get(name)
        values: NDArray[np.float32] = source.tensor(name) if table is None else table.rows(ids)
        return values

    config = replace(source.config, is_tied=False)  # a tied head may have been rounded on its own
    return Facts(config, tensor, info.tokenizer_hash, info.exit_layer)


def _features(
    request: TrainRequest,
    corpora: Sequence[Corpus],
    sources: NDArray[np.int64] | None,
    taps: tuple[str, ...],
    progress: Progress | None,
) -> dict[str, Any]:
    """The target's features by row of the (joined) corpus, on disk; computed where they are not there yet."""
    from edgespec.backends.onnx.batch import BatchSession

    bundle = request.target.bundle
    identity = bundle.files["model.onnx.data"]["sha256"] if bundle.has("model.onnx.data") else bundle.info.name
    length = corpora[0].length
    opened: list[Any] = []

    def open_batch(n: int) -> Any:
        if not opened:
            opened.append(request.target.open_model())
        return BatchSession(opened[0], n, length)

    try:
        dumped = []
        for corpus in corpora:
            assert corpus.path is not None
            out = request.features or features_path(corpus.path, identity)
            dumped.append(dump_features(open_batch, corpus, taps, out, target=identity, progress=progress))
    finally:
        for model in opened:
            model.close()
    if sources is None:
        return dict(dumped[0])
    return {tap: JoinedRows([files[tap] for files in dumped], sources) for tap in taps}


def features_path(corpus: Path, identity: str) -> Path:
    """Where a corpus's features for a target lie by default: beside it, shared by all draft kinds."""
    return corpus.with_name(f"{corpus.stem}.features-{identity[:12]}")


def corpus_command(corpus: Path, label: str) -> str | None:
    """The command that makes a corpus again, from its recipe; None where it has none."""
    from edgespec_models.corpus import Corpus as _Corpus

    try:
        recipe = _Corpus.load(corpus).recipe if recipe_path(corpus).is_file() else None
    except FormatError:
        return None
    if recipe is None:
        return None
    settings, words = recipe["settings"], [f"edgespec train data -m {label} -o {corpus.name}"]
    defaults = DataSettings()
    for name, value in settings.items():
        value = tuple(value) if isinstance(value, list) else value
        if value == getattr(defaults, name) and name not in ("rows", "seed"):
            continue
        words.append(_flag(name, value))
    return " ".join(words)


def _flag(name: str, value: Any) -> str:
    if name == "is_raw":
        return "--raw"
    text = ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
    return f"--{name.replace('_', '-')} {json.dumps(text) if isinstance(text, str) and name == 'system' else text}"

"""The training loop that every draft kind shares: rows of features in, a zoo folder out.

Owns the order of rows, the schedule, checkpoints (safetensors, no pickle) and early stopping. The target never runs
here: its features are on disk, and its distribution follows from the last of them. Runs on CPU (bfloat16 products
where the machine has them) or on whatever torch calls `device`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_export.rope import scaling
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec_models.core import Batch, DraftCore, Facts
from edgespec_models.eagle import EagleCore
from edgespec_models.early_exit import ExitCore
from edgespec_models.layers import ReducedHead
from edgespec_models.medusa import MedusaCore
from edgespec_models.tinydraft import TinyDraftCore
from edgespec_models.zoo_format import write_zoo

__all__ = ["CORES", "StepReport", "TrainSetup", "train", "vocabulary_of"]

CORES: dict[str, type[DraftCore]] = {core.kind: core for core in (TinyDraftCore, EagleCore, MedusaCore, ExitCore)}
SURVIVAL_DEPTH = 4
WARM_UP = 30
CHECKPOINT = "checkpoint.safetensors"


@dataclass
class TrainSetup:
    """Everything that decides a training run.

    tokens: [n, length] of the corpus, assistant: the same shape. features: tap -> [n, length, n_embd] (memory maps).
    taps: those that the draft looks at (`final` has to be in `features` for every kind). options: of the kind's core.
    n_held_out: last rows, never trained on. patience: evaluations without a better one before it stops (0: never).
    """

    tokens: NDArray[Any]
    assistant: NDArray[np.bool_]
    features: Mapping[str, NDArray[Any]]
    facts: Facts
    out: Path
    taps: tuple[str, ...]
    target: str = ""
    steps: int = 600
    batch_rows: int = 8
    lr: float = 1e-3
    dropout: float = 0.1
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    n_vocab_draft: int = 8192
    n_held_out: int = 48
    checkpoint_every: int = 100
    eval_every: int = 100
    patience: int = 0
    resume: bool = False
    max_seconds: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)  # for config.json: corpus recipe and the like


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. survival: on held-out rows, where this step measured it (teacher forced, float weights)."""

    step: int
    steps: int
    loss: float
    parts: dict[str, float]
    lr: float
    tokens_s: float
    survival: tuple[float, ...] | None = None
    acceptance: Mapping[str, Any] | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + the sum of survivals, before any production run."""
        return None if self.survival is None else 1.0 + sum(self.survival)


Evaluate = Callable[[Path], Mapping[str, Any]]  # a zoo folder -> {"mean_acceptance_length": ..., ...}


def vocabulary_of(tokens: NDArray[Any], n_vocab: int, n_wanted: int, always: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """The `n_wanted` most frequent tokens of a corpus and those in `always`, ascending; ties by id."""
    counts = np.bincount(tokens.reshape(-1).astype(np.int64), minlength=n_vocab)
    order = np.lexsort((np.arange(n_vocab), -counts))
    chosen = dict.fromkeys([*always, *order.tolist()])
    return np.array(sorted(list(chosen)[: min(n_wanted, n_vocab)]), np.int32)


def train(
    kind: str,
    setup: TrainSetup,
    on_step: Callable[[StepReport], None] | None = None,
    evaluate: Evaluate | None = None,
) -> Path:
    """Train a draft and leave config.json and weights.safetensors in `setup.out`, which it returns.

    evaluate: acceptance measured by the production decoder; the best weights by it are what stays. Ctrl-C leaves the
    last checkpoint. Raises ConfigError for settings that cannot work.
    """
    if kind not in CORES:
        raise ConfigError(f"unknown draft kind {kind!r}: train one of {', '.join(CORES)}")
    return _Run(kind, setup, on_step or (lambda report: None), evaluate).run()


class _Run:
    def __init__(
        self, kind: str, setup: TrainSetup, on_step: Callable[[StepReport], None], evaluate: Evaluate | None
    ) -> None:
        self.kind, self.setup, self.on_step, self.evaluate = kind, setup, on_step, evaluate
        if setup.threads:
            torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        _check(kind, setup)
        self.device = torch.device(setup.device)
        self.core = CORES[kind](setup.facts, setup.taps, **setup.options)
        self.core.start_from_target()
        self.core.dropout = setup.dropout
        self.core.to(self.device)
        self.n_train = len(setup.tokens) - setup.n_held_out
        eos = setup.facts.config.eos_ids
        n_vocab = setup.facts.config.n_vocab
        self.vocabulary = vocabulary_of(setup.tokens[: self.n_train], n_vocab, setup.n_vocab_draft, tuple(eos))
        self.table = torch.from_numpy(np.array(setup.facts.tensor("embed_tokens.weight"))).to(self.device)
        head = torch.from_numpy(np.array(setup.facts.tensor(setup.facts.head_name))[self.vocabulary])
        self.head = ReducedHead(head.to(self.device, torch.bfloat16))
        self.places = torch.full((n_vocab,), -1, device=self.device)
        self.places[torch.from_numpy(self.vocabulary).long()] = torch.arange(len(self.vocabulary), device=self.device)
        self.optimizer = torch.optim.AdamW(_groups(self.core), lr=setup.lr, betas=(0.9, 0.95))
        self.step = 0
        self.best: tuple[float, int] | None = None
        self.history: list[dict[str, Any]] = []

    def run(self) -> Path:
        setup = self.setup
        setup.out.mkdir(parents=True, exist_ok=True)
        if setup.resume:
            self._load()
        started = time.monotonic()
        n_stale = 0
        while self.step < setup.steps:
            report = self._one_step()
            if self.step % setup.checkpoint_every == 0 or self.step == setup.steps:
                self._save()  # first: an evaluation may fail or be interrupted
            due = self.step % setup.eval_every == 0 or self.step == setup.steps
            if due:
                report = self._measured(report)
                n_stale = 0 if self._keep_best(report) else n_stale + 1
            self.on_step(report)
            if setup.patience and n_stale >= setup.patience:
                break
            if setup.max_seconds is not None and time.monotonic() - started > setup.max_seconds:
                self._save()
                break
        if self.best is None or (self.best[1] != self.step and self.step % setup.eval_every):
            self._keep_best(self._measured(None))
        return setup.out

    def _one_step(self) -> StepReport:
        setup = self.setup
        self.core.train()
        began = time.perf_counter()
        lr = setup.lr * _schedule(self.step, setup.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(1_000_003 * setup.seed + self.step)  # a resumed run drops what an uninterrupted one would
        batch = self.batch(self._rows(self.step))
        with self._cast():
            parts = self.core.losses(batch, self.head)
            loss = torch.stack(list(parts.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.core.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        values = {name: float(part.detach()) for name, part in parts.items()}
        total = sum(values.values())
        if not math.isfinite(total):
            raise ConfigError(f"the loss became {total} at step {self.step}: use a smaller --lr than {setup.lr}")
        n_tokens = batch.tokens.numel()
        return StepReport(self.step, setup.steps, total, values, lr, n_tokens / (time.perf_counter() - began))

    def _rows(self, step: int) -> NDArray[np.int64]:
        """Rows of a step: a permutation an epoch, so that a resumed run sees what an uninterrupted one would."""
        size, n = min(self.setup.batch_rows, self.n_train), self.n_train
        per_epoch = n // size
        order = np.random.default_rng([self.setup.seed, step // per_epoch]).permutation(n)
        start = step % per_epoch * size
        return np.sort(order[start : start + size])

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """The rows as tensors."""
        setup = self.setup
        tokens = torch.from_numpy(setup.tokens[rows].astype(np.int64)).to(self.device)
        names = dict.fromkeys([*self.core.taps, "final"])
        features = {
            tap: torch.from_numpy(np.asarray(setup.features[tap][rows], np.float32)).to(self.device) for tap in names
        }
        assistant = torch.from_numpy(setup.assistant[rows]).to(self.device)
        return Batch(tokens, assistant, self.table[tokens], features, self.places)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def survival(self) -> tuple[float, ...]:
        """Over the held-out rows, mean survival of 1..4 drafted tokens."""
        depth = min(SURVIVAL_DEPTH, self.setup.options.get("n_medusa", 3)) if self.kind == "medusa" else SURVIVAL_DEPTH
        self.core.eval()
        rows = np.arange(self.n_train, len(self.setup.tokens))
        results, weights = [], []
        with torch.no_grad(), self._cast():
            for start in range(0, len(rows), self.setup.batch_rows):
                batch = self.batch(rows[start : start + self.setup.batch_rows])
                results.append(self.core.survival(batch, self.head, depth).float().cpu().numpy())
                weights.append(float(batch.assistant.sum()))
        mean = np.average(np.nan_to_num(np.stack(results)), axis=0, weights=np.maximum(weights, 1e-9))
        return tuple(float(value) for value in mean)

    def _measured(self, report: StepReport | None) -> StepReport:
        base = report or StepReport(self.step, self.setup.steps, math.nan, {}, 0.0, 0.0)
        survival = self.survival()
        acceptance = None
        if self.evaluate is not None:
            acceptance = dict(self.evaluate(self._write(self.setup.out / "candidate", survival, None)))
        entry = {"step": self.step, "loss": base.loss, "survival": [round(value, 4) for value in survival]}
        self.history.append(entry | ({"acceptance": acceptance} if acceptance else {}))
        return StepReport(base.step, base.steps, base.loss, base.parts, base.lr, base.tokens_s, survival, acceptance)

    def _keep_best(self, report: StepReport) -> bool:
        """Write the weights out where they are the best so far; by production acceptance if that was measured."""
        assert report.survival is not None
        score = 1.0 + sum(report.survival)
        if report.acceptance is not None:
            score = float(report.acceptance["mean_acceptance_length"])
        if self.best is not None and score <= self.best[0]:
            return False
        self.best = (score, self.step)
        self._write(self.setup.out, report.survival, report.acceptance)
        return True

    def _write(self, folder: Path, survival: tuple[float, ...], acceptance: Mapping[str, Any] | None) -> Path:
        tensors = {name: value.detach().float().cpu().numpy() for name, value in self.core.named_parameters()}
        write_zoo(folder, self._config(survival, acceptance), tensors, self.vocabulary)
        return folder

    def _config(self, survival: tuple[float, ...], acceptance: Mapping[str, Any] | None) -> dict[str, Any]:
        setup, facts = self.setup, self.setup.facts
        shape = ("n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "norm_eps")
        return {
            "kind": self.kind,
            "target": setup.target,
            **{name: getattr(facts, name) for name in shape},
            "rope_theta": facts.config.rope.theta,
            **({} if (stretched := scaling(facts.config.rope)) is None else {"rope_scaling": stretched}),
            "n_vocab": facts.config.n_vocab,
            "taps": list(self.core.taps),
            "tokenizer_hash": facts.tokenizer_hash,
            **self.core.options(),
            "acceptance": dict(acceptance or {}) | {"teacher_forced_survival": [round(v, 4) for v in survival]},
            "training": {
                "steps": self.step,
                "batch_rows": setup.batch_rows,
                "lr": setup.lr,
                "dropout": setup.dropout,
                "seed": setup.seed,
                "n_rows": self.n_train,
                "history": self.history,
                **setup.training,
            },
        }

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Weights, optimizer state and progress in one file, replaced whole."""
        from safetensors.torch import save

        names = {parameter: name for name, parameter in self.core.named_parameters()}
        state = {name: value.detach().contiguous() for value, name in names.items()}
        for parameter, entry in self.optimizer.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}:{names[parameter]}"] = entry[key].contiguous()
        meta = {"step": self.step, "best": self.best, "history": self.history, "kind": self.kind}
        temporary = self.setup.out / (CHECKPOINT + ".new")
        temporary.write_bytes(save(state, metadata={"edgespec": json.dumps(meta)}))
        os.replace(temporary, self.setup.out / CHECKPOINT)

    def _load(self) -> None:
        from safetensors import safe_open

        path = self.setup.out / CHECKPOINT
        if not path.is_file():
            raise ConfigError(f"{path} is not there: there is nothing to resume; drop --resume")
        with safe_open(path, "pt", device=str(self.device)) as file:
            meta = json.loads(file.metadata()["edgespec"])
            if meta["kind"] != self.kind:
                raise ConfigError(f"{path} is a checkpoint of {meta['kind']}, not of {self.kind}")
            with torch.no_grad():
                for name, parameter in self.core.named_parameters():
                    parameter.copy_(file.get_tensor(name))
                    moments = {key: file.get_tensor(f"{key}:{name}") for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(meta["step"])), **moments}
        self.step, self.history = meta["step"], meta["history"]
        self.best = tuple(meta["best"]) if meta["best"] else None


def _check(kind: str, setup: TrainSetup) -> None:
    n_rows, length = setup.tokens.shape
    if n_rows - setup.n_held_out < 1 or setup.n_held_out < 1:
        raise ConfigError(f"the corpus has {n_rows} rows and {setup.n_held_out} are held out: nothing is left to train")
    for tap in dict.fromkeys([*(setup.taps if kind != "tinydraft" else ()), "final"]):
        if tap not in setup.features:
            raise ConfigError(f"{kind} needs the features {tap!r}, the corpus has {', '.join(setup.features)}")
        if setup.features[tap].shape[:2] != (n_rows, length):
            raise ConfigError(f"features {tap!r} are {setup.features[tap].shape}, the corpus is {(n_rows, length)}")


def _groups(core: DraftCore) -> Iterator[dict[str, Any]]:
    """Weight decay for matrices only."""
    yield {"params": [p for p in core.parameters() if p.ndim > 1], "weight_decay": 0.01}
    yield {"params": [p for p in core.parameters() if p.ndim == 1], "weight_decay": 0.0}


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

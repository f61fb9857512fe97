"""Driving the production round loop with table models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from edgespec.draft.model import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.engine.controller import Controller, create_controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.scheduler import run_serial
from edgespec.engine.stops import TokenStop
from edgespec.noise import Noise
from edgespec.sampling import Sampler, SamplingParams
from edgespec.stats import RunStats
from edgespec.testing import TableModel
from edgespec.types import Drafter, ExactRows, Session
from edgespec.verify import create_verifier

__all__ = ["Outcome", "draft_model", "drafter", "run"]


class Outcome:
    """Tokens and statistics of one run of the loop."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stats = RunStats()
        self.logprobs: list[object] = []

    def check_identities(self) -> None:
        """emitted = accepted + rounds - cut, over all sources, fillers included."""
        accepted = sum(s.accepted for s in self.stats.sources.values())
        assert self.stats.emitted == len(self.tokens) == accepted + self.stats.rounds - self.stats.cut
        for r in self.stats.records:
            assert 0 <= r.accepted <= r.drafted
            assert r.emitted == r.accepted + 1 - r.cut


def drafter(kind: str, target: TableModel, **draft_options: Any) -> list[Drafter]:
    """none | ngram | same (a draft equal to the target) | noisy (near it) | wrong (unrelated)."""
    if kind == "none":
        return []
    if kind == "ngram":
        return [NgramDrafter(min_match=1)]
    return [ModelDrafter(draft_model(kind, target, **draft_options), target.info.n_vocab)]


def draft_model(kind: str, target: TableModel, **options: Any) -> TableModel:
    """A table model at a chosen distance from `target`."""
    noise = {"same": 0.0, "noisy": 1.5, "wrong": 50.0}[kind]
    base = dataclasses.asdict(
        dataclasses.replace(target.options, refuse_keep=False, inexact_rows=(), nan_at=(), fail_at=())
    )
    return TableModel(target.info.n_vocab, **{"n_ctx": target.info.n_ctx, **base, "noise": noise, **options})


def run(
    target: TableModel,
    drafters: Sequence[Drafter],
    prompt: list[int],
    params: SamplingParams,
    *,
    k: int = 4,
    rule: str = "coupled",
    exact: ExactRows | None = None,
    session: Session | None = None,
    controller: Controller | None = None,
    sample: int = 0,
    max_rounds: int | None = None,
    strict: bool = False,
    schedule: Any = None,
) -> Outcome:
    """Decode with the production loop, verifier, sampler, noise and scheduler; schedule: run_serial or its like."""
    info = target.info
    outcome = Outcome(session or target.open_session())
    eos = () if params.ignore_eos else info.eos_ids
    job = Job(
        prompt=list(prompt),
        sampler=Sampler(params, n_vocab=info.n_vocab, eos_ids=info.eos_ids, n_prompt=len(prompt)),
        verifier=create_verifier(rule, lossy="typical" if rule == "typical" else None),
        noise=Noise(params.seed or 0, sample),
        stop=TokenStop({*eos, *params.stop_token_ids}, params.min_tokens),
        max_tokens=params.max_tokens,
        n_logprobs=params.logprobs,
        notes=outcome.stats.notes,
        strict=strict,
    )
    controller = controller or create_controller("fixed", k)
    events = (schedule or run_serial)(decode(job, outcome.session, info, drafters, controller, exact))
    for committed in events:
        outcome.tokens += committed.tokens
        outcome.finish_reason = committed.finish_reason
        outcome.logprobs += committed.record.logprobs or ()
        outcome.stats.add(committed.record)
        if max_rounds and outcome.stats.rounds == max_rounds:
            break
    return outcome

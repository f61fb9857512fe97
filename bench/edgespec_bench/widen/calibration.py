"""How much noise makes a draft err as often as asked: the search for its size, and how acceptance is measured.

Acceptance here is the share of the target's own greedy tokens that the draft, given the same text, would have drafted:
that of every position whose predecessors were accepted. It is measured on the built-in training tasks, which no
benchmark uses. Knows nothing of widening.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgeSpecError

__all__ = ["Agreement", "Found", "agreement", "calibrate", "task_prompts"]

Say = Callable[[str], None]
MOST_STEPS = 12


@dataclass(frozen=True)
class Agreement:
    """acceptance: the share of `n_tokens` that agreed."""

    acceptance: float
    n_tokens: int


@dataclass(frozen=True)
class Found:
    """The size of the noise and what was measured with it."""

    size: float
    agreement: Agreement
    n_steps: int


def calibrate(
    measure: Callable[[float], Agreement], wanted: float, tolerance: float, low: float, high: float, say: Say
) -> Found:
    """The noise whose acceptance is `wanted`, within `tolerance`; it falls as noise grows.

    low, high: sizes that bracket the answer. Each step asks where a line through the two ends meets `wanted`, which
    halves the bracket or better. Raises EdgeSpecError where the answer lies outside.
    """
    ends = {low: 1.0, high: min(0.45, wanted / 2)}  # guesses, replaced as soon as a measurement is nearer
    left, right = low, high
    for step in range(1, MOST_STEPS + 1):
        share = (ends[left] - wanted) / max(ends[left] - ends[right], 1e-9)
        size = left + (right - left) * min(max(share, 0.15), 0.85)
        found = measure(size)
        say(f"noise {size:.4f}: acceptance {found.acceptance:.3f} over {found.n_tokens:,} tokens (wanted {wanted})")
        if abs(found.acceptance - wanted) <= tolerance:
            return Found(size, found, step)
        ends[size] = found.acceptance
        if found.acceptance > wanted:
            left = size
        else:
            right = size
    raise EdgeSpecError(
        f"no noise between {low} and {high} gives an acceptance of {wanted} within {tolerance}: it is {ends[left]:.3f} "
        f"at {left:.4f} and {ends[right]:.3f} at {right:.4f}; ask for another --acceptance"
    )


def task_prompts(folder: Path, n_prompts: int, most_tasks: int = 2000) -> NDArray[np.int64]:
    """[n_prompts, length] ids of built-in tasks through the chat template, all of one length, as a batch needs them.

    Of the lengths that `n_prompts` tasks share, the one that is complete first.
    """
    from edgespec_models.tasks import task

    from edgespec.text import Tokenizer

    tokenizer = Tokenizer.load(folder)
    by_length: dict[int, list[list[int]]] = {}
    for number in range(most_tasks):
        message = [{"role": "user", "content": task(number)}]
        ids = tokenizer.encode_chat(message) if tokenizer.chat_template else tokenizer.encode(message[0]["content"])
        same = by_length.setdefault(len(ids), [])
        if ids not in same:
            same.append(ids)
        if len(same) == n_prompts:
            return np.array(same, np.int64)
    raise EdgeSpecError(f"of {most_tasks} tasks no {n_prompts} have the same length: use fewer prompts")


def agreement(target: Path, draft: Path, prompts: NDArray[np.int64], n_tokens: int, threads: int) -> Agreement:
    """How often `draft` agrees with what `target` writes at T = 0 after `prompts` [n, length], up to its end."""
    from edgespec.backends import load_model
    from edgespec.backends.onnx.batch import BatchSession
    from edgespec.backends.onnx.model import OnnxModel

    models = [load_model(path, threads=threads) for path in (target, draft)]
    sessions = []
    for model in models:
        assert isinstance(model, OnnxModel)
        sessions.append(BatchSession(model, len(prompts), prompts.shape[1] + n_tokens))
    eos = np.array(models[0].info.eos_ids, np.int64)
    is_open = np.ones(len(prompts), bool)
    tokens, agreed, judged = prompts, 0, 0
    for _ in range(n_tokens):
        wanted, guessed = (session.forward(tokens).logits.argmax(axis=1) for session in sessions)
        agreed += int((wanted == guessed)[is_open].sum())
        judged += int(is_open.sum())
        is_open &= ~np.isin(wanted, eos)
        tokens = wanted[:, None].astype(np.int64)
        if not is_open.any():
            break
    for closing in (*sessions, *models):
        closing.close()
    return Agreement(agreed / judged, judged)

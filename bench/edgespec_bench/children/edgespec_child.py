"""edgespec's own end of a measurement, in the interpreter of the bench.

Every setting is a set of EngineOptions; the settings share the loaded models. Those that need no trained draft run on
the graph without taps, as they would by themselves; `native` is the fastest plain decoding, one row a step.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import numpy as np
from edgespec_bench.fidelity import model_logits
from line_server import Recorder, serve

import edgespec
from edgespec import LLM, SamplingParams
from edgespec.draft.base import FREE_DRAFTS
from edgespec.options import AUTO
from edgespec.pairs import ensure
from edgespec.stats import RunStats


class EdgeSpec:
    """One LLM for the settings without trained drafts, one for those with each draft model, as far as there are any."""

    name, version = "edgespec", edgespec.__version__

    def __init__(self, given: dict[str, Any]) -> None:
        self._model, self._threads = ensure(given["model"]), given["threads"]
        self._open = ExitStack()
        settings = {name: dict(options) for name, options in given["settings"].items()}
        planned = {name: options for name, options in settings.items() if options.get("draft") == AUTO}
        groups: dict[Any, dict[str, dict[str, Any]]] = {}
        for name, options in settings.items():
            if name not in planned:
                key = (_kinds(options) <= {*FREE_DRAFTS}, options.get("draft_model"))
                groups.setdefault(key, {})[name] = options
        self._variants: dict[str, LLM] = {}
        for group in groups.values():
            self._variants |= self._load(group)
        for name, options in planned.items():  # loads what it chooses, so it cannot share
            self._variants[name] = self._open.enter_context(LLM(self._model, threads=self._threads, **options))

    def _load(self, settings: dict[str, dict[str, Any]]) -> dict[str, LLM]:
        kinds = list(dict.fromkeys(kind for options in settings.values() for kind in _ordered_kinds(options)))
        shared = {key: value for key, value in next(iter(settings.values())).items() if key == "draft_model"}
        llm = self._open.enter_context(
            LLM(self._model, draft=",".join(kinds) or "none", threads=self._threads, **shared)
        )
        return {name: self._variant(llm, options) for name, options in settings.items()}

    def _variant(self, llm: LLM, options: dict[str, Any]) -> LLM:
        changes = {key: value for key, value in options.items() if key not in ("native", "draft_model")}
        if options.get("native"):
            return self._open.enter_context(llm.native_plain())
        return llm.variant(**changes)

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        llm = self._variants[setting]
        llm.forget()
        params = SamplingParams(
            temperature=request["temperature"],
            top_p=request["top_p"],
            seed=request["seed"],
            max_tokens=request["n_tokens"],
            ignore_eos=True,
        )
        stats = RunStats()
        for delta in llm.stream(request["prompt"], params):
            recorder.add(delta.token_ids)
            stats = delta.output.stats if delta.output else stats
        stats = dataclasses.replace(stats, records=stats.records[1:])  # the first round holds the prompt
        return {
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "by_position": [round(share, 4) for share in stats.acceptance_by_position()],
            **{name: sum(getattr(r, name) for r in stats.records) for name in ("host_s", "target_s", "draft_s")},
        }

    def logits(self, setting: str, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
        rows = model_logits(self._variants[setting].target, prompt, continuation)
        np.save(path, rows)
        return {"rows": len(rows)}


def _ordered_kinds(options: dict[str, Any]) -> list[str]:
    draft = options.get("draft", "ngram")
    return [] if draft == "none" else [kind.strip() for kind in draft.split(",")]


def _kinds(options: dict[str, Any]) -> set[str]:
    return set(_ordered_kinds(options))


if __name__ == "__main__":
    serve(EdgeSpec)

"""Sides in turns: on every prompt all of them answer right after each other, and who is first rotates.

Each side is started alone once before that, for its load time, first answer and memory. Owns the order of the requests
and the rows `side`, `run` and `skip`. A side that cannot start or dies is a row, never the
end of the run. Knows the line protocol's fields, not the engines.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from edgespec.errors import ConfigError, EdgeSpecError
from edgespec_bench.prompts import load_prompts
from edgespec_bench.sides import Side, SideProcess, decode_tok_s, open_sides
from edgespec_bench.suite.parts import SETTING_LABELS, SETTINGS, Cell, Part
from edgespec_bench.suite.rows import RowFile

__all__ = ["run_part"]

Progress = Callable[..., None]
Encode = Callable[[list[dict[str, str]]], list[int]]
_KEPT = (
    "ttft_s",
    "first_tokens",
    "seconds",
    "cpu_s",
    "rounds",
    "drafted",
    "accepted",
    "by_position",
    "host_s",
    "target_s",
    "draft_s",
)
_MOST_FAILURES = 3
LEAST_TOKENS = 16
_REQUEST = ("kind", "setting", "prompt", "turn")


def run_part(
    part: Part,
    sides: Sequence[Side],
    encode: Encode,
    threads: int,
    out: RowFile,
    progress: Progress,
    ends: Collection[int] = (),
) -> None:
    """Measure one part to its end; `encode` makes the ids of a conversation, which every side gets.

    ends: tokens with which an answer ends. Every side runs on a prompt for as many tokens as the first plain side
    needs to end its answer greedily, LEAST_TOKENS at least and part.n_tokens at most: what comes after an answer is
    text that nobody asks for, and nothing is copied there.
    Of a part that was stopped, the sides that were started alone and the prompts that all have answered are not done
    again; sides that could not be started are tried again.
    """
    known = {row["side"] for row in _rows(out, part, "side")}
    out.drop(lambda row: row["row"] == "skip" and row["part"] == part.name and row["side"] not in known)
    prompts = {cell.kind: _prompts(part, cell.kind, encode) for cell in part.cells}
    able = _start_each_alone(part, sides, next(iter(prompts.values()))[0][1], threads, out, progress)
    with ExitStack() as stack:
        running = _start_together(part, able, threads, stack, out, progress)
        if not running:
            out.write("skip", part=part.name, side=None, reason=f"no side could be started on {part.model}")
            return
        _Turns(part, running, out, progress, frozenset(ends)).run(prompts)
    out.write("done", part=part.name)


def _rows(out: RowFile, part: Part, kind: str) -> list[dict[str, Any]]:
    return [row for row in out.rows if row["row"] == kind and row["part"] == part.name]


def _prompts(part: Part, kind: str, encode: Encode) -> list[tuple[str, list[int]]]:
    return [(prompt.id, encode(prompt.messages)) for prompt in load_prompts(kind)[: part.n_prompts]]


def _start_each_alone(
    part: Part, sides: Sequence[Side], prompt: list[int], threads: int, out: RowFile, progress: Progress
) -> list[Side]:
    """A `side` row of each: load time, first request after it (cold), peak memory. Returns those that worked."""
    able = [side for side in sides if any(row["side"] == side.name for row in _rows(out, part, "side"))]
    for number, side in enumerate(side for side in sides if side not in able):
        progress(f"{part.name}: each side alone, cold", number, len(sides))
        try:
            missing = side.missing(part.model)
            if missing:
                raise ConfigError(missing)
            with side.start(part.model, threads) as process:
                answer = process.decode(prompt, part.n_tokens, seed=1, **SETTINGS["t0"])
        except EdgeSpecError as error:
            out.write("skip", part=part.name, side=side.name, reason=str(error))
            continue
        able.append(side)
        out.write(
            "side",
            part=part.name,
            model=part.model,
            side=side.name,
            engine=side.engine,
            what=side.what,
            note=side.note,
            version=process.version,
            settings=process.settings,
            load_s=_short(process.load_s),
            cold_ttft_s=_short(answer["ttft_s"]),
            peak_rss_mb=_short(answer["peak_rss_mb"]),
        )
    return able


def _start_together(
    part: Part, sides: Sequence[Side], threads: int, stack: ExitStack, out: RowFile, progress: Progress
) -> dict[str, SideProcess]:
    """Name -> process; sides of one engine share one, and an engine that fails takes only its own sides with it."""
    lost = {row["side"] for row in _rows(out, part, "skip") if "prompt" not in row}
    sides = [side for side in sides if side.name not in lost]
    running: dict[str, SideProcess] = {}
    engines = dict.fromkeys(side.engine for side in sides)
    for number, engine in enumerate(engines):
        progress(f"{part.name}: starting all sides", number, len(engines))
        group = [side for side in sides if side.engine == engine]
        try:
            running.update(stack.enter_context(open_sides(group, part.model, threads)))
        except EdgeSpecError as error:
            for side in group:
                out.write("skip", part=part.name, side=side.name, reason=str(error))
    return running


class _Turns:
    """The warm requests of a part; the first of each side on its first prompt, which warms up, is thrown away."""

    def __init__(
        self,
        part: Part,
        running: dict[str, SideProcess],
        out: RowFile,
        progress: Progress,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.part, self.out, self.progress, self.running, self.ends = part, out, progress, running, ends
        self.lengths: dict[str, int] = {}  # of the answers to prompts
        self.count = 0
        self.failures: Counter[str] = Counter()
        self.answered: dict[tuple[Any, ...], set[str]] = {}
        for row in _rows(out, part, "run"):
            self.answered.setdefault(tuple(row[name] for name in _REQUEST), set()).add(row["side"])
        self.on_trial = set(running) if part.slowest > 0 else set()
        self.slow: set[str] = set()

    def run(self, prompts: Mapping[str, list[tuple[str, list[int]]]]) -> None:
        first = next(iter(prompts.values()))[0][1]
        for name in list(self.running):
            self._ask(name, first, SETTINGS["t0"], 1, "warming up")
        self._find_lengths([prompt for own in prompts.values() for prompt in own])
        total = sum(len(prompts[cell.kind]) for cell in self.part.cells) * self.part.turns
        most = max(len(own) for own in prompts.values())
        for turn, number, cell in itertools.product(range(self.part.turns), range(most), self.part.cells):
            if number < len(prompts[cell.kind]):  # all kinds in turns: a run that is stopped has some of each
                self.progress(f"{self.part.name}: {cell.kind}, {SETTING_LABELS[cell.setting]}", self.count, total)
                able = [name for name in self.running if number < self.part.slow_prompts or name not in self.slow]
                self._one(able, cell, *prompts[cell.kind][number], turn)

    def _find_lengths(self, prompts: Sequence[tuple[str, list[int]]]) -> None:
        """Where the first plain side ends its answers."""
        plain = next((name for name, process in self.running.items() if process.side.what == "plain"), None)
        if plain is None or not self.ends:
            return
        for number, (prompt_id, ids) in enumerate(prompts):
            self.progress(f"{self.part.name}: where answers end", number, len(prompts))
            answer = self._ask(plain, ids, SETTINGS["t0"], 1, prompt_id) if plain in self.running else None
            tokens = answer["tokens"] if answer else []
            end = next((n for n, token in enumerate(tokens, 1) if token in self.ends), self.part.n_tokens)
            self.lengths[prompt_id] = min(max(end, LEAST_TOKENS), self.part.n_tokens)

    def _one(self, names: list[str], cell: Cell, prompt_id: str, ids: list[int], turn: int) -> None:
        first = self.count % max(1, len(names))
        self.count += 1
        where = {"kind": cell.kind, "setting": cell.setting, "prompt": prompt_id, "turn": turn}
        if self.answered.get(tuple(where.values()), set()) >= set(names):
            return  # before the run was stopped
        speeds: dict[str, float] = {}
        for place, name in enumerate(names[first:] + names[:first]):
            answer = self._ask(name, ids, SETTINGS[cell.setting], 1 + turn, prompt_id)
            if answer is None:
                continue
            self._write(name, {**where, "place": place}, len(ids), answer)
            speeds[name] = decode_tok_s(answer)
        self._leave_out_slow({name: speed for name, speed in speeds.items() if name in self.on_trial}, speeds)
        self.on_trial -= speeds.keys()

    def _ask(
        self, name: str, ids: list[int], setting: Mapping[str, Any], seed: int, prompt_id: str
    ) -> dict[str, Any] | None:
        """The answer; None where it fails or everything came at once. A side that fails again and again is left out."""
        try:
            n_tokens = self.lengths.get(prompt_id, self.part.n_tokens)
            answer = self.running[name].decode(ids, n_tokens, seed=seed, **setting)
            decode_tok_s(answer)
        except EdgeSpecError as error:
            self.failures[name] += 1
            if self.failures[name] == _MOST_FAILURES:
                self._drop(name, f"{_MOST_FAILURES} failures in a row, the last: {error}")
            else:
                self.out.write("skip", part=self.part.name, side=name, prompt=prompt_id, reason=str(error))
            return None
        self.failures[name] = 0
        return answer

    def _write(self, side: str, where: Mapping[str, Any], n_prompt: int, answer: Mapping[str, Any]) -> None:
        """A run row: what the side answered, the tokens as their number and a hash."""
        tokens = answer["tokens"]
        self.out.write(
            "run",
            part=self.part.name,
            side=side,
            **where,
            n_prompt=n_prompt,
            n_tokens=len(tokens),
            text=hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12],
            **{name: _short(answer[name]) for name in _KEPT if answer.get(name) is not None},
        )

    def _leave_out_slow(self, judged: Mapping[str, float], speeds: Mapping[str, float]) -> None:
        """A short run spends its time on the sides that can be the best of something; each is judged once."""
        best = max((speed for name, speed in speeds.items() if self.running[name].side.what == "plain"), default=0.0)
        for name, speed in judged.items():
            if speed >= self.part.slowest * best:
                continue
            if self.part.slow_prompts:
                self.slow.add(name)
            else:
                share = f"under {self.part.slowest:g} of the fastest plain side's {best:.0f}"
                why = f"{speed:.0f} tok/s on the first prompt, {share}: measured further only in the whole run"
                self._drop(name, why)

    def _drop(self, name: str, reason: str) -> None:
        self.running.pop(name)
        self.out.write("skip", part=self.part.name, side=name, reason=reason)


def _short(value: Any) -> Any:
    """Six significant digits: a run of a thousand rows stays small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_short(entry) for entry in value] if isinstance(value, list) else value

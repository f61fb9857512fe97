"""Finds which row counts of a forward call give bit-identical rows, by running them.

A row's logits may depend on how many rows share its call: another kernel, another order of sums. The probe runs one
fixed token sequence through calls of many lengths and compares every position's logits bit for bit (the KV cache is
judged through the positions after it). Uses Session alone; the result is kept in the machine profile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edgespec.cpu import cpu_identity
from edgespec.errors import CacheError
from edgespec.machine import Profile, open_profile
from edgespec.types import ExactRows, FloatArray, Model, Session

__all__ = ["ProbeReport", "exact_rows", "probe_exact_rows"]

PROBE_VERSION = 3
SMALL_WIDTHS = (*range(1, 18), 24, 32, 33)
LARGE_WIDTHS = (64, 100, 128, 255, 256)
STEP_WIDTHS = (*range(1, 10), 17)  # the widths of rounds, tried again after other prefixes
SHORT_PAST, LONG_PAST = 61, 600
FOLLOWED = (*STEP_WIDTHS, 33)  # a second call shows whether the KV that these leave is the same
FOLLOW_ROWS = 16  # most rows of that second call
# Whole texts in calls of one length. Where activations are rounded to 8 bits between two products, other sums of the
# attention show in one position of 20 (llama.cpp, Q4_1, 30 layers), so a few positions prove nothing; once they show,
# they stay in the cache.
STEADY_WIDTHS, STEADY_TOKENS = (1, 2, 3, 4, 8), 160
CHAINS = ((255, 128, 64), (256, 255, 100))  # long calls, one after the other from an empty cache
# Logits of long calls are asked for at these positions: on a grid, so that calls of other lengths meet them there, and
# around the places where a call of either chain begins.
GRID = 24
BORDERS = {start + offset for chain in CHAINS for start in itertools.accumulate(chain) for offset in (-1, 0, 1)}
MULTIPLES = (1, 2, 4, 8)  # kernels that work on pairs of rows are exact for even counts only
N_SINGLE = 24  # one-row steps compared with many-row logits


@dataclass(frozen=True)
class ProbeReport:
    """What the probe found.

    exact: the row counts that agree bit for bit, None where no two do. tested: the counts that were run; counts between
    them are taken to behave alike. single_row_max_abs_diff: largest logit difference between a call of one row and of
    many; flips: at how many of `n_single` positions the most likely token differed; flip_gap: the largest distance of
    the two best many-row logits among those.
    """

    exact: ExactRows | None
    single_row_max_abs_diff: float
    flips: int
    tested: tuple[int, ...]
    n_single: int = 0
    flip_gap: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ProbeReport:
        """The report that `to_json` wrote; raises KeyError, TypeError or ValueError on anything else."""
        exact = fields["exact"]
        names = ("min_rows", "max_rows", "multiple")
        rows = None if exact is None else ExactRows(*(int(exact[name]) for name in names))
        return cls(**{**fields, "exact": rows, "tested": tuple(fields["tested"])})


_reports: WeakKeyDictionary[Model, ProbeReport] = WeakKeyDictionary()


def exact_rows(model: Model, cache: bool = True, profile: Profile | None = None) -> ProbeReport:
    """The report for `model` on this machine, probed at most once where `cache` is set.

    A model with a `content_key` (what it is, and whatever of its runtime may change a kernel) is remembered in the
    machine profile; any other one only as long as it lives.
    """
    if not cache:
        return probe_exact_rows(model)
    if model not in _reports:
        _reports[model] = _from_profile(model, profile or open_profile())
    return _reports[model]


def _from_profile(model: Model, profile: Profile) -> ProbeReport:
    content_key = getattr(model, "content_key", None)
    if content_key is None:
        return probe_exact_rows(model)
    key = f"{content_key} {cpu_identity()} v{PROBE_VERSION} n_ctx={min(model.info.n_ctx, 1024)}"
    stored = profile.get("exact_rows", key)
    if stored is not None:
        try:
            return ProbeReport.from_json(stored)
        except (KeyError, TypeError, ValueError):
            pass  # written by another version or damaged: probe again
    report = probe_exact_rows(model)
    profile.put("exact_rows", key, report.to_json())
    return report


def probe_exact_rows(model: Model, *, max_rows: int = 256) -> ProbeReport:
    """Probe row counts 1..max_rows on a throw-away session, as far as the context and the backend allow.

    A few seconds for a model of 135M parameters on two cores. A model that runs all calls at one width (`fixed_width`)
    is tried by a few calls. Raises what the model's forward raises.
    """
    info = model.info
    if (width := getattr(model, "fixed_width", None)) is not None:
        return _probe_fixed(model, width)
    limit = min(max_rows, info.max_rows or max_rows, max(1, info.n_ctx // 2))
    session = model.open_session()
    exact, n_best, tested = None, 0, set[int]()
    try:
        for multiple in MULTIPLES:
            probe = _Probe(session, info.n_ctx, info.n_vocab, limit, info.max_rewind is None, multiple)
            probe.run()
            tested.update(probe.tested)
            run = probe.widest()
            if len(run) > n_best:
                exact, n_best = ExactRows(run[0], run[-1], multiple), len(run)
            if exact is not None and exact.min_rows <= max(2, multiple) and exact.max_rows > limit - multiple:
                break
        difference, flips, gap, n_single = probe.single_rows()
    except CacheError:  # it said it could rewind and cannot: nothing can be pinned on it
        return ProbeReport(None, 0.0, 0, ())
    finally:
        session.close()
    return ProbeReport(exact, difference, flips, tuple(sorted(tested)), n_single, gap)


def _probe_fixed(model: Model, width: int) -> ProbeReport:
    """Whether rows keep their bits wherever in a call of `width` rows they stand, whatever the others are.

    The kernels are the same for every call, so rows can differ by their place alone; a device may take a second a call.
    """
    session = model.open_session()
    session.exact = exact = ExactRows(1, width)  # type: ignore[attr-defined]
    n = min(2 * width, model.info.n_ctx)
    tokens = np.random.default_rng(20_26).integers(0, model.info.n_vocab, n).tolist()
    try:
        whole = _rows_of(session, tokens, [width, width])
        single = _rows_of(session, tokens[:width], [1] * width)
        shifted = _rows_of(session, tokens, [1, width, width])
    finally:
        session.close()
    same = np.array_equal(whole[:width], single) and np.array_equal(whole, shifted)
    flips = int((whole[:width].argmax(axis=1) != single.argmax(axis=1)).sum())
    difference = float(np.abs(whole[:width] - single).max())
    return ProbeReport(exact if same else None, difference, flips, tuple(sorted({1, width})), width)


def _rows_of(session: Session, tokens: Sequence[int], calls: Sequence[int]) -> FloatArray:
    """[len(tokens), n_vocab] logits, run in calls of these lengths as far as there are tokens."""
    session.keep(0)
    parts = []
    for n in calls:
        if piece := tokens[session.n_past : session.n_past + n]:
            parts.append(session.forward(piece).logits.copy())
    return np.concatenate(parts)


class _Probe:
    """Runs the calls and keeps a digest of every logits row by position and row count."""

    def __init__(self, session: Session, n_ctx: int, n_vocab: int, limit: int, can_rewind: bool, multiple: int) -> None:
        self.session = session
        self.n_ctx = n_ctx
        self.limit = limit
        self.can_rewind = can_rewind
        self.multiple = multiple  # only calls of such row counts
        self.tokens: list[int] = np.random.default_rng(20_26).integers(0, n_vocab, n_ctx).tolist()
        # (whether in a steady text, position) -> row count -> digests: a steady text's cache is its own
        self.seen: dict[tuple[bool, int], dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))

    @property
    def tested(self) -> tuple[int, ...]:
        return tuple(sorted({width for by_width in self.seen.values() for width in by_width}))

    def run(self) -> None:
        """Short calls on an empty cache, after a short and after a long prefix; then chains of long ones."""
        self._widths(0, self._allowed(SMALL_WIDTHS))
        for width in self._allowed(STEADY_WIDTHS):
            self._steady(width)
        if not self.can_rewind:
            return
        for chain in CHAINS:
            self._chain([width - width % self.multiple for width in chain])
        cached = self.session.n_past
        for n_past in (LONG_PAST, SHORT_PAST):
            if cached > n_past:
                self._widths(n_past, self._allowed(STEP_WIDTHS))
        if self.limit < max(LARGE_WIDTHS):  # too little context for the chains
            for width in self._allowed(LARGE_WIDTHS):
                self._chain([width])

    def _allowed(self, widths: Sequence[int]) -> list[int]:
        return [width for width in widths if width <= self.limit and width % self.multiple == 0]

    def _widths(self, n_past: int, widths: Sequence[int]) -> None:
        """Each width right after the first `n_past` cached tokens, and on an empty cache a second call after it."""
        for width in widths:
            self.session.keep(n_past)
            if n_past + width > self.n_ctx:
                return
            self._call(width, width, list(range(width)))
            if n_past == 0 and width in FOLLOWED and 2 * width <= self.n_ctx:
                follow = min(width, FOLLOW_ROWS)  # a multiple as well
                self._call(follow, width, [follow - 1])

    def _steady(self, width: int) -> None:
        """The beginning of the text in calls of one length, all rows."""
        self.session.keep(0)
        while self.session.n_past + width <= min(STEADY_TOKENS, self.n_ctx):
            self._call(width, width, list(range(width)), is_steady=True)

    def _chain(self, widths: Sequence[int]) -> None:
        """One call after the other from an empty cache, asking for rows where other calls have them too."""
        self.session.keep(0)
        for width in widths:
            start = self.session.n_past
            if width <= self.limit and start + width <= self.n_ctx:
                positions = range(start, start + width)
                rows = [at - start for at in positions if at % GRID < 2 or at in BORDERS or at == positions[-1]]
                self._call(width, width, rows)

    def _call(self, width: int, judged: int, rows: list[int], is_steady: bool = False) -> None:
        """Run the next `width` tokens; the digests of `rows` count for or against the row count `judged`."""
        start = self.session.n_past
        result = self.session.forward(self.tokens[start : start + width], logits_rows=rows)
        for row, logits in zip(rows, result.logits, strict=True):
            digest = hashlib.blake2b(np.ascontiguousarray(logits).tobytes(), digest_size=16).digest()
            self.seen[is_steady, start + row][judged].add(digest)

    def widest(self) -> tuple[int, ...]:
        """The longest run of tested row counts in which every position has one digest; at least two counts or none."""
        tested = self.tested
        best: tuple[int, ...] = ()
        for first in range(len(tested)):
            last = first
            while last < len(tested) and self._agree(set(tested[first : last + 1])):
                last += 1
            while last > first and not self._linked(set(tested[first:last])):
                last -= 1
            if last - first >= max(2, len(best) + 1):
                best = tested[first:last]
        return best

    def _agree(self, widths: set[int]) -> bool:
        """Whether no position has two digests."""
        for by_width in self.seen.values():
            digests = [by_width[width] for width in widths if width in by_width]
            if len(set().union(*digests)) > 1:
                return False
        return True

    def _linked(self, widths: set[int]) -> bool:
        """Whether each row count met all others at some position, be it by way of a third: else nothing is shown."""
        met = [widths.intersection(by_width) for by_width in self.seen.values()]
        linked = {min(widths)}
        for _ in widths:
            linked.update(*(group for group in met if group & linked))
        return linked == widths

    def single_rows(self) -> tuple[float, int, float, int]:
        """Largest difference, argmax flips, largest top-2 gap at a flip, and positions, of one row against many."""
        n = min(N_SINGLE, max(1, self.n_ctx // 2))
        self.session.keep(0)
        many = self._steps(n, min(4, self.limit))
        self.session.keep(0)
        single = self._steps(n, 1)
        flipped = many.argmax(axis=1) != single.argmax(axis=1)
        top = np.sort(np.partition(many, -2, axis=1)[:, -2:], axis=1)
        gaps = (top[:, 1] - top[:, 0])[flipped]
        difference = float(np.abs(many - single).max(initial=0))
        return difference, int(flipped.sum()), float(gaps.max(initial=0)), n

    def _steps(self, n: int, width: int) -> FloatArray:
        """[n, n_vocab] logits of the first n tokens, `width` tokens a call."""
        parts = []
        while self.session.n_past < n:
            start = self.session.n_past
            piece = self.tokens[start : min(start + width, n)]
            parts.append(self.session.forward(piece).logits.copy())
        result: FloatArray = np.concatenate(parts)
        return result

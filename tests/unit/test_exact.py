"""The probe for row counts that agree: on table models that are inexact by design, and on a real int4 graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import load_model
from edgespec.engine.exact import ProbeReport, exact_rows, probe_exact_rows
from edgespec.machine import open_profile
from edgespec.testing import TableModel
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec
from edgespec.types import ExactRows, Model


def table(**options: object) -> TableModel:
    return TableModel(16, n_ctx=1024, order=1, **options)


def test_every_count_agrees() -> None:
    report = probe_exact_rows(table())
    assert report.exact == ExactRows(1, 256)
    assert (report.single_row_max_abs_diff, report.flips, report.flip_gap) == (0, 0, 0)
    assert {1, 2, 9, 17, 33, 100, 255, 256} <= set(report.tested)


def test_one_row_takes_another_kernel() -> None:
    report = probe_exact_rows(table(inexact_rows={1}))
    assert report.exact == ExactRows(2, 256)
    assert 1e-4 < report.single_row_max_abs_diff < 1e-2


@pytest.mark.parametrize(
    ("inexact", "exact"),
    [
        ({1, 2, 3}, ExactRows(4, 256)),
        ({33}, ExactRows(1, 32)),
        (set(range(18, 300)), ExactRows(1, 17)),
        ({1, 5}, ExactRows(6, 256)),
        (set(range(1, 300)), None),
        (set(range(1, 300, 2)), ExactRows(2, 256, 2)),  # a kernel that takes rows in pairs, and the odd one by itself
        ({w for w in range(300) if w % 4}, ExactRows(4, 256, 4)),
    ],
)
def test_the_longest_run_of_counts_wins(inexact: set[int], exact: ExactRows | None) -> None:
    assert probe_exact_rows(table(inexact_rows=inexact)).exact == exact


def test_flips_and_their_gap() -> None:
    """Two tokens that are nearly tied change places in one-row calls; the report says by how little they differed."""

    def rows(prefix: tuple[int, ...]) -> list[float]:
        return [1.0, 1.0 + 1e-5, 0.0, 0.0]

    flip = probe_exact_rows(TableModel(4, n_ctx=64, table=rows, inexact_rows={1}))
    assert flip.exact is not None
    assert flip.exact.min_rows == 2
    noise = 1e-3 * np.random.default_rng(1).standard_normal(4)
    expected = flip.n_single if noise[0] > noise[1] + 1e-5 else 0
    assert flip.flips == expected
    if expected:
        assert flip.flip_gap == pytest.approx(1e-5, rel=0.1)


def test_a_cache_that_differs_is_seen_in_later_rows() -> None:
    """Rows that agree at once but leave another cache used to pass a probe that looked at one call only."""
    model = table()

    class Leaky(TableModel):
        def open_session(self):  # type: ignore[no-untyped-def]
            session = super().open_session()
            forward = session.forward

            def wrapped(tokens, **options):  # type: ignore[no-untyped-def]
                n_past, rows = session.n_past, forward(tokens, **options)
                if session.wide and n_past:
                    rows.logits += 1
                if not n_past:
                    session.wide = len(tokens) == 7
                return rows

            session.wide, session.forward = False, wrapped
            return session

    leaky = Leaky(16, n_ctx=1024, order=1)
    report = probe_exact_rows(leaky)
    assert probe_exact_rows(model).exact == ExactRows(1, 256)
    assert report.exact == ExactRows(8, 256)


def test_a_difference_that_shows_at_few_positions_is_found() -> None:
    """A single row whose other rounding mostly vanishes used to pass: the probe looked at a handful of positions."""

    class Rare(TableModel):
        def open_session(self):  # type: ignore[no-untyped-def]
            session = super().open_session()
            forward, keep = session.forward, session.keep
            marked: set[int] = set()  # positions whose cache is off by a bit

            def wrapped(tokens, **options):  # type: ignore[no-untyped-def]
                at, rows = session.n_past, forward(tokens, **options)
                if len(tokens) == 1 and at % 40 == 37:
                    marked.add(at)
                if marked and len(rows.logits):
                    rows.logits += 1e-3
                return rows

            def forget(n_past, path=None):  # type: ignore[no-untyped-def]
                keep(n_past, path)
                marked.intersection_update(range(n_past))

            session.forward, session.keep = wrapped, forget
            return session

    assert probe_exact_rows(Rare(16, n_ctx=1024, order=1)).exact == ExactRows(2, 256)


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"max_rows": 4}, ExactRows(1, 4)),
        ({"max_rows": 1}, None),
        ({"max_rewind": 0}, ExactRows(1, 256)),
        ({"max_rewind": 8}, ExactRows(1, 256)),
    ],
)
def test_what_the_backend_cannot_do_is_not_asked(options: dict[str, int], exact: ExactRows | None) -> None:
    model = table(**options)
    report = probe_exact_rows(model)
    limit = options.get("max_rows", 256)
    assert max(len(call.tokens) for call in model.forwards) <= limit
    assert all(keep.n_past in (0, keep.before) for keep in model.keeps) or "max_rewind" not in options
    assert report.exact is None if exact is None else report.exact is not None
    if exact is not None:
        assert report.exact.min_rows == 1
        assert report.exact.max_rows <= exact.max_rows


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 7, 40, 300])
def test_small_contexts(n_ctx: int) -> None:
    model = TableModel(16, n_ctx=n_ctx)
    report = probe_exact_rows(model)
    assert report.exact is None if n_ctx < 4 else report.exact.min_rows == 1
    assert max(report.tested) <= max(1, n_ctx // 2)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Model:
    spec = TinySpec(n_embd=128, n_ffn=256, n_vocab=128, n_ctx=1024)
    return load_model(write_bundle(tmp_path_factory.mktemp("int4"), spec, bits=4), threads=2)


def test_the_report_holds_on_an_int4_graph(int4: Model) -> None:
    """Quantized rows are called exact only where they are: other chunks of other text agree bit for bit."""
    report = probe_exact_rows(int4)
    if report.exact is None:
        pytest.skip("no two row counts agree on this machine")
    low, high = report.exact.min_rows, report.exact.max_rows
    tokens = np.random.default_rng(99).integers(0, 128, 60).tolist()
    reference: np.ndarray | None = None
    for widths in ([low, low + 1], [min(high, 5 + low)], [min(high, 11), low]):
        session, parts = int4.open_session(), []
        while session.n_past < 60:
            width = widths[len(parts) % len(widths)]
            start = max(0, min(session.n_past, 60 - width))
            session.keep(start)
            parts.append((start, session.forward(tokens[start : start + width]).logits.copy()))
        logits = np.zeros((60, 128), np.float32)
        for start, part in parts:
            logits[start : start + len(part)] = part
        if reference is not None:
            np.testing.assert_array_equal(logits, reference)
        reference = logits


def test_reports_are_kept_in_the_profile(int4: Model, tmp_path: Path) -> None:
    profile = open_profile(tmp_path / "machine.json")
    report = exact_rows(int4, profile=profile)
    fields = profile._read()["exact_rows"]
    (key,) = fields
    for part in ("onnxruntime=", "threads=2", "device=cpu"):
        assert part in key
    assert ProbeReport.from_json(fields[key]) == report
    assert exact_rows(int4, profile=profile) is report


def test_a_damaged_report_is_probed_again(int4: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.engine import exact

    profile = open_profile(tmp_path / "machine.json")
    stored = exact._from_profile(int4, profile)
    (key,) = profile._read()["exact_rows"]
    calls = []
    real = exact.probe_exact_rows
    monkeypatch.setattr(exact, "probe_exact_rows", lambda model: calls.append(model) or real(model))
    assert exact._from_profile(int4, profile) == stored
    assert not calls, "a stored report is not probed again"
    for broken in ({"exact": 3}, {"exact": None}, [1], {**stored.to_json(), "extra": 1}):
        profile.put("exact_rows", key, broken)
        assert exact._from_profile(int4, profile) == stored
    assert len(calls) == 4


def test_a_model_without_content_is_remembered_while_it_lives() -> None:
    model = table()
    report = exact_rows(model)
    n_calls = len(model.log)
    assert exact_rows(model) is report
    assert len(model.log) == n_calls
    exact_rows(model, cache=False)
    assert len(model.log) > n_calls

"""Traces: the format that Perfetto opens, the lanes of both schedules, and the option that writes them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from loop_driver import draft_model

from edgespec import LLM, SamplingParams
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.options import IN_FLIGHT_DRAFTS, EngineOptions
from edgespec.testing import LatencyModel, TableModel
from edgespec.testing.latency import FakeClock
from edgespec.trace import LANES, Trace

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
PHASES = {"M": {"name", "ph", "pid", "tid", "args"}, "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}}
PHASES["i"] = PHASES["X"] - {"dur"} | {"s"}


def traced(path: Path, schedule: str, prompt: tuple[int, ...] = (1, 2)) -> tuple[list[dict[str, Any]], Any]:
    """Events of a short run, checked against the trace event format, and the run's statistics."""
    target = TableModel(16, seed=3)
    slow = [LatencyModel(model, s) for model, s in ((target, 0.004), (draft_model("noisy", target), 0.0005))]
    with LLM(slow[0], draft_model=slow[1], num_speculative_tokens=3, schedule=schedule, trace=str(path)) as llm:
        output = llm.generate(list(prompt), PARAMS)[0].outputs[0]
    data = json.loads(path.read_text(encoding="utf-8"))
    check_schema(data)
    return data["traceEvents"], output.stats


def check_schema(data: dict[str, Any]) -> None:
    """The JSON object form of the trace event format, as far as it is used here."""
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    names = {}
    for event in data["traceEvents"]:
        assert set(event) == PHASES[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            names[event["tid"]] = event["args"]["name"]
            continue
        assert names[event["tid"]] == event["cat"]
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "t") == "t"
    assert {*LANES} <= {*names.values()}


def lane(events: list[dict[str, Any]], name: str, phase: str = "X") -> list[dict[str, Any]]:
    return sorted((e for e in events if e.get("cat") == name and e["ph"] == phase), key=lambda event: event["ts"])


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_lanes_hold_every_call_and_no_device_does_two_things_at_once(tmp_path: Path, schedule: str) -> None:
    events, stats = traced(tmp_path / "trace.json", schedule)
    rounds, target, draft = (lane(events, name) for name in ("rounds", "target", "draft"))
    assert [r["args"]["emitted"] for r in rounds] == [r.emitted for r in stats.records]
    assert sum(e["name"] == "verify" for e in target) == stats.rounds
    assert sum(e["name"] == "ahead" for e in draft) == sum(r.ahead for r in stats.records)
    for spans in (rounds, target, draft):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in itertools.pairwise(spans))
    beside = any(t["ts"] < d["ts"] + d["dur"] and d["ts"] < t["ts"] + t["dur"] for t in target for d in draft)
    assert beside == (schedule == "overlapped")


def test_hits_and_misses_are_marked(tmp_path: Path) -> None:
    events, stats = traced(tmp_path / "trace.json", "overlapped")
    marks = [(e["args"]["round"], e["name"]) for e in lane(events, "rounds", "i")]
    assert marks == [(r.index, "hit" if r.hit else "miss") for r in stats.records if r.hit is not None]
    assert {name for _, name in marks} == {"hit", "miss"}
    assert not lane(traced(tmp_path / "other.json", "serial")[0], "rounds", "i")


def test_a_long_prompt_shows_as_prefill_and_requests_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    target = TableModel(16, seed=3, n_ctx=1024)
    with LLM(target, draft="ngram", trace=str(path)) as llm:
        llm.generate([1, 2] * 200, PARAMS)
        first = json.loads(path.read_text())["traceEvents"]
        llm.generate([3, 4], PARAMS)
    both = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["rows"] for e in lane(first, "target") if e["name"] == "prefill"] == [256]
    assert both[: len(first)] == first
    assert len(both) > len(first)


def test_times_are_microseconds_since_the_start(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.sleep(5.0)
    trace = Trace(clock)
    trace.span("target", "verify", 5.5, 5.75, rows=3)
    assert trace.to_dict()["traceEvents"][-1] == {
        "name": "verify", "cat": "target", "ph": "X", "ts": 500_000.0, "dur": 250_000.0, "pid": 1, "tid": 1,
        "args": {"rows": 3},
    }  # fmt: skip


@pytest.mark.parametrize(("path", "message"), [("", "names no file"), ("nowhere/t.json", "folder nowhere does not")])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(trace=path)
    with pytest.raises(ConfigError, match="must be the name of a file"):
        EngineOptions(trace=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", IN_FLIGHT_DRAFTS)
def test_drafts_that_need_the_round_in_flight_are_refused(kind: str) -> None:
    with pytest.raises(IncompatibleError, match=f"draft='{kind}': it drafts .* use draft='model'"):
        EngineOptions(draft=f"ngram,{kind}", schedule="overlapped")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "sideways"}, "'sideways' is not known: use serial, overlapped"),
        ({"schedule": "overlapped", "draft": "none"}, "drafts nothing"),
        ({"schedule": "overlapped", "tree": True, "exact": False}, "it prepares chains"),
    ],
)
def test_schedules_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


def test_plain_decoding_of_an_overlapped_llm_is_serial() -> None:
    target = TableModel(16, seed=3)
    llm = LLM(target, draft_model=draft_model("noisy", target), schedule="overlapped")
    assert llm.variant(draft="none").options.schedule == "serial"
    assert llm.generate([1, 2], PARAMS)[0].outputs[0].stats.overlap() is not None

"""The bench of schedules on devices that are only times, and of sessions that contend: what it reports."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from edgespec_bench.__main__ import main
from edgespec_bench.contention import _count_second
from edgespec_bench.devices import DeviceCase, measure_devices

from edgespec.sim import predict
from edgespec.types import Proposal

QUICK = DeviceCase(target_s=2e-4, draft_s=1e-5, n_tokens=60, repeats=1)


def test_devices_report_measured_beside_expected() -> None:
    said: list[str] = []
    result = measure_devices(QUICK, said.append)
    json.dumps(result, allow_nan=False)
    for schedule in ("serial", "overlapped"):
        row = result[schedule]
        assert row["expected"] == pytest.approx(predict(QUICK.scenario, QUICK.k, schedule).speedup, abs=1e-3)
        assert row["within"] == pytest.approx(row["speedup"]["median"] / row["expected"] - 1, abs=5e-3)
    assert sum(overlap["passes_ahead"] for overlap in result["overlap"]) > 0
    assert result["slow_draft"]["rounds"] >= 400 / (QUICK.k + 1)
    assert len(said) == 2


def test_the_worked_example_is_the_default_case_a_tenth_as_long() -> None:
    case = DeviceCase()
    assert (case.target_s, case.draft_s, case.acceptance, case.k) == (0.02, 0.001, 0.8, 5)
    assert predict(case.scenario, case.k).speedup == pytest.approx(2.95, abs=0.01)


def test_second_choices_are_judged_at_the_first_wrong_token() -> None:
    right = [0, 0]
    proposal = Proposal([1, 2, 3], "model", runners_up=[(9, 0.9), (7, 0.6), None])
    for true, expected in (([1, 2, 3], [0, 0]), ([1, 7, 3], [1, 1]), ([8, 7, 3], [1, 2]), ([1, 2, 4], [1, 3])):
        _count_second(right, proposal, true)
        assert right == expected


@pytest.mark.parametrize("args", [["devices", "--repeats", "0"], ["contention", "-m", "./nowhere"]])
def test_bad_input_is_said(args: list[str]) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert "Traceback" not in result.output

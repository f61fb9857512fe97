"""How a profile's events become parts, and that real ones explain a call; nothing here measures time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgespec_bench import __main__ as command_line
from edgespec_bench import kernels
from edgespec_export import ExportOptions, export_model
from tiny_models import tiny_config, write_hf

from edgespec.errors import ConfigError


def event(name: str, operator: str, ts: int, dur: int, n: int = 1, k: int = 4, width: int = 8) -> dict[str, Any]:
    shapes = {"input_type_shape": [{"float": [1, n, k]}], "output_type_shape": [{"float": [1, n, width]}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": operator, **shapes}}


def run(ts: int) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": 90}


def test_nodes_belong_to_the_call_that_they_ran_in_less_what_writing_them_costs() -> None:
    call = [("layers.0.mlp.gate_proj", "MatMulNBits"), ("layers.0.mlp.up_proj", "MatMulNBits"), ("flat", "Reshape")]
    events: list[dict[str, Any]] = []
    for start, durations in ((0, (500, 500, 6)), (100, (20, 30, 6)), (200, (40, 46, 6))):
        events.append(run(start))
        for index, ((name, operator), dur) in enumerate(zip(call, durations, strict=True)):
            events.append(event(name, operator, start + 10 + 20 * index, dur, n=2))
    parts = kernels.split_events(events[::-1], [0, 2, 2], {"layers.0.mlp.gate_proj": 100, "layers.0.mlp.up_proj": 60})[
        2
    ]
    assert parts["gate_up"].us == [20 + 30 - 12, 40 + 46 - 12]
    assert (parts["gate_up"].nodes, parts["gate_up"].weight_bytes) == (2, 160)
    assert dict(parts["gate_up"].shapes) == {(8, 4): 2}
    assert parts["others"].us == [0, 0]


def test_calls_that_nobody_made_are_noticed() -> None:
    with pytest.raises(ConfigError, match="2 calls and 1 were made"):
        kernels.split_events([run(0), run(100), event("a", "Reshape", 10, 5)], [1], {})


@pytest.mark.parametrize(
    ("node", "operator", "part"),
    [
        ("layers.3.self_attn.qkv_proj.out", "MatMulNBits", "qkv"),
        ("layers.3.self_attn.o_proj.out", "MatMulNBits", "o"),
        ("layers.3.mlp.down_proj.out", "MatMul", "down"),
        ("logits", "Gemm", "head"),
        ("layers.3.self_attn.out", "GroupQueryAttention", "attention"),
        ("/model/some/MatMul", "MatMul", "other products"),
        ("norm.flat", "Reshape", "others"),
    ],
)
def test_names_lead_to_parts(node: str, operator: str, part: str) -> None:
    assert kernels.part_of(node, operator) == part


def test_a_real_profile_has_every_part_of_the_graph(tmp_path: Path) -> None:
    bundle = export_model(
        write_hf(tmp_path / "source", tiny_config("llama")), tmp_path / "bundle", ExportOptions(block_size=32)
    )
    result = CliRunner().invoke(
        command_line.main, ["kernels", "-m", str(bundle), "--rows", "3", "--rows", "1", "--repeats", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    found = defaultdict(dict)
    for row in rows:
        found[row["rows"]][row["part"]] = row
    assert sorted(found) == [1, 3]
    for parts in found.values():
        assert {"gate_up", "down", "qkv", "o", "head", "attention", "norms", "others"} < set(parts)
        assert (parts["gate_up"]["nodes"], parts["head"]["nodes"], parts["attention"]["nodes"]) == (2, 1, 2)
        explained = sum(row["ms"] for name, row in parts.items() if name != kernels.TOTAL)
        assert explained == pytest.approx(parts[kernels.TOTAL]["ms"], abs=2e-3)
    assert all(parts["gate_up"]["shape"] == [192, 64] for parts in found.values() if "shape" in parts["gate_up"])
    assert kernels.weight_bytes(bundle / "model.onnx")["logits"] == 264 * 64 // 2 + 264 * 2 * 4
    assert "total" in kernels.table(rows)


def test_rows_that_a_call_cannot_have_are_refused(tmp_path: Path) -> None:
    bundle = export_model(
        write_hf(tmp_path / "source", tiny_config("llama")), tmp_path / "bundle", ExportOptions(block_size=32)
    )
    with pytest.raises(ConfigError, match="1 to 28 rows"):
        kernels.profile_round(bundle, [29])

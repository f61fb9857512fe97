"""The measurements' own arithmetic, formats and protocol; nothing here measures time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_bench import __main__ as command_line
from edgespec_bench import decode
from edgespec_bench.decode import DecodeOptions, Speeds, full_rounds
from edgespec_bench.fidelity import Passage, fidelity, kl_divergence
from edgespec_bench.machine_card import commit, machine_card, versions
from edgespec_bench.memory import PeakMemory
from edgespec_bench.memory_child import peak_bytes
from edgespec_bench.prompts import KINDS, load_prompts
from edgespec_bench.spread import paired_ratio, spread
from edgespec_bench.weights_folder import llama_config

from edgespec import LLM, SamplingParams
from edgespec.errors import ConfigError
from edgespec.testing import TableModel
from edgespec.types import RoundRecord


def record(drafted: int, host_s: float = 1e-3) -> RoundRecord:
    return RoundRecord(0, "ngram", drafted, drafted, 0, 1, 0, drafted + 1, "correction", host_s=host_s)


def test_every_kind_of_prompt_is_there() -> None:
    prompts = [prompt for kind in KINDS for prompt in load_prompts(kind)]
    assert all(len(load_prompts(kind)) == 8 for kind in KINDS)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)
    assert all(prompt.id.startswith(prompt.kind) and prompt.prompt.strip() == prompt.prompt for prompt in prompts)
    assert prompts[0].messages == [{"role": "user", "content": prompts[0].prompt}]


def test_prompts_refuse_what_is_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat, code"):
        load_prompts("poetry")
    with pytest.raises(ConfigError, match="is missing"):
        load_prompts("chat", tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"id": "a", "kind": "chat", "prompt": "hi"}\n{"id": "b"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        load_prompts("chat", tmp_path)


def test_spread_is_of_order_statistics() -> None:
    figures = spread([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (figures.n, figures.minimum, figures.median, figures.maximum) == (5, 1.0, 3.0, 100.0)
    assert (figures.quartile1, figures.quartile3) == (2.0, 4.0)
    assert spread([123.456]).to_dict()["median"] == 123.5


def test_ratios_are_of_neighbours() -> None:
    """A drift that hits both sides alike leaves the ratio alone, while the ratio of medians would move."""
    ours, theirs = [100.0, 50.0, 10.0], [50.0, 25.0, 5.0]
    assert paired_ratio(ours, theirs).minimum == paired_ratio(ours, theirs).maximum == 2.0
    with pytest.raises(AssertionError):
        paired_ratio([1.0], [1.0, 2.0])


def test_kl_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(3, 7)), rng.normal(size=(3, 7))
    p = np.exp(a) / np.exp(a).sum(-1, keepdims=True)
    q = np.exp(b) / np.exp(b).sum(-1, keepdims=True)
    np.testing.assert_allclose(kl_divergence(a, b), (p * np.log(p / q)).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(kl_divergence(a, a + 1000.0), 0.0, atol=1e-9)
    assert not np.allclose(kl_divergence(a, b), kl_divergence(b, a))


def test_fidelity_is_a_mean_over_rows_and_not_over_passages() -> None:
    near, far = np.array([[0.0, 1.0, 2.0]]), np.array([[2.0, 1.0, 0.0]])
    passages = [Passage([1], [2], near), Passage([1], [2, 2, 2], np.repeat(near, 3, 0))]
    result = fidelity(passages, [far, np.repeat(near, 3, 0)])
    assert result.n_rows == 4
    assert result.top1 == 0.75
    assert result.kld == pytest.approx(kl_divergence(near, far)[0] / 4)


def test_only_rounds_that_drafted_k_count_as_full() -> None:
    records = [record(0), record(4), record(3), record(4)]
    assert full_rounds(records, 4) == [records[1], records[3]]


def test_the_machine_card_is_plain_data() -> None:
    card = json.loads(json.dumps({"machine": machine_card(), "versions": versions()}, allow_nan=False))
    assert card["machine"]["cores"] >= 1
    assert card["versions"]["numpy"] == np.__version__


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_memory_beyond_weights_and_cache() -> None:
    memory = PeakMemory(300 * 2**20, 90 * 2**20, 10 * 2**20)
    assert memory.to_dict() == {"peak_mb": 300.0, "weights_mb": 90.0, "kv_mb": 10.0, "excess_mb": 200.0}


def test_peak_is_read_from_the_kernel(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  123 kB\nVmRSS:\t  100 kB\n", encoding="ascii")
    assert peak_bytes(status) == 123 * 1024
    assert peak_bytes() > 2**20


def test_weights_are_written_for_plain_llama_only() -> None:
    config = SimpleNamespace(name="m", architecture="qwen2", has_qkv_bias=True, has_qk_norm=False)
    with pytest.raises(ConfigError, match="plain Llama"):
        llama_config(config)


HOST = {
    name: {"all_rounds_ms": {"median": value}, "full_rounds_ms": {"median": value + 0.1}}
    for name, value in (("t0", 0.2), ("t08", 0.8))
}


def test_headline_has_the_documented_keys_with_and_without_a_peer() -> None:
    memory = PeakMemory(2**28, 2**26, 2**20)
    speeds = Speeds(ours=[210.0, 220.0], peer=[200.0, 200.0])
    assert decode._headline(speeds, HOST, memory) == {
        "plain_tok_s": 215.0,
        "plain_vs_onnxruntime_genai": 1.075,
        "host_ms_per_round_t0": 0.2,
        "host_ms_per_round_t08": 0.8,
        "host_ms_per_full_round_t0": 0.2 + 0.1,
        "host_ms_per_full_round_t08": 0.8 + 0.1,
        "peak_rss_mb": 256.0,
    }
    alone = decode._headline(Speeds(ours=[210.0]), HOST, None)
    assert (alone["plain_vs_onnxruntime_genai"], alone["peak_rss_mb"]) == (None, None)


def run(arguments: list[str]) -> Any:
    return CliRunner().invoke(command_line.main, arguments)


def test_last_line_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DecodeOptions] = []

    def measured(options: DecodeOptions, say: Any) -> dict[str, Any]:
        say("measuring")
        seen.append(options)
        headline = decode._headline(Speeds(ours=[210.0]), HOST, None)
        return {**headline, "machine": {"cpu": "x"}, "threads": 2, "commit": None, "host": HOST, "fidelity": None,
                "memory": None}  # fmt: skip

    monkeypatch.setattr(command_line, "measure", measured)
    for arguments in (["decode", "--json"], ["decode", "--repeats", "5"]):
        result = run(arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["plain_tok_s"] == 210.0
        assert "measuring" in result.stderr
    assert len(run(["decode", "--json"]).stdout.splitlines()) == 1
    assert seen[1].repeats == 5


def test_bad_input_is_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(command_line, "measure", refuse)
    result = run(["decode"])
    assert (result.exit_code, result.stderr) == (2, "error: no such model\n")


def test_a_speculation_row_compares_both_sides_on_every_prompt() -> None:
    from edgespec_bench.speculation import _row

    llm = LLM(TableModel(16, seed=3), prompt_lookup_min=1, num_speculative_tokens=3)
    row = _row(
        llm.variant(draft="none"), llm, [[1, 2, 1, 2], [3, 4, 3]], SamplingParams(temperature=0.0, max_tokens=40)
    )
    assert row["speedup"]["n"] == 2
    assert row["plain_tok_s"] > 0
    assert row["mean_acceptance_length"] >= 1

"""The measurements' own arithmetic, formats and protocol; nothing here measures time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from edgespec_bench.fidelity import Passage, fidelity, kl_divergence
from edgespec_bench.machine_card import commit, machine_card, versions
from edgespec_bench.prompts import KINDS, load_prompts
from edgespec_bench.spread import paired_ratio, spread
from edgespec_bench.weights_folder import llama_config

from edgespec.errors import ConfigError


def test_every_kind_of_prompt_is_there() -> None:
    prompts = [prompt for kind in KINDS for prompt in load_prompts(kind)]
    assert all(len(load_prompts(kind)) == 10 for kind in KINDS)
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


def test_the_machine_card_is_plain_data() -> None:
    card = json.loads(json.dumps({"machine": machine_card(), "versions": versions()}, allow_nan=False))
    assert card["machine"]["cores"] >= 1
    assert card["versions"]["numpy"] == np.__version__


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_weights_are_written_for_plain_llama_only() -> None:
    config = SimpleNamespace(name="m", architecture="qwen2", has_qkv_bias=True, has_qk_norm=False)
    with pytest.raises(ConfigError, match="plain Llama"):
        llama_config(config)

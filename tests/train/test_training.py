"""Each kind from a target to a zoo folder that the production decoder runs: train, interrupt, resume, measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_models.acceptance import draft_kind, held_out_prompts, measure
from edgespec_models.conversation import DataSettings
from edgespec_models.corpus import Corpus
from edgespec_models.pipeline import KINDS, Target, TrainRequest, make_corpus, train_draft
from edgespec_models.table import TableRequest, make_table

from edgespec import LLM, SamplingParams

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.train

OPTIONS: dict[str, dict[str, Any]] = {
    "tinydraft": {"layers": (0, 2)},
    "eagle": {"n_steps": 2},
    "medusa": {"n_medusa": 2},
    "exit": {"n_ff": 32},
}


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec_models.pipeline.QUICK_TOKENS", 12)
    monkeypatch.setattr("edgespec_models.pipeline.FULL_TOKENS", 12)


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.safetensors"
    settings = DataSettings(rows=12, length=64, batch=6, max_user=8, max_repetition=1.0, min_assistant=0)
    made = make_corpus(target, path, settings)
    assert made.assistant.any(1).all()
    return path


def request(kind: str, target: Target, corpus: Path, out: Path, **changes: Any) -> TrainRequest:
    settings: dict[str, Any] = {
        "steps": 3,
        "batch_rows": 4,
        "n_vocab_draft": 100,
        "checkpoint_every": 1,
        "eval_every": 2,
        "threads": 1,
        "options": OPTIONS[kind],
        "commands": ("edgespec train ...",),
    }
    return TrainRequest(kind=kind, target=target, corpora=(corpus,), out=out, **{**settings, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_trained_draft_runs(kind: str, target: Target, corpus: Path, tmp_path: Path) -> None:
    """Three steps, a zoo folder with everything in it, and the same tokens with the draft as without."""
    from edgespec_export.drafts import export_draft

    out = tmp_path / kind
    steps = []
    config = train_draft(request(kind, target, corpus, out), on_step=lambda report: steps.append(report.step))
    assert steps == [1, 2, 3]
    names = {"config.json", "weights.safetensors", "README.md", "loss.png", "acceptance.png"}
    assert {path.name for path in out.iterdir()} == names
    assert config == json.loads((out / "config.json").read_text())
    assert config["acceptance"]["mean_acceptance_length"] >= 1.0
    assert [entry["step"] for entry in config["training"]["history"]] == [2, 3]
    card = (out / "README.md").read_text()
    assert f"{config['acceptance']['mean_acceptance_length']:.2f}" in card
    assert "edgespec train ..." in card
    bundle = export_draft(out, target.folder, tmp_path / "bundle")
    prompt = held_out_prompts(Corpus.load(corpus), 1)[0]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    with LLM(target.folder, draft=draft_kind(kind), draft_model=bundle, num_speculative_tokens=2) as llm:
        drafted = llm.generate(prompt, params)[0].outputs[0]
        plain = llm.variant(draft="none").generate(prompt, params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_training_goes_on(kind: str, target: Target, corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves the last checkpoint; the resumed run reports the losses of an uninterrupted one."""
    losses: dict[str, dict[int, float]] = {"whole": {}, "broken": {}}

    def listener(name: str, stop_at: int | None) -> Any:
        def on_step(report: Any) -> None:
            losses[name][report.step] = report.loss
            if report.step == stop_at:
                raise KeyboardInterrupt

        return on_step

    settings = {"steps": 4, "eval_every": 4}
    train_draft(request(kind, target, corpus, tmp_path / "whole", **settings), on_step=listener("whole", None))
    again = request(kind, target, corpus, tmp_path / "broken", **settings)
    with pytest.raises(KeyboardInterrupt):
        train_draft(again, on_step=listener("broken", 3))
    assert (tmp_path / "broken" / "checkpoint.safetensors").is_file()
    config = train_draft(
        request(kind, target, corpus, tmp_path / "broken", resume=True, **settings), on_step=listener("broken", None)
    )
    assert config["training"]["steps"] == 4
    assert losses["broken"].keys() == losses["whole"].keys()
    for step, loss in losses["whole"].items():
        assert losses["broken"][step] == pytest.approx(loss, rel=1e-3)


def test_acceptance_counts_rounds_that_drafted(target: Target, corpus: Path, tmp_path: Path) -> None:
    """Every figure from the definition: 1 + the sum of shares by position, where all rounds draft k tokens."""
    from edgespec_export.drafts import export_draft

    out = tmp_path / "medusa"
    train_draft(request("medusa", target, corpus, out, steps=1))
    bundle = export_draft(out, target.folder, tmp_path / "bundle")
    prompts = held_out_prompts(Corpus.load(corpus), 1)
    found = measure(target.folder, bundle, "medusa", prompts, k=2, max_tokens=30, threads=1)["T = 0"]
    assert found["k"] == 2
    assert found["rounds"] > 0
    assert len(found["by_position"]) == 2
    np.testing.assert_allclose(found["mean_acceptance_length"], 1 + sum(found["by_position"]), atol=2 / found["rounds"])
    assert found["by_position"][0] >= found["by_position"][1]


def test_dropout_is_for_training_steps_alone() -> None:
    """A tenth of the inputs is left out of a training step and none of an evaluation."""
    import torch
    from edgespec_models.core import DraftCore

    class Core(DraftCore):
        start_from_target = losses = survival = lambda self, *_: None  # type: ignore[assignment]

    core = Core(None, ())  # type: ignore[arg-type]
    core.dropout = 0.1
    torch.manual_seed(0)
    ones = torch.ones(10_000)
    dropped = core.train().drop(ones)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert torch.equal(core.eval().drop(ones), ones)


def test_a_counted_table_runs(target: Target, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From corpus to card; the same corpus gives the same bytes, and the text is the target's own."""
    monkeypatch.setattr("edgespec_models.table.TOKENS", 12)
    for name in ("a", "b"):
        config = make_table(TableRequest(target, (corpus,), tmp_path / name, 2, commands=("edgespec train ...",)))
    names = ("config.json", "table.npy", "README.md")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert config["acceptance"]["mean_acceptance_length"] >= 1.0
    assert config["training"]["n_rows"] < 12
    card = (tmp_path / "a" / "README.md").read_text()
    assert "edgespec train ..." in card
    assert "| T = 0.8, top-p 0.95 | at most 4 |" in card
    prompt = held_out_prompts(Corpus.load(corpus), 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(target.folder, draft="ngram,table", draft_model=tmp_path / "a", threads=1) as llm:
        drafted = llm.generate([prompt], params)[0].outputs[0]
        assert drafted.token_ids == llm.variant(draft="none").generate([prompt], params)[0].outputs[0].token_ids

"""Drafts of a target with scaled rope: trained, kept and exported with the target's own frequencies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export import ExportOptions, export_model
from edgespec_export.drafts import export_draft
from edgespec_export.rope import RopeConfig, scaling
from edgespec_export.zoo import ZooDraft
from train_world import SCALED_ROPES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

N_ROWS, LENGTH, TAPS = 3, 48, ("layer.0", "final")


def make_target(folder: Path, rope: dict[str, Any]) -> tuple[Path, Any]:
    """A float bundle and what a core is to know of it."""
    from edgespec_export.sources import open_source
    from edgespec_models.core import Facts
    from tiny_models import tiny_config, write_hf

    source = write_hf(folder / "weights", tiny_config("llama-tied"), rope_scaling=rope)
    bundle = export_model(source, folder / "bundle", ExportOptions(name="tiny", bits=32, taps=TAPS))
    weights = open_source(source)
    return bundle, Facts(weights.config, weights.tensor)


def trained(kind: str, facts: Any, out: Path) -> tuple[Path, Any, Any]:
    """One real step; returns the zoo folder, the core with the weights of that folder, and what it was fed."""
    from edgespec_models.core import Batch
    from edgespec_models.training import CORES, TrainSetup, train

    rng = np.random.default_rng(2)
    n_vocab, width = facts.config.n_vocab, facts.n_embd
    tokens = rng.integers(0, n_vocab, (N_ROWS, LENGTH))
    features = {tap: rng.standard_normal((N_ROWS, LENGTH, width)).astype(np.float32) for tap in TAPS}
    options = {"layers": (0, 1)} if kind == "tinydraft" else {}
    taps = TAPS if kind == "eagle" else ()
    settings = {"steps": 1, "batch_rows": 2, "n_held_out": 1, "threads": 1, "n_vocab_draft": 100, "options": options}
    train(kind, TrainSetup(tokens, np.ones_like(tokens, bool), features, facts, out, taps, "tiny", **settings))
    draft, core = ZooDraft.open(out), CORES[kind](facts, taps, **options).eval()
    with torch.no_grad():
        for name, parameter in core.named_parameters():
            parameter.copy_(torch.from_numpy(draft.tensor(name)))
    row = torch.from_numpy(tokens[:1])
    embeddings = torch.from_numpy(facts.tensor("embed_tokens.weight")[tokens[:1]])
    fed = {tap: torch.from_numpy(values[:1]) for tap, values in features.items()}
    return out, core, Batch(row, torch.ones_like(row, dtype=torch.bool), embeddings, fed, torch.empty(0))


def logits_of(core: Any, batch: Any, facts: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        normed = core.rollout(batch, 1)[0] if core.kind == "eagle" else core.output(batch)
    return normed[0].numpy() @ np.asarray(facts.tensor("embed_tokens.weight"))[ids].T


def exported(zoo: Path, target: Path, out: Path, batch: Any) -> np.ndarray:
    """Logits of the exported draft over its own vocabulary, from the whole row in one call."""
    from graph_runs import Graph

    export_draft(zoo, target, out, bits=32)
    tokens, feeds = batch.tokens.numpy(), {}
    if (out / "fuse.onnx").is_file():
        joined = np.concatenate([batch.features[tap][0, :-1].numpy() for tap in TAPS], axis=-1)
        feeds["features"] = Graph(out / "fuse.onnx").run(features=joined)["hidden.fused"]
        tokens = tokens[:, 1:]
    n = tokens.shape[1]
    found = Graph(out / "model.onnx").run(0, n, input_ids=tokens, extra_ids=np.zeros(64, np.int64), **feeds)
    return found["logits"][:, :-64]


@pytest.mark.parametrize("rope", SCALED_ROPES)
@pytest.mark.parametrize("kind", ["tinydraft", "eagle"])
def test_exported_drafts_turn_as_their_target_does(kind: str, rope: str, tmp_path: Path) -> None:
    """Used to be exported with plain rope, whatever the target had and the core was trained with."""
    target, facts = make_target(tmp_path, SCALED_ROPES[rope])
    zoo, core, batch = trained(kind, facts, tmp_path / "zoo")
    draft = ZooDraft.open(zoo)
    expected = logits_of(core, batch, facts, draft.vocabulary)
    np.testing.assert_allclose(exported(zoo, target, tmp_path / "out", batch), expected, atol=1e-3)

    config = json.loads((zoo / "config.json").read_text())
    assert config.pop("rope_scaling")["kind"] == rope
    (zoo / "config.json").write_text(json.dumps(config))
    plain = exported(zoo, target, tmp_path / "plain", batch)
    assert np.abs(plain - expected).max() > 0.05, "the control: without the key the rows differ"


def test_plain_rope_leaves_no_key(tmp_path: Path) -> None:
    from edgespec_models.core import Facts
    from tiny_models import tiny_config, tiny_weights

    config = tiny_config("llama-tied")
    assert scaling(config.rope) is None
    zoo, _, _ = trained("tinydraft", Facts(config, tiny_weights(config).__getitem__), tmp_path / "zoo")
    assert "rope_scaling" not in json.loads((zoo / "config.json").read_text())
    assert ZooDraft.open(zoo).config.rope_scaling is None


@pytest.mark.parametrize(
    "rope", [RopeConfig(5e5, "llama3", 8.0, 32), RopeConfig(1e4, divisors=(1.0, 2.0)), RopeConfig(1e4, "linear", 4.0)]
)
def test_scaling_is_all_there_is_beside_theta(rope: RopeConfig) -> None:
    assert RopeConfig(rope.theta, **scaling(rope) or {}) == rope

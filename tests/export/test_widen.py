"""Wide targets: the same function before the noise, noise of the size that was asked for, and a label everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from edgespec_bench.__main__ import main as bench
from edgespec_bench.widen import targets
from edgespec_bench.widen.calibration import Agreement, agreement, calibrate, task_prompts
from edgespec_bench.widen.targets import WidenOptions
from edgespec_bench.widen.widening import DITHER, Noise, WidenedSource, widened_config
from edgespec_export import ExportOptions, export_model
from edgespec_export.config import ModelConfig, check_shapes
from edgespec_export.parity import GraphRunner
from edgespec_export.reference import ReferenceModel
from edgespec_export.sources import open_source
from tiny_models import FAMILIES, tiny_config, tiny_weights, write_hf

from edgespec import LLM, SamplingParams, pairs
from edgespec.bundle import Bundle
from edgespec.cli import main as edgespec
from edgespec.errors import ConfigError, EdgeSpecError

TEXT = [int(token) for token in np.random.default_rng(3).integers(0, 256, 100)]
LABEL = {"what": "a test"}


@dataclass
class Weights:
    """Tensors in memory as a source; only what widening reads."""

    config: ModelConfig
    tensors: dict[str, np.ndarray]

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def sha256(self) -> str:
        return "0" * 64


def source(family: str, factor: int, noise: float = 0.0, **changes: Any) -> WidenedSource:
    config = tiny_config(family, **changes)
    return WidenedSource(Weights(config, tiny_weights(config)), factor, Noise(noise), LABEL)  # type: ignore[arg-type]


def logits(config: ModelConfig, tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    return ReferenceModel(config, tensor).forward(TEXT)


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_noise_the_wide_model_computes_the_same(family: str, factor: int) -> None:
    wide = source(family, factor)
    narrow = wide.original
    expected = logits(narrow.config, narrow.tensor)
    found = logits(wide.config, wide.tensor)
    assert np.abs(found - expected).max() < 1e-4
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
    check_shapes(wide.config, {name: wide.tensor(name).shape for name in wide.shapes})
    assert wide.config.n_embd == factor * narrow.config.n_embd
    assert wide.config.n_layers == narrow.config.n_layers


def test_noise_has_its_size_and_makes_the_copies_differ() -> None:
    plain, noisy = source("llama", 2), source("llama", 2, 0.3)
    # of the layers' two copies of an input the mean is taken off, which leaves half of the square
    sizes = {"layers.1.mlp.down_proj.weight": DITHER / 2**0.5, "embed_tokens.weight": 0.3, "lm_head.weight": 0.3}
    for name, wanted in sizes.items():
        before, after = plain.tensor(name), noisy.tensor(name)
        size = np.sqrt(np.mean(np.square(after - before)) / np.mean(np.square(before)))
        assert size == pytest.approx(wanted, rel=0.05)
        half = after.shape[1] // 2
        assert not np.allclose(after[:, :half], after[:, half:], atol=1e-3)
        assert (after == noisy.tensor(name)).all(), "noise must not depend on what was read before"
    norm = "layers.0.input_layernorm.weight"
    assert np.abs(plain.tensor(norm) - noisy.tensor(norm)).max() < 1e-3
    found = logits(noisy.config, noisy.tensor)
    assert np.abs(found - logits(plain.config, plain.tensor)).max() > 0.05


@pytest.mark.parametrize("factor", [2, 3])
def test_what_sets_the_layers_copies_apart_computes_the_same(factor: int) -> None:
    """Only float16 is between them; a sum over copies that is not zero gives differences of 0.1 and more."""
    plain, noisy = source("llama", factor), source("llama", factor, 0.3)

    def layers_only(name: str) -> np.ndarray:
        return (noisy if name.startswith("layers.") else plain).tensor(name)

    difference = np.abs(logits(noisy.config, layers_only) - logits(plain.config, plain.tensor)).max()
    assert 0 < difference < 0.02


def test_the_float_graph_of_the_wide_model_has_the_same_argmax(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "narrow", tiny_config("llama-tied"))
    opened = open_source(folder)
    wide = WidenedSource(opened, 2, Noise(), LABEL)
    rows = []
    for weights, name in ((opened, "narrow"), (wide, "wide")):
        bundle = export_model(weights, tmp_path / f"{name}.bundle", ExportOptions(bits=32, tree=False))
        rows.append(GraphRunner(bundle, weights.config, n_ctx=len(TEXT)).forward(TEXT, 0).argmax(axis=1))
    assert (rows[0] == rows[1]).all()
    assert len(set(rows[0].tolist())) > 10


@pytest.mark.real_model
def test_the_real_model_widened_has_the_same_argmax_on_200_tokens(real_gguf: Path, tmp_path: Path) -> None:
    """Float graphs, teacher-forced in one call."""
    opened = open_source(real_gguf)
    from edgespec.text import Tokenizer

    text = Tokenizer.load(real_gguf).encode(" ".join(Path(__file__).read_text(encoding="utf-8").split()))[:200]
    rows = []
    for weights, name in ((opened, "narrow"), (WidenedSource(opened, 2, Noise(), LABEL), "wide")):
        bundle = export_model(weights, tmp_path / name, ExportOptions(bits=32, tree=False))
        rows.append(GraphRunner(bundle, weights.config, n_ctx=len(text)).forward(text, 0).argmax(axis=1))
    assert len(text) == 200
    assert (rows[0] == rows[1]).all()


def test_noise_is_looked_for_until_acceptance_is_as_asked() -> None:
    sizes: list[float] = []

    def measure(size: float) -> Agreement:
        sizes.append(size)
        return Agreement(1 / (1 + 8 * size**2), 1000)

    found = calibrate(measure, 0.7, 0.005, 0.0, 1.5, lambda text: None)
    assert abs(found.agreement.acceptance - 0.7) <= 0.005
    assert found.n_steps == len(sizes) <= 8
    assert found.size == sizes[-1]
    assert all(0 < size < 1.5 for size in sizes)


def test_an_acceptance_that_no_noise_gives_is_said() -> None:
    with pytest.raises(EdgeSpecError, match=r"acceptance of 0\.9 within 0\.01: it is .* ask for another --acceptance"):
        calibrate(lambda size: Agreement(0.6, 100), 0.9, 0.01, 0.0, 1.5, lambda text: None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--factor", "4"], "factor is 4: use 2 or 3"),
        (["--acceptance", "1.2"], "acceptance is 1.2: give a share"),
        (["--noise", "-1"], "noise is -1.0"),
        (["--tolerance", "0"], "tolerance is 0.0"),
        (["-m", "nothing-known"], "nothing-known"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(bench, ["widen", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A known pair `tiny-llama` in a cache of its own."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_hf(tmp_path / "weights", tiny_config("llama-tied", n_ctx=2048))
    manifests = tmp_path / "config" / "edgespec" / "models"
    manifests.mkdir(parents=True)
    (manifests / "tiny-llama.toml").write_text(
        'schema_version = 1\nname = "tiny-llama"\ndescription = "tiny"\nlicense = "Apache-2.0"\n'
        f'[target.source]\nkind = "path"\npath = {json.dumps(str(tmp_path / "weights"))}\n'
        '[target.export]\nbits = 8\nblock_size = 32\ntaps = ["layer.0", "final"]\nexit_layer = 1\n'
    )
    return "tiny-llama"


def options(pair: str, **changes: Any) -> WidenOptions:
    return WidenOptions(**{"model": pair, "n_prompts": 4, "n_tokens": 60, "threads": 1, **changes})


def nothing(*_arguments: object) -> None:
    pass


def test_a_model_agrees_with_itself_on_every_token(pair: str) -> None:
    bundle = pairs.resolve(pair)
    prompts = task_prompts(bundle, 4)
    found = agreement(bundle, bundle, prompts, 20, 1)
    assert found.acceptance == 1.0
    assert 4 <= found.n_tokens <= 80


def test_the_bundle_in_the_cache_has_the_acceptance_that_was_asked_for(pair: str) -> None:
    """Measured again on the bundle that is used, with its taps and exit, not on the one that calibration wrote."""
    made = targets.widen(options(pair, acceptance=0.5, tolerance=0.06), nothing, nothing)
    same = targets.widen(options(pair, noise=made["noise"], measure=True), nothing, nothing)
    assert same["acceptance"]["measured"] == made["acceptance"]["measured"]
    bundle, draft = pairs.resolve("tiny-llama-x2"), pairs.resolve(pair)
    again = agreement(bundle, draft, task_prompts(draft, 4), 60, 1)
    assert abs(again.acceptance - 0.5) <= 0.06
    assert made["acceptance"]["measured"] == pytest.approx(again.acceptance, abs=1e-4)
    assert made["acceptance"]["n_tokens"] == again.n_tokens
    assert made["noise"] > 0
    assert Bundle.open(bundle).info.n_embd == 128
    assert Bundle.open(bundle).info.exit_layer == 1


def test_what_is_synthetic_says_so_everywhere(pair: str) -> None:
    targets.widen(options(pair, noise=0.25, factor=3), nothing, nothing)
    info = Bundle.open(pairs.resolve("tiny-llama-x3")).info
    assert info.name == "tiny-llama-x3"
    assert info.source["synthetic"]["factor"] == 3
    assert info.synthetic is not None
    assert "widened 3 times, with noise of 0.2500" in info.synthetic
    listed = CliRunner().invoke(edgespec, ["list"], standalone_mode=False).output
    assert "SYNTHETIC, for measuring speed: tiny-llama widened 3 times" in listed
    shown = CliRunner().invoke(edgespec, ["info", "tiny-llama-x3"], standalone_mode=False).output
    assert "SYNTHETIC: tiny-llama widened 3 times" in shown
    assert "2 layers of 192, 12 heads on 6" in shown
    assert "SYNTHETIC" not in CliRunner().invoke(edgespec, ["info", pair], standalone_mode=False).output
    as_json = CliRunner().invoke(edgespec, ["info", "tiny-llama-x3", "--json"], standalone_mode=False).output
    assert json.loads(as_json)["synthetic"] == info.synthetic
    with LLM("tiny-llama-x3", draft="model", draft_model=pair, threads=1) as llm:
        output = llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
        assert any("tiny-llama-x3 is synthetic: tiny-llama widened" in note for note in output.stats.notes)
    trained = Bundle.open(pairs.resolve(pair)).info
    assert trained.synthetic is None
    assert "synthetic" not in trained.source


def test_scaled_positions_are_refused(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec_export.rope import RopeConfig

    config = tiny_config("llama", rope=RopeConfig(kind="linear", factor=2.0))
    with pytest.raises(ConfigError, match=r"scaled rotary positions \(linear\)"):
        targets._check(Weights(config, {}), "tiny")  # type: ignore[arg-type]


def test_the_wide_config_keeps_groups_of_heads_together() -> None:
    config = widened_config(tiny_config("llama"), 3)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.name) == (12, 6, 16, "llama-x3")

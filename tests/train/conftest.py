"""A tiny random Llama as target, exported with taps, tree and exit; a table of logits; small tokenizers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edgespec_models.pipeline import Target
from train_world import CHATML, END

from edgespec.text import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "export"))  # the small models of the export tests


@pytest.fixture
def table() -> np.ndarray:
    """[264, 264] logits of a babbler that ends a turn after five tokens or so."""
    logits = np.random.default_rng(3).standard_normal((264, 264)).astype(np.float32)
    logits[:, 128:] = -np.inf
    logits[:, ord("h")] = -np.inf  # the tokenizer would merge it with a t
    logits[:, END] = logits[:, :128].max(1) + np.where(np.arange(264) % 3 == 0, 0.5, -1.5)
    return logits


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Tokenizer]:
    """The tiny byte-level tokenizer with a chat template, or without."""
    from tiny_models import tokenizer_json

    def make(template: str | None) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
        (folder / "config.json").write_text('{"vocab_size": 264, "eos_token_id": 257}', encoding="utf-8")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Tokenizer.load(folder)

    return make


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A bundle of three layers with a chat template, and the folder of float weights that it was made from."""
    from edgespec_export import ExportOptions, export_model
    from tiny_models import tiny_config, write_hf

    folder = tmp_path_factory.mktemp("target")
    source = write_hf(folder / "weights", tiny_config("llama-tied", n_layers=3, windows=(None,) * 3))
    (source / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    options = ExportOptions(name="tiny", bits=8, taps=("layer.0", "layer.1", "final"), exit_layer=1)
    bundle = export_model(source, folder / "bundle", options)
    return Target(bundle, "tiny", source, threads=1)

"""The graphs that doctor tries devices with, written without the onnx package: judged by it and by running them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec.backends.onnx.devices import create_runtime
from edgespec.backends.onnx.trial_graphs import HEAD_DIM, HEADS, TRIALS, WIDTH
from edgespec.devices import Device


@pytest.mark.parametrize("what", TRIALS)
def test_they_are_valid(what: str) -> None:
    model = onnx.load_from_string(TRIALS[what]())
    if what != "tree":  # the checker does not know the operators of com.microsoft
        onnx.checker.check_model(model, full_check=True)
    assert [opset.domain for opset in model.opset_import] == ["", "com.microsoft"]


def runtime(what: str, folder: Path) -> object:
    (folder / "g.onnx").write_bytes(TRIALS[what]())
    return create_runtime(folder / "g.onnx", Device.parse("cpu"), 1)


@pytest.mark.parametrize(("what", "rows", "n_outputs"), [("fixed", 4, 1), ("open", 3, 1), ("hidden", 4, 2)])
def test_products_are_products(what: str, rows: int, n_outputs: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    results = runtime(what, tmp_path).run(None, {"x": x})  # type: ignore[attr-defined]
    assert len(results) == n_outputs
    for result in results:  # the weights are the identity
        np.testing.assert_allclose(result, x, atol=1e-6)


def test_the_attention_obeys_its_bias(tmp_path: Path) -> None:
    """Two siblings on one past token: neither sees the other, and both stand at the same place."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, WIDTH)).astype(np.float32) for _ in range(3))
    past = [rng.normal(size=(1, HEADS, 8, HEAD_DIM)).astype(np.float32) for _ in range(2)]
    angles = np.arange(16)[:, None] * 0.1 ** np.arange(HEAD_DIM // 2)
    bias = np.zeros((1, 1, 2, 3), np.float32)
    bias[0, 0, 1, 1] = np.finfo(np.float32).min
    feeds = {
        "q": q, "k": k, "v": v, "past_key": past[0], "past_value": past[1], "seqlens": np.array([2], np.int32),
        "total": np.array(3, np.int32), "cos": np.float32(np.cos(angles)), "sin": np.float32(np.sin(angles)),
        "positions": np.array([[1, 1]], np.int64), "bias": bias,
    }  # fmt: skip
    session = runtime("tree", tmp_path)
    both = session.run(["y"], feeds)[0]  # type: ignore[attr-defined]
    for row in range(2):
        alone = {name: value[:, row : row + 1] if name in "qkv" else value for name, value in feeds.items()}
        alone |= {"seqlens": np.array([1], np.int32), "total": np.array(2, np.int32)}
        alone |= {"positions": np.array([[1]], np.int64), "bias": np.zeros((1, 1, 1, 2), np.float32)}
        np.testing.assert_allclose(session.run(["y"], alone)[0][:, 0], both[:, row], atol=1e-5)  # type: ignore[attr-defined]

"""Our own attention: what it computes, beside which buffers, and what it leaves to the runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import load_model
from edgespec.backends.onnx.devices import create_runtime, find_device
from edgespec.backends.onnx.native import with_own_operators
from edgespec.errors import ConfigError
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec, tiny_logits

NATIVE, OTHERS = {"kernels": "native"}, {"kernels": "onnxruntime"}


@pytest.mark.parametrize("spec", [TinySpec(), TinySpec(n_heads=6, n_kv_heads=3, head_dim=48, n_ctx=200)])
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_is_that_of_the_definition(spec: TinySpec, threads: int, tmp_path: Path) -> None:
    """Float weights, so that attention alone is ours: whole, in calls of every width, rewound, and as trees."""
    folder = write_bundle(tmp_path, spec, tree=True)
    _, replaced = with_own_operators((folder / "model.onnx").read_bytes(), threads)
    assert replaced == {"RowsAttention": spec.n_layers}
    tokens = np.random.default_rng(4).integers(0, spec.n_vocab, spec.n_ctx).tolist()
    expected = tiny_logits(spec, tokens)
    session = load_model(folder, threads=threads, device_options=NATIVE).open_session()
    whole = session.forward(tokens).logits.copy()
    np.testing.assert_allclose(whole, expected, atol=2e-4)
    for width in (1, 2, 5, 16, 40):
        session.keep(7)
        parts = [session.forward(tokens[at : at + width]).logits.copy() for at in range(7, spec.n_ctx, width)]
        assert np.array_equal(np.concatenate(parts), whole[7:]), width
    trees = [
        load_model(folder, threads=threads, tree=True, device_options=item).open_session() for item in ({}, NATIVE)
    ]
    rows = []
    for tree in trees:
        tree.forward(tokens[:20])
        rows.append(tree.forward(tokens[20:26], parents=[-1, 0, 0, 1, 2, 2]).logits.copy())
        tree.keep(23, path=[0, 2, 5])
        rows.append(tree.forward(tokens[30:33]).logits.copy())
    np.testing.assert_allclose(rows[2], rows[0], atol=2e-4)
    np.testing.assert_allclose(rows[3], rows[1], atol=2e-4)


def test_attention_into_other_buffers_copies_what_is_cached(tmp_path: Path) -> None:
    """Past and present are one buffer in our sessions; two sequences of another program's may have two."""
    spec = TinySpec()
    path = write_bundle(tmp_path, spec) / "model.onnx"
    tokens = np.random.default_rng(5).integers(0, spec.n_vocab, (2, 12))
    shape = (2, spec.n_kv_heads, 16, spec.head_dim)
    results = []
    for options in (OTHERS, NATIVE):
        session = create_runtime(path, find_device("cpu"), 2, options=options)
        cache = {item.name: np.zeros(shape, np.float32) for item in session.get_inputs() if "past" in item.name}
        names = [item.name for item in session.get_outputs()]
        for start, end in ((0, 5), (5, 6), (6, 7)):
            rows = np.arange(2 * (end - start))
            feeds = {"input_ids": tokens[:, start:end], "seqlens_k": np.full(2, end - 1, np.int32),
                     "total_sequence_length": np.array(end, np.int32), "logits_rows": rows, **cache}  # fmt: skip
            found = dict(zip(names, session.run(None, feeds), strict=True))
            cache = {name: found[name.replace("past_key_values", "present")] for name in cache}
        results.append(found["logits"])
    np.testing.assert_allclose(results[1], results[0], atol=2e-4)


def test_more_cached_tokens_than_the_cache_holds_are_refused(tmp_path: Path) -> None:
    spec = TinySpec()
    session = create_runtime(write_bundle(tmp_path, spec) / "model.onnx", find_device("cpu"), 2, options=NATIVE)
    cache = np.zeros((1, spec.n_kv_heads, 16, spec.head_dim), np.float32)
    feeds = {item.name: cache for item in session.get_inputs() if "past" in item.name}
    feeds |= {"input_ids": np.ones((1, 1), np.int64), "seqlens_k": np.full(1, 30, np.int32),
              "total_sequence_length": np.array(31, np.int32), "logits_rows": np.zeros(1, np.int64)}  # fmt: skip
    with pytest.raises(Exception, match="RowsAttention: shapes, lengths or positions that do not fit"):
        session.run(None, feeds)


def test_graphs_in_half_precision_or_with_a_window_keep_their_attention(tmp_path: Path) -> None:
    for name, spec, options in (("half", TinySpec(), {"is_half": True}), ("window", TinySpec(window=5), {})):
        folder = write_bundle(tmp_path / name, spec, **options)
        with pytest.raises(ConfigError, match="has no effect on"):
            load_model(folder, device_options=NATIVE)


def test_heads_that_fill_no_vector_keep_their_attention(tmp_path: Path) -> None:
    """Ours would refuse every call."""
    for head_dim, count in ((8, 0), (16, 1)):
        path = write_bundle(tmp_path / str(head_dim), TinySpec(head_dim=head_dim, n_layers=1)) / "model.onnx"
        assert with_own_operators(path.read_bytes(), 2)[1]["RowsAttention"] == count

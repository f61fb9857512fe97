"""The test doubles do what they promise, since everything else is judged by them."""

from __future__ import annotations

import numpy as np
import pytest

import edgespec.testing
from edgespec.errors import CacheError, ConfigError, NumericsError
from edgespec.testing import ForwardCall, KeepCall, LatencyModel, TableModel, check_log
from edgespec.testing.latency import FakeClock
from edgespec.testing.onnx_models import quantize_matrix
from edgespec.testing.tiny import TinySpec, tiny_logits


def test_public_names() -> None:
    assert sorted(edgespec.testing.__all__) == sorted(set(edgespec.testing.__all__))
    for name in edgespec.testing.__all__:
        assert hasattr(edgespec.testing, name)


def test_rows_depend_on_seed_and_the_last_tokens() -> None:
    model = TableModel(32, seed=1, order=2)
    np.testing.assert_array_equal(model.row([9, 4, 5]), model.row([8, 4, 5]))
    np.testing.assert_array_equal(TableModel(32, seed=1).row([4, 5]), model.row([4, 5]))
    assert np.abs(TableModel(32, seed=2).row([4, 5]) - model.row([4, 5])).max() > 1
    assert np.abs(model.row([5, 4]) - model.row([4, 5])).max() > 1
    assert model.row([4]).dtype == np.float32
    assert TableModel(32, dtype=np.float64).open_session().forward([1]).logits.dtype == np.float64


def test_noise_makes_a_draft_that_is_near_its_target() -> None:
    target, near, far = TableModel(32), TableModel(32, noise=0.3), TableModel(32, noise=30)
    contexts = [[i, j] for i in range(10) for j in range(10)]

    def agreement(draft: TableModel) -> float:
        return float(np.mean([target.row(c).argmax() == draft.row(c).argmax() for c in contexts]))

    assert 0.8 < agreement(near) < 1
    assert agreement(far) < 0.3


def test_tables_and_functions() -> None:
    model = TableModel(2, table={(0,): [0.0, 1.0], (1,): [2.0, 3.0]}, order=1)
    np.testing.assert_array_equal(model.open_session().forward([0, 1, 0]).logits, [[0, 1], [2, 3], [0, 1]])
    sums = TableModel(2, table=lambda prefix: [sum(prefix), len(prefix)])
    session = sums.open_session()
    session.forward([1, 1])
    np.testing.assert_array_equal(session.forward([1, 0]).logits, [[3, 3], [3, 4]])
    with pytest.raises(ConfigError, match="shape"):
        TableModel(3, table={(0,): [0.0, 1.0]}, order=1).row([0])


def test_the_log_shows_every_call() -> None:
    model = TableModel(16)
    first, second = model.open_session(), model.open_session()
    first.forward([1, 2, 3], logits_rows=[2])
    second.forward([4], taps=["final"])
    first.keep(2)
    first.forward([5, 6], parents=[-1, -1])
    first.keep(3, path=[1])
    assert model.log == [
        ForwardCall(0, 0, (1, 2, 3), (2,)),
        ForwardCall(1, 0, (4,), (0,), taps=("final",)),
        KeepCall(0, 3, 2),
        ForwardCall(0, 2, (5, 6), (0, 1), parents=(-1, -1)),
        KeepCall(0, 4, 3, (1,)),
    ]
    assert len(model.forwards) == 3
    assert len(model.keeps) == 2
    assert first.tokens == [1, 2, 6]
    check_log(model)
    model.log.append(ForwardCall(0, 5, (1,), (0,)))
    with pytest.raises(AssertionError, match="forward at 5, the cache held 3"):
        check_log(model)


def test_max_rewind_counts_from_the_longest_cache() -> None:
    session = TableModel(16, max_rewind=4).open_session()
    session.forward([1] * 10)
    session.keep(8)
    with pytest.raises(CacheError, match="from 10 back to 5 tokens is more than the 4"):
        session.keep(5)
    session.keep(6)
    session.keep(0)
    session.forward([1, 2])
    session.keep(1)


def test_refusals() -> None:
    session = TableModel(16, refuse_keep=True).open_session()
    assert session.model.info.max_rewind is None, "a backend that refuses without having said so"
    session.forward([1, 2, 3])
    session.keep(3)
    with pytest.raises(CacheError, match="refused to go back from 3 to 2"):
        session.keep(2)
    assert session.n_past == 3
    session.keep(0)
    assert session.n_past == 0
    with pytest.raises(ConfigError, match="2 rows in one call, it takes at most 1"):
        TableModel(16, max_rows=1).open_session().forward([1, 2])
    with pytest.raises(ConfigError, match="cannot run trees"):
        TableModel(16, tree=False).open_session().forward([1, 2], parents=[-1, -1])
    with pytest.raises(ConfigError, match="parents"):
        TableModel(16).open_session().forward([1, 2], parents=[-1, 1])
    tree = TableModel(16).open_session()
    tree.forward([1, 2], parents=[-1, -1])
    with pytest.raises(CacheError, match="keep a path"):
        tree.forward([3])


def test_nan_at_a_position() -> None:
    session = TableModel(16, nan_at=[2]).open_session()
    session.forward([1, 1])
    with pytest.raises(NumericsError, match="after position 2"):
        session.forward([1])
    session.forward([1], logits_rows=[])
    assert np.isfinite(session.forward([1]).logits).all()
    assert np.isnan(TableModel(16, nan_at=[0], guard=False).open_session().forward([1]).logits).all()


def test_minus_infinity_of_some_tokens_is_fine_and_of_all_is_not() -> None:
    session = TableModel(2, table={(0,): [-np.inf, 1.0], (1,): [-np.inf, -np.inf]}, order=1).open_session()
    session.forward([0])
    with pytest.raises(NumericsError, match="maximum -inf"):
        session.forward([1])


def test_latency_is_charged_by_row() -> None:
    clock = FakeClock()
    model = LatencyModel(TableModel(16), 0.01, 0.002, clock=clock, sleep=clock.sleep)
    session = model.open_session()
    assert session.forward([1, 2, 3]).run_s == pytest.approx(0.016)
    assert session.forward([1]).run_s == pytest.approx(0.012)
    session.keep(2)
    assert session.n_past == 2
    assert clock.now_s == pytest.approx(0.01 * 2 + 0.002 * 4)
    assert (model.n_calls, dict(model.rows), model.cost_s) == (2, {3: 1, 1: 1}, pytest.approx(clock.now_s))
    assert model.info is model.model.info


def test_latency_is_a_minimum_and_jitters_by_seed() -> None:
    clock = FakeClock()
    slow = TableModel(2, table=lambda prefix: clock.sleep(0.5) or [0.0, 1.0])
    LatencyModel(slow, 0.2, clock=clock, sleep=clock.sleep).open_session().forward([1])
    assert clock.now_s == pytest.approx(0.5)
    costs = []
    for seed in (1, 1, 2):
        model = LatencyModel(TableModel(16), 1.0, jitter=0.1, seed=seed, clock=clock, sleep=clock.sleep)
        session = model.open_session()
        for _ in range(20):
            session.forward([1])
        costs.append(model.cost_s)
        assert 18 < model.cost_s < 22
    assert costs[0] == costs[1] != costs[2]


def test_quantized_blocks_decode_to_what_is_packed() -> None:
    matrix = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    matrix[:16, 1] = 0
    packed, scales, decoded = quantize_matrix(matrix, 16)
    assert packed.shape == (3, 2, 8)
    assert scales.shape == (6,)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 2, 16).astype(np.float32) - 8
    np.testing.assert_array_equal((codes * scales.reshape(3, 2, 1)).reshape(3, 32).T, decoded)
    assert np.abs(decoded - matrix).max() <= np.abs(scales).max() * 1.0001


def test_the_reference_sees_only_its_window() -> None:
    spec = TinySpec(window=3, n_layers=1)
    one, other = tiny_logits(spec, [1, 2, 3, 4, 5]), tiny_logits(spec, [9, 9, 3, 4, 5])
    np.testing.assert_allclose(one[-1], other[-1], atol=1e-12)
    assert np.abs(one[-2] - other[-2]).max() > 1e-3

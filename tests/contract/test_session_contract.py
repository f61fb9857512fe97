"""What every session has to do: the cache is a prefix, rows belong to their tokens, lengths add up."""

from __future__ import annotations

import numpy as np
import pytest
from contract_cases import Case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from edgespec.backends.onnx.split import SplitSession
from edgespec.errors import CacheError, ConfigError
from edgespec.types import FloatArray, Session

TOKENS = np.random.default_rng(5).integers(0, 64, 90).tolist()


def same(case: Case, logits: FloatArray, prefix: list[int], n_rows: int) -> None:
    """`logits` are the last `n_rows` rows of `prefix`."""
    assert logits.shape == (n_rows, case.model.info.n_vocab)
    np.testing.assert_allclose(logits, case.truth(prefix)[len(prefix) - n_rows :], atol=case.atol, rtol=0)


@pytest.fixture
def session(case: Case) -> Session:
    return case.model.open_session()


def test_one_pass_is_the_truth(case: Case, session: Session) -> None:
    same(case, session.forward(TOKENS[:40]).logits, TOKENS[:40], 40)


def test_two_calls_equal_one(case: Case, session: Session) -> None:
    first = session.forward(TOKENS[:7]).logits.copy()
    second = session.forward(TOKENS[7:20]).logits
    assert session.n_past == 20
    same(case, np.concatenate([first, second]), TOKENS[:20], 20)


@pytest.mark.parametrize("n_past", [0, 1, 9])
@pytest.mark.parametrize("n_rows", [1, 2, 5, 33])
def test_rows_on_a_past(case: Case, session: Session, n_past: int, n_rows: int) -> None:
    """A verify call has several rows on a cached prefix; exporters' masks used to be right for only one of them."""
    if n_past:
        session.forward(TOKENS[:n_past], logits_rows=())
    same(case, session.forward(TOKENS[n_past : n_past + n_rows]).logits, TOKENS[: n_past + n_rows], n_rows)


def test_every_width(case: Case, session: Session) -> None:
    done = 0
    for width in range(1, 10):
        same(case, session.forward(TOKENS[done : done + width]).logits, TOKENS[: done + width], width)
        done += width


def test_rewind_then_other_tokens_equal_a_fresh_session(case: Case, session: Session) -> None:
    base = TOKENS[:6]
    session.forward(base)
    for keep in (5, 3, 0):
        session.keep(6)
        session.forward(TOKENS[10:15])
        session.keep(6 + keep)
        assert session.n_past == 6 + keep
        other = TOKENS[20:26]
        same(case, session.forward(other).logits, base + TOKENS[10 : 10 + keep] + other, 6)
        session.keep(6)
    session.keep(0)
    same(case, session.forward(TOKENS[30:40]).logits, TOKENS[30:40], 10)


def test_rewind_right_after_a_rewind(case: Case, session: Session) -> None:
    session.forward(TOKENS[:12])
    session.keep(9)
    session.keep(4)
    same(case, session.forward(TOKENS[50:53]).logits, TOKENS[:4] + TOKENS[50:53], 3)


@pytest.mark.parametrize("rows", [[], [0], [4], [1, 3], [4, 0], [2, 3, 4], [3, 3]])
def test_wanted_rows(case: Case, session: Session, rows: list[int]) -> None:
    session.forward(TOKENS[:3])
    logits = session.forward(TOKENS[3:8], logits_rows=rows).logits
    assert logits.shape == (len(rows), case.model.info.n_vocab)
    np.testing.assert_allclose(logits, case.truth(TOKENS[:8])[3:][rows], atol=case.atol, rtol=0)
    same(case, session.forward(TOKENS[8:9]).logits, TOKENS[:9], 1)


def test_sessions_are_independent(case: Case) -> None:
    sessions = [case.model.open_session() for _ in range(3)]
    texts: list[list[int]] = [[], [], []]
    for step in range(4):
        for index, session in enumerate(sessions):
            piece = TOKENS[7 * index + step : 7 * index + step + 2 + index]
            texts[index] += piece
            same(case, session.forward(piece).logits, texts[index], len(piece))
    sessions[0].close()
    same(case, sessions[1].forward([1]).logits, [*texts[1], 1], 1)


def test_a_path_along_a_chain(case: Case, session: Session) -> None:
    session.forward(TOKENS[:4])
    session.forward(TOKENS[4:9])
    session.keep(6, path=[0, 1])
    same(case, session.forward([7, 8]).logits, [*TOKENS[:6], 7, 8], 2)


def test_wrong_paths_are_refused(case: Case, session: Session) -> None:
    session.forward(TOKENS[:5])
    for n_past, path in ((2, [0, 2]), (1, [1]), (3, [0, 1]), (1, [5])):
        with pytest.raises(CacheError, match="path"):
            session.keep(n_past, path=path)
    assert session.n_past == 5


def test_context_is_named_with_both_numbers(case: Case, session: Session) -> None:
    session.forward(TOKENS[:90], logits_rows=())
    with pytest.raises(ConfigError, match=r"90 cached \+ 7 new tokens exceed the context of 96"):
        session.forward(TOKENS[:7])
    assert session.n_past == 90
    same(case, session.forward(TOKENS[:6]).logits, TOKENS + TOKENS[:6], 6)


def test_bad_calls_are_refused_and_change_nothing(case: Case, session: Session) -> None:
    session.forward(TOKENS[:4])
    with pytest.raises(ConfigError, match="at least one token"):
        session.forward([])
    n_vocab = case.model.info.n_vocab
    with pytest.raises(ConfigError, match=f"token id {n_vocab} is outside the vocabulary of {n_vocab}"):
        session.forward([1, n_vocab])
    with pytest.raises(ConfigError, match="token id -1"):
        session.forward([-1])
    with pytest.raises(ConfigError, match="logits_rows"):
        session.forward([1, 2], logits_rows=[2])
    with pytest.raises(ConfigError, match="no tap 'nothing'"):
        session.forward([1], taps=["nothing"])
    for n_past in (-1, 5):
        with pytest.raises(CacheError, match=rf"cannot keep {n_past} of 4"):
            session.keep(n_past)
    same(case, session.forward([9]).logits, [*TOKENS[:4], 9], 1)


def test_a_closed_session_is_refused(case: Case, session: Session) -> None:
    session.forward([1, 2])
    session.close()
    session.close()
    with pytest.raises(CacheError, match="closed"):
        session.forward([1])


def branches(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


TREES = [
    [-1, 0, 0, 2],
    [-1, -1, -1],  # several roots
    [-1, 0, 1, 0, 3, 3, -1, 6, 4],
    [-1, -1, 0, 1, 0, 1, 2, 3],  # level by level
]


def test_trees_run_or_are_refused(case: Case, session: Session) -> None:
    session.forward(TOKENS[:3])
    call = {"tokens": [10, 11, 12, 13], "parents": TREES[0]}
    if not case.model.info.tree:
        with pytest.raises(ConfigError, match="tree"):
            session.forward(**call)
        same(case, session.forward([10]).logits, [*TOKENS[:3], 10], 1)
        return
    session.forward(**call)
    with pytest.raises(CacheError, match="path"):
        session.keep(5)
    with pytest.raises(CacheError, match="tree pass is cached"):
        session.forward([5])
    for n_past, path in ((5, [0, 3]), (5, [0, 1, 2]), (6, [0, 1])):
        with pytest.raises(CacheError, match="path"):
            session.keep(n_past, path=path)
    session.keep(6, path=[0, 2, 3])
    same(case, session.forward([5]).logits, [*TOKENS[:3], 10, 12, 13, 5], 1)
    session.keep(2)
    same(case, session.forward([6]).logits, [*TOKENS[:2], 6], 1)


@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("n_past", [0, 1, 11])
def test_each_branch_of_a_tree_is_that_branch_alone(
    case: Case, session: Session, parents: list[int], n_past: int
) -> None:
    if not case.model.info.tree:
        return
    prefix, nodes = TOKENS[:n_past], TOKENS[30 : 30 + len(parents)]
    for leaf in range(-1, len(parents)):
        session.keep(0)
        if prefix:
            session.forward(prefix, logits_rows=())
        logits = session.forward(nodes, parents=parents).logits
        for row, branch in zip(logits, branches(nodes, parents), strict=True):
            np.testing.assert_allclose(row, case.truth([*prefix, *branch])[-1], atol=case.atol, rtol=0)
        path = path_to(leaf, parents)
        session.keep(n_past + len(path), path=path)
        kept = [*prefix, *(nodes[index] for index in path)]
        same(case, session.forward([1, 2, 3]).logits, [*kept, 1, 2, 3], 3)


def test_a_tree_may_begin_with_a_chain_and_want_some_rows(case: Case, session: Session) -> None:
    """A verify call: tokens that are still pending, then the tree behind the last of them."""
    if not case.model.info.tree:
        return
    session.forward(TOKENS[:5])
    nodes, parents = TOKENS[5:11], [-1, 0, 1, 1, 2, 3]
    logits = session.forward(nodes, parents=parents, logits_rows=[1, 3, 5]).logits.copy()
    for row, node in zip(logits, [1, 3, 5], strict=True):
        prefix = [*TOKENS[:5], *branches(nodes, parents)[node]]
        np.testing.assert_allclose(row, case.truth(prefix)[-1], atol=case.atol, rtol=0)
    session.keep(8, path=[0, 1, 3])
    same(case, session.forward([9]).logits, [*TOKENS[:7], nodes[3], 9], 1)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1], [-1, 0, -2], [-1, 0, 1, 2]])
def test_parents_that_describe_no_tree(case: Case, session: Session, parents: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"parents .* do not describe a tree|cannot run trees"):
        session.forward([1, 2, 3], parents=parents)
    same(case, session.forward([4]).logits, [4], 1)


def test_taps_have_a_row_for_every_token(case: Case, session: Session) -> None:
    for tap in case.model.info.taps:
        session.keep(0)
        whole = session.forward(TOKENS[:9], taps=[tap]).hidden[tap].copy()
        assert whole.shape[0] == 9
        session.keep(4)
        part = session.forward(TOKENS[4:9], logits_rows=[4], taps=[tap]).hidden[tap]
        np.testing.assert_allclose(part, whole[4:], atol=max(case.atol, 1e-6))
        assert not session.forward([1]).hidden


class Machine(RuleBasedStateMachine):
    """Any order of forward, keep, close and reopen: the cache stays the list of tokens that it should be."""

    case: Case

    @initialize()
    def start(self) -> None:
        self.session = self.case.model.open_session()
        self.tokens: list[int] = []

    @precondition(lambda self: len(self.tokens) < self.case.model.info.n_ctx)
    @rule(data=st.data(), wants_all=st.booleans())
    def forward(self, data: st.DataObject, wants_all: bool) -> None:
        room = self.case.model.info.n_ctx - len(self.tokens)
        piece = data.draw(st.lists(st.integers(0, 3) | st.integers(0, 63), min_size=1, max_size=min(12, room)))
        rows = None if wants_all else [len(piece) - 1]
        logits = self.session.forward(piece, logits_rows=rows).logits
        self.tokens += piece
        same(self.case, logits, self.tokens, len(piece) if wants_all else 1)
        assert self.session.n_past == len(self.tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        n_past = data.draw(st.integers(0, len(self.tokens)))
        self.session.keep(n_past)
        del self.tokens[n_past:]

    @precondition(lambda self: self.case.model.info.tree and len(self.tokens) < self.case.model.info.n_ctx - 8)
    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        nodes = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=8))
        parents = [data.draw(st.integers(-1, index - 1)) for index in range(len(nodes))]
        logits = self.session.forward(nodes, parents=parents).logits
        at = data.draw(st.integers(0, len(nodes) - 1))
        truth = self.case.truth([*self.tokens, *branches(nodes, parents)[at]])[-1]
        np.testing.assert_allclose(logits[at], truth, atol=self.case.atol, rtol=0)
        path = path_to(data.draw(st.integers(-1, len(nodes) - 1)), parents)
        self.tokens += [nodes[index] for index in path]
        self.session.keep(len(self.tokens), path=path)
        assert self.session.n_past == len(self.tokens)

    @precondition(lambda self: isinstance(self.session, SplitSession) and len(self.tokens) < 80)
    @rule(data=st.data())
    def exit_rows(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            piece = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
            assert len(self.session.exit_rows(piece)[0]) == len(piece)

    @rule()
    def reopen(self) -> None:
        self.session.close()
        self.start()


def test_any_order_of_calls(case: Case) -> None:
    machine = type("Machine_", (Machine,), {"case": case})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    rounds = settings(
        max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=checks, database=None
    )
    run_state_machine_as_test(machine, settings=rounds)

"""Graphs of fixed shapes as target and as draft of the production decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export import StaticOptions, export_static
from export.tiny_models import tiny_config, write_hf
from npu.emulator import blind_logits

from edgespec.backends import load_model
from edgespec.backends.onnx.static import StaticSession
from edgespec.backends.onnx.static_model import StaticModel
from edgespec.engine.exact import probe_exact_rows
from edgespec.errors import BackendError, ConfigError, NumericsError
from edgespec.llm import LLM
from edgespec.sampling import SamplingParams
from edgespec.types import ExactRows

PROMPT = [5, 9, 14, 5, 9, 14, 5, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("static")
    source = write_hf(path / "source", tiny_config("llama", n_ctx=64))
    return export_static(source, path / "bundle", StaticOptions(widths=(1, 2, 4), n_ctx=64, taps=("final",)))


@pytest.fixture(scope="module")
def model(folder: Path) -> StaticModel:
    loaded = load_model(folder, threads=1)
    assert isinstance(loaded, StaticModel)
    return loaded


def widths_of(monkeypatch: pytest.MonkeyPatch, model: StaticModel) -> list[int]:
    """The widths of the graphs that run from now on."""
    from edgespec.backends.onnx import static

    ran: list[int] = []
    plain = static._Binding.run

    def run(self: static._Binding) -> float:
        ran.append(self.inputs["embeddings"].shape[1])
        return plain(self)

    monkeypatch.setattr(static._Binding, "run", run)
    return ran


def test_the_narrowest_graph_that_fits_runs(model: StaticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = widths_of(monkeypatch, model)
    session = model.open_session()
    for n, expected in ((1, [1]), (2, [2]), (3, [4]), (4, [4]), (9, [4, 4, 1])):
        session.keep(0)
        ran.clear()
        session.forward(list(range(n)))
        assert ran == expected
    session.exact = ExactRows(1, 4)
    ran.clear()
    session.forward([1])
    session.forward([1, 2, 3, 4, 5])
    assert ran == [4, 4, 4]


def test_rejected_tokens_are_caught_up_in_one_call(model: StaticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.open_session()
    session.forward(PROMPT)
    session.forward([1, 2, 3])
    ran = widths_of(monkeypatch, model)
    session.keep(9)
    session.forward([7, 8, 9])
    assert ran == [4]


def test_one_width_gives_rows_whose_bits_do_not_depend_on_the_call(model: StaticModel) -> None:
    report = probe_exact_rows(model)
    assert report.exact == ExactRows(1, 4)
    assert report.single_row_max_abs_diff == 0
    session = model.open_session()
    session.exact = report.exact
    tokens = np.random.default_rng(3).integers(0, 264, 30).tolist()
    whole = session.forward(tokens).logits.copy()
    session.keep(0)
    for n in (1, 3, 2, 4, 4, 1, 7, 8):
        start = session.n_past
        np.testing.assert_array_equal(session.forward(tokens[start : start + n]).logits, whole[start : start + n])


def test_the_probe_sees_rows_that_depend_on_their_place(model: StaticModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: keys that stand in another place of the cache change the order of the sums."""
    plain = StaticSession._run

    def noisy(self: StaticSession, n_past: int, tokens: list[int], *rest: object) -> object:
        rows = plain(self, n_past, tokens, *rest)  # type: ignore[arg-type]
        rows.logits += np.float32(len(tokens) * 1e-6)
        return rows

    monkeypatch.setattr(StaticSession, "_run", noisy)
    assert probe_exact_rows(model).exact is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_text_is_plain_decodings(folder: Path, temperature: float, draft: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    options = {"draft_model": folder} if draft == "model" else {}
    with LLM(folder, draft=draft, num_speculative_tokens=3, **options) as llm:
        assert llm.exact == ExactRows(1, 4)
        fast = llm.generate(PROMPT, params)[0].outputs[0]
        plain = llm.variant(draft="none").generate(PROMPT, params)[0].outputs[0]
    assert fast.token_ids == plain.token_ids
    assert len(fast.token_ids) == 24


def test_trees_run_on_it(folder: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM(folder, draft="ngram", tree=True, tree_rows=3, exact=False) as llm:
        assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize(("options", "n_asked"), [
    ({"num_speculative_tokens": 5}, 5),
    ({"tree": True, "tree_rows": 16}, 16),
    ({"num_speculative_tokens": 3}, None),
])  # fmt: skip
def test_fewer_drafted_tokens_than_asked_for_are_said(
    folder: Path, options: dict[str, Any], n_asked: int | None
) -> None:
    """The widest graph cut them without a word."""
    with LLM(folder, draft="ngram", exact=False, **options) as llm:
        notes = llm.generate(PROMPT, SamplingParams(max_tokens=4))[0].stats.notes
    said = f"at most 3 drafted tokens a round and not {n_asked}, as the target takes 4 rows a call"
    assert notes == ([] if n_asked is None else [said])


def test_a_target_of_one_row_says_how_it_decodes(tmp_path: Path) -> None:
    """It said to draft fewer than none."""
    source = write_hf(tmp_path / "source", tiny_config("llama", n_ctx=32))
    one = export_static(source, tmp_path / "one", StaticOptions(widths=(1,)))
    with pytest.raises(ConfigError, match=r"hold up to 0 drafted tokens, so use draft='none'"):
        LLM(one)
    with LLM(one, draft="none") as llm:
        assert len(llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_an_interrupt_while_keys_are_stored_leaves_nothing_behind(
    model: StaticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored before it was added to the keys of the next call."""
    from edgespec.backends.onnx import static

    whole = model.open_session().forward(PROMPT[:4]).logits.copy()
    session = model.open_session()
    plain = static._Binding.run

    def run(self: static._Binding) -> float:
        seconds = plain(self)
        del self.outputs["present.1.value"]  # the last to be stored: the others are by then
        return seconds

    with monkeypatch.context() as patch:
        patch.setattr(static._Binding, "run", run)
        with pytest.raises(BackendError):
            session.forward([7, 7, 7, 7])
    session._bindings.clear()
    np.testing.assert_array_equal(session.forward(PROMPT[:4]).logits, whole)


def test_a_prompt_over_the_limit_names_both_numbers(folder: Path, model: StaticModel) -> None:
    """CASES 18."""
    with (
        LLM(folder) as llm,
        pytest.raises(ConfigError, match=r"prompt has 70 tokens, the context holds 64: .*--context"),
    ):
        llm.generate([1] * 70, SamplingParams(max_tokens=2))
    session = model.open_session()
    with pytest.raises(ConfigError, match="exceed the context of 64"):
        session.forward([1] * 65)
    with pytest.raises(ConfigError, match=r"n_ctx is 128, allowed are 1\.\.64"):
        load_model(folder, n_ctx=128)
    with pytest.raises(ConfigError, match=r"a tree of 5 tokens, and its widest graph takes 4 rows"):
        session.forward([1] * 5, parents=[-1, -1, 0, 1, 2])


def test_a_prompt_over_the_drafts_limit_is_noted(folder: Path, tmp_path: Path) -> None:
    """The draft's graphs hold less than the target's: nothing is drafted, the text goes on, and a note names both."""
    source = write_hf(tmp_path / "source", tiny_config("llama", n_ctx=64))
    small = export_static(source, tmp_path / "small", StaticOptions(widths=(4,), n_ctx=16))
    with LLM(folder, draft_model=small) as llm:
        output = llm.generate([7] * 20, SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 6
    assert output.stats.drafted == 0
    assert "no draft from the model: the prompt has 20 tokens, its context holds 16" in output.stats.notes


def test_a_row_that_sees_nothing_stays_finite(model: StaticModel) -> None:
    """CASES 34: a mask of minus infinity makes the softmax of such a row NaN, and so its keys in the layers above."""
    session = model.open_session()
    assert np.isfinite(blind_logits(session, session._tables.mask)).all()
    assert np.isnan(blind_logits(session, -np.inf)).any()  # what would happen


def test_a_graph_that_gives_nan_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 34: not token 0 for ever, whether it is the target or, unless strict is set, only the draft."""
    from edgespec.backends.onnx import static

    plain = static._Binding.run

    def run(self: static._Binding) -> float:
        seconds = plain(self)
        self.outputs["logits"][...] = np.nan
        return seconds

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(folder, draft="none") as llm:
        expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        monkeypatch.setattr(static._Binding, "run", run)
        with pytest.raises(NumericsError, match="maximum nan"):
            llm.generate([*PROMPT, 3], params)
    assert len(expected) == 8

"""What only llama.cpp has: caches that refuse a removal, several sequences in one context, files it must not see."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llama_models import WINDOW, write_recurrent, write_windowed

from edgespec.backends import load_model
from edgespec.errors import (
    BackendError,
    CacheError,
    ConfigError,
    FormatError,
    IncompatibleError,
    NumericsError,
)
from edgespec.testing.gguf_models import write_gguf
from edgespec.testing.tiny import TinySpec, tiny_logits, tiny_weights
from edgespec.types import Forward

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'")

SPEC = TinySpec()
TOKENS = np.random.default_rng(5).integers(0, 64, 900).tolist()
FLOATS = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}


def load(path: Path, threads: int = 1, n_ctx: int | None = None, **options: str):
    return load_model(path, device="llamacpp:cpu", threads=threads, n_ctx=n_ctx, device_options=options)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", SPEC)


def fresh(model, tokens: list[int]) -> np.ndarray:
    """Logits of the last token of one pass in a new session."""
    session = model.open_session()
    logits = session.forward(tokens, logits_rows=[len(tokens) - 1]).logits[0].copy()
    session.close()
    return logits


# --- removals that do not do what was asked ---------------------------------------------------------------------------


def test_a_window_that_moved_on_is_noticed_by_the_positions_that_are_left(tmp_path: Path) -> None:
    """llama.cpp answers True to a removal after which the window's layer no longer holds what the next token sees."""
    model = load(write_windowed(tmp_path / "window.gguf"), swa_full="off")
    assert model.info.max_rewind == 256
    session = model.open_session()
    for start in range(0, 900, 100):
        session.forward(TOKENS[start : start + 100], logits_rows=())
    session.keep(896)  # within the last call: all there
    np.testing.assert_allclose(session.forward(TOKENS[896:898]).logits[1], fresh(model, TOKENS[:898]), atol=0.02)
    with pytest.raises(CacheError, match=r"of 20 tokens to keep, llama.cpp's cache holds the positions"):
        session.keep(20)
    with pytest.raises(CacheError, match="of 20 tokens to keep"):  # what is left is of no use
        session.forward([1])
    session.keep(0)
    np.testing.assert_allclose(session.forward(TOKENS[:30]).logits[29], fresh(model, TOKENS[:30]), atol=0.02)


def test_a_window_held_whole_takes_back_any_number(tmp_path: Path) -> None:
    model = load(write_windowed(tmp_path / "window.gguf"))
    assert model.info.max_rewind is None
    session = model.open_session()
    for start in range(0, 900, 100):
        session.forward(TOKENS[start : start + 100], logits_rows=())
    session.keep(3 * WINDOW)
    again = session.forward(TOKENS[24:40]).logits[15]
    np.testing.assert_allclose(again, fresh(model, TOKENS[:40]), atol=0.02)
    other = fresh(model, [1, *TOKENS[1:40]])
    assert np.abs(again - other).max() > 0.1  # the whole text counts, by way of the layer without a window


def test_a_recurrent_state_refuses_and_stays_usable(tmp_path: Path) -> None:
    model = load(write_recurrent(tmp_path / "mamba.gguf"))
    assert model.info.max_rewind == 0
    session = model.open_session()
    session.forward(TOKENS[:10])
    with pytest.raises(CacheError, match="cannot take back 3 of 10 tokens"):
        session.keep(7)
    session.keep(0)
    np.testing.assert_allclose(session.forward(TOKENS[:7]).logits[6], fresh(model, TOKENS[:7]), atol=1e-4)


# --- several sequences ------------------------------------------------------------------------------------------------


def test_one_context_holds_several_sequences_and_another_is_opened_when_it_is_full(gguf: Path) -> None:
    model = load(gguf, sequences="2", **FLOATS)
    sessions = [model.open_session() for _ in range(3)]
    assert sessions[0].context is sessions[1].context
    assert sessions[2].context is not sessions[0].context
    sessions[0].close()
    again = model.open_session()
    assert again.context is sessions[1].context
    assert again.n_past == 0
    np.testing.assert_allclose(again.forward(TOKENS[:9]).logits, tiny_logits(SPEC, TOKENS[:9]), atol=1e-4)


def test_a_forgotten_session_gives_its_place_back(gguf: Path) -> None:
    model = load(gguf, sequences="2")
    first, second = model.open_session(), model.open_session()
    context = first.context
    second.forward([5, 6, 7])
    del second
    gc.collect()
    assert context.unused
    np.testing.assert_allclose(model.open_session().forward([9]).logits, first.forward([9]).logits, atol=1e-5)


@pytest.mark.parametrize("sequences", ["1", "4"])
def test_a_batch_of_sequences_gives_what_each_gives_alone(gguf: Path, sequences: str) -> None:
    model = load(gguf, sequences=sequences, **FLOATS)
    sessions = [model.open_session() for _ in range(4)]
    texts: list[list[int]] = [[], [], [], []]
    weights = tiny_weights(SPEC)
    for turn in range(3):
        requests = []
        for index, session in enumerate(sessions):
            piece = TOKENS[20 * index + 5 * turn :][: 1 + (index + turn) % 4]
            texts[index] += piece
            rows = [] if index == 3 and turn == 0 else [len(piece) - 1, 0] if index == 2 else None
            requests.append(Forward(session, piece, logits_rows=rows))
        for request, text, rows in zip(requests, texts, model.forward_batch(requests), strict=True):
            truth = tiny_logits(SPEC, text, weights)[len(text) - len(request.tokens) :]
            wanted = range(len(request.tokens)) if request.logits_rows is None else request.logits_rows
            np.testing.assert_allclose(rows.logits, truth[list(wanted)], atol=1e-4)
        sessions[1].keep(sessions[1].n_past - 1)
        texts[1].pop()


def test_a_batch_longer_than_a_pass_is_run_in_several(tmp_path: Path) -> None:
    spec = TinySpec(n_ctx=512)
    model = load(write_gguf(tmp_path / "long.gguf", spec), sequences="2", **FLOATS)
    sessions = [model.open_session() for _ in range(2)]
    pieces = [TOKENS[:300], TOKENS[300:500]]
    rows = model.forward_batch(
        [Forward(s, p, logits_rows=[0, len(p) - 1]) for s, p in zip(sessions, pieces, strict=True)]
    )
    for piece, result in zip(pieces, rows, strict=True):
        np.testing.assert_allclose(result.logits, tiny_logits(spec, piece)[[0, -1]], atol=0.02)


def test_batches_that_cannot_be_are_refused_and_change_nothing(gguf: Path) -> None:
    model, other = load(gguf, sequences="2"), load(gguf)
    first, second = model.open_session(), model.open_session()
    for requests, message in (
        ([Forward(first, [1]), Forward(first, [2])], "each session once"),
        ([Forward(first, [1]), Forward(other.open_session(), [2])], "sessions of this model only"),
        ([Forward(first, [1]), Forward(second, [99])], "token id 99"),
        ([Forward(first, [1, 2], parents=[-1, -1])], "tree"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.forward_batch(requests)
    assert (first.n_past, second.n_past) == (0, 0)


def test_sessions_of_one_context_on_several_threads(gguf: Path) -> None:
    model = load(gguf, sequences="4", **FLOATS)
    results: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        session, text = model.open_session(), []
        for step in range(25):
            piece = TOKENS[index * 60 + step * 2 :][:2]
            text += piece
            results[index] = session.forward(piece).logits[-1].copy()
            if step % 5 == 4:
                session.keep(session.n_past - 1)
                del text[-1]
                text += piece[-1:]
                session.forward(piece[-1:])
        results[index] = np.stack([results[index], tiny_logits(SPEC, text)[-1]])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        np.testing.assert_allclose(*results[index], atol=1e-4)


def test_the_number_of_threads_changes_no_meaning(gguf: Path) -> None:
    one, two = load(gguf, 1, **FLOATS), load(gguf, 2, **FLOATS)
    np.testing.assert_allclose(fresh(one, TOKENS[:40]), fresh(two, TOKENS[:40]), atol=1e-4)
    assert one.content_key != two.content_key


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_closed_model_opens_no_session_and_lets_open_ones_finish(gguf: Path) -> None:
    model = load(gguf, **FLOATS)
    session = model.open_session()
    session.forward(TOKENS[:3])
    model.close()
    with pytest.raises(BackendError, match="the model is closed"):
        model.open_session()
    np.testing.assert_allclose(session.forward(TOKENS[3:5]).logits, tiny_logits(SPEC, TOKENS[:5])[3:], atol=1e-4)
    session.close()
    with pytest.raises(CacheError, match="closed"):
        session.forward([1])
    model.close()


def test_damaged_files_are_named_before_llama_cpp_sees_them(gguf: Path, tmp_path: Path) -> None:
    data = gguf.read_bytes()
    bad = tmp_path / "bad.gguf"
    for content in (data[: len(data) // 2], b"GGUF", b"not a gguf" * 10, data[:4] + b"\xff" * 64 + data[68:]):
        bad.write_bytes(content)
        with pytest.raises(FormatError, match=r"not a valid GGUF file"):
            load(bad)


def test_a_model_that_llama_cpp_does_not_know_is_its_own_words(tmp_path: Path) -> None:
    import gguf as package

    path = write_gguf(tmp_path / "tiny.gguf", SPEC)
    strange = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamo", 1)
    (tmp_path / "strange.gguf").write_bytes(strange)
    with pytest.raises(BackendError, match=r"llama.cpp \(.*\) cannot load .*strange.gguf: .*llamo"):
        load(tmp_path / "strange.gguf")
    assert package is not None


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SPEC)
    (tmp_path / "lacks.gguf").write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight", 1))
    with pytest.raises(BackendError, match=r"blk\.1\.ffn_up\.weight"):
        load(tmp_path / "lacks.gguf")


def test_contexts_that_cannot_be_are_refused(gguf: Path) -> None:
    for n_ctx in (0, -5, 97, 10**9):
        with pytest.raises(ConfigError, match=rf"n_ctx is {n_ctx}, allowed are 1..96"):
            load(gguf, n_ctx=n_ctx)
    model = load(gguf, n_ctx=10)
    session = model.open_session()
    with pytest.raises(ConfigError, match="exceed the context of 10"):
        session.forward(TOKENS[:11])
    session.forward(TOKENS[:10])


def test_broken_weights_are_an_error_and_the_cache_stays_right(tmp_path: Path) -> None:
    weights = tiny_weights(SPEC)
    weights["embed"][7] = np.nan
    model = load(write_gguf(tmp_path / "nan.gguf", SPEC, weights=weights), **FLOATS)
    session = model.open_session()
    session.forward([1, 2, 3])
    with pytest.raises(NumericsError, match=r"logits after position [34]"):
        session.forward([4, 7])
    assert session.n_past == 3
    good = tiny_logits(SPEC, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(session.forward([4, 5]).logits, good[3:], atol=1e-4)


def test_a_batch_with_broken_weights_changes_no_session(tmp_path: Path) -> None:
    """Sessions before the broken one counted their tokens, those after it kept them in the cache uncounted."""
    weights = tiny_weights(SPEC)
    weights["embed"][7] = np.nan
    model = load(write_gguf(tmp_path / "nan.gguf", SPEC, weights=weights), sequences="3", **FLOATS)
    sessions = [model.open_session() for _ in range(3)]
    for session in sessions:
        session.forward([1, 2, 3])
    with pytest.raises(NumericsError):
        model.forward_batch([Forward(session, [token]) for session, token in zip(sessions, (4, 7, 6), strict=True)])
    good = tiny_logits(SPEC, [1, 2, 3, 5])
    for session in sessions:
        assert session.n_past == 3
        np.testing.assert_allclose(session.forward([5]).logits, good[3:], atol=1e-4)


@pytest.mark.parametrize("write", [write_gguf, write_recurrent], ids=["attention", "recurrent"])
def test_an_interrupted_pass_leaves_no_token_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    """Ctrl-C between llama.cpp's pass and its logits: the next call met tokens that nobody had counted."""
    model = load(write(tmp_path / "tiny.gguf"))
    session = model.open_session()
    session.forward([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(model._weights.llama, "llama_get_logits_ith", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.forward([4])
    assert session.n_past == 3
    if write is write_recurrent:  # its state cannot go back, which is said instead of going on from a wrong one
        with pytest.raises(CacheError, match="cannot take back 1 of 4"):
            session.forward([5])
        session.keep(0)
        session.forward([1, 2, 3])
    np.testing.assert_array_equal(session.forward([5]).logits[0], _after(model, [1, 2, 3], [5]))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _after(model, past: list[int], tokens: list[int]) -> np.ndarray:
    session = model.open_session()
    session.forward(past)
    return session.forward(tokens).logits[-1].copy()


def test_a_tokenizer_that_is_read_differently_is_an_error_naming_the_text(tmp_path: Path) -> None:
    from edgespec.backends.llamacpp.library import library
    from edgespec.backends.llamacpp.vocabulary import check_tokenizer
    from edgespec.testing.tokenizer import paired_strings
    from edgespec.text import Tokenizer

    strings = paired_strings(64)
    strings[3], strings[4] = strings[4], strings[3]
    other = Tokenizer.load(write_gguf(tmp_path / "other.gguf", SPEC, strings=strings))
    model = load(write_gguf(tmp_path / "tiny.gguf", SPEC))
    with pytest.raises(IncompatibleError, match=r"reads 'Hello, world!' differently|reads '.+' differently"):
        check_tokenizer(library(), model._weights.vocab, other, "tiny")


@pytest.mark.parametrize(("options", "message"), [
    ({"type_q": "f16"}, r'unknown to llama.cpp; did you mean "type_[kv]"'),
    ({"type_k": "q3"}, "type_k=q3: use one of f32, f16"),
    ({"sequences": "0"}, "whole number from 1 to 64"),
    ({"sequences": "many"}, "whole number from 1 to 64"),
    ({"flash_attn": "maybe"}, "use one of auto, off, on"),
    ({"n_gpu_layers": "3"}, "n_gpu_layers=3 would have no effect on device 'llamacpp:cpu'"),
    ({"type_v": "q8_0", "flash_attn": "off"}, "type_v=q8_0 needs flash attention"),
])  # fmt: skip
def test_settings_that_cannot_be_honoured(gguf: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(gguf, **options)


def test_a_cache_type_that_does_not_fit_the_heads_is_llama_cpps_own_refusal(gguf: Path) -> None:
    with pytest.raises(BackendError, match="cannot open a context"):
        load(gguf, type_k="q8_0").open_session()  # heads of 16 values, blocks of 32


def test_devices_that_are_not_here(gguf: Path) -> None:
    with pytest.raises(BackendError, match=r"'llamacpp:gpu': this llama-cpp-python .* has 0 devices of the kind gpu"):
        load_model(gguf, device="llamacpp:gpu")
    with pytest.raises(ConfigError, match="counts the CPU as one device"):
        load_model(gguf, device="llamacpp:cpu:1")
    with pytest.raises(ConfigError, match=r"GGUF file, which runs in llama\.cpp and not on device 'cpu'"):
        load_model(gguf, device="cpu")
    for how in ({"tree": True}, {"split": True}):
        with pytest.raises(ConfigError, match="ONNX bundles only"):
            load_model(gguf, device="llamacpp:cpu", **how)


def test_what_it_says_of_itself(gguf: Path) -> None:
    model = load(gguf, type_k="f16", type_v="f32")
    info = model.info
    assert (info.n_vocab, info.n_ctx, info.eos_ids, info.device) == (64, 96, (2,), "llamacpp:cpu")
    assert info.kv_bytes_per_token == 2 * 2 * 16 * (2 + 4)
    assert info.tokenizer_hash == model.tokenizer.hash
    assert info.weight_bytes > 4 * 64 * 32
    assert not info.tree
    assert info.max_rewind is None


def test_nothing_is_printed(gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(gguf)
    model.open_session().forward([1, 2])
    model.close()
    assert capfd.readouterr() == ("", "")

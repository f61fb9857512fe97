"""What a user of llama.cpp meets around the passes: bad files, odd names, Ctrl-C, its log, and Python's exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends import load_model
from edgespec.backends.llamacpp import library as library_module
from edgespec.errors import BackendError, ConfigError, EdgeSpecError, FormatError
from edgespec.testing import gguf_models
from edgespec.testing.gguf_models import write_gguf
from edgespec.testing.tiny import TinySpec

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'")

SPEC = TinySpec()


def load(path: Path):
    return load_model(path, device="llamacpp:cpu", threads=1)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", SPEC)


def test_a_reason_of_several_lines_becomes_one() -> None:
    assert library_module._plain("decode: error: positions differ:\n - the last is 3\n - the first is 3.") == (
        "positions differ: - the last is 3 - the first is 3"
    )


@pytest.mark.parametrize("length", [0, 1, 2**31])
def test_a_context_length_that_cannot_be_is_the_files_fault(tmp_path: Path, length: int) -> None:
    """0 and 2**31 became "the context holds -2147483648 tokens, so use 1 to -2147483649"."""
    path = write_gguf(tmp_path / "tiny.gguf", replace(SPEC, n_ctx=length))
    with pytest.raises(FormatError, match=rf"tiny.gguf: llama.context_length is {length}, possible are 2\.\."):
        load(path)


def test_a_file_without_a_tokenizer_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a failure of llama.cpp, with exit code 1."""
    monkeypatch.setattr(gguf_models, "add_vocabulary", lambda *_: None)
    with pytest.raises(EdgeSpecError, match="tokenizer") as caught:
        load(write_gguf(tmp_path / "tiny.gguf", SPEC))
    assert not isinstance(caught.value, BackendError)


def test_python_exits_without_a_warning(gguf: Path) -> None:
    """llama_cpp leaves two files open, which `python -X dev` tells of at exit."""
    code = f"from edgespec.backends import load_model; load_model({str(gguf)!r}, device='llamacpp:cpu')"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_llama_cpp_logs_is_not_lost(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raised it inside the log callback, printed a traceback, and the work went on."""

    class Pressing(deque[tuple[int, str]]):
        def append(self, item: tuple[int, str]) -> None:
            if not self:
                signal.raise_signal(signal.SIGINT)
            super().append(item)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with monkeypatch.context() as patch:
            patch.setattr(library_module, "_texts", Pressing())
            with pytest.raises(KeyboardInterrupt):
                load(gguf)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    load(gguf).close()


def test_an_error_is_told_apart_from_the_unfinished_line_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing quantization was explained with the progress line of the tensor that it was at."""
    texts = [(2, "[ 1/ 2] blk.0 "), (5, "more .. "), (4, "quantize: failed: "), (5, "no room\n"), (2, "next\n")]
    monkeypatch.setattr(library_module, "_texts", deque(texts))
    assert library_module.log_lines() == ["[ 1/ 2] blk.0 more ..", "quantize: failed: no room", "next"]
    assert library_module.why() == "failed: no room"


@pytest.mark.skipif(sys.platform != "linux", reason="only there a name may be any bytes")
def test_a_files_name_may_be_any_bytes(gguf: Path) -> None:
    """It was an internal error about surrogates."""
    other = gguf.rename(gguf.with_name(os.fsdecode(b"\xff.gguf")))
    model = load(other)
    assert model.info.n_vocab > 0
    model.close()


def test_a_system_message_without_a_template_is_not_blamed_on_raw(gguf: Path) -> None:
    """It said to drop --raw, which nobody had given."""
    from edgespec import LLM
    from edgespec.cli.run import prompt_ids

    llm = LLM(gguf, device="llamacpp", draft="none", threads=1)
    with pytest.raises(ConfigError, match="this model has none: put the text into the prompt"):
        prompt_ids(llm, "ab", raw=False, system="be brief")
    with pytest.raises(ConfigError, match="drop --raw"):
        prompt_ids(llm, "ab", raw=True, system="be brief")
    llm.close()


def test_sessions_opened_on_several_threads_are_all_different(gguf: Path) -> None:
    """Two threads saw the last free sequence of a context and one took it: IndexError for the other."""
    model = load_model(gguf, device="llamacpp:cpu", threads=1, device_options={"sequences": "4"})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(_: int) -> None:
        for _ in range(60):
            session = model.open_session()
            session.forward([3, 4])
            session.close()

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    sessions = [model.open_session() for _ in range(9)]
    assert len({(session.context, session.sequence) for session in sessions}) == 9

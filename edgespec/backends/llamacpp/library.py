"""llama_cpp imported on use, its log kept instead of printed, and the devices that it was built for.

The log is one for the process, as llama.cpp has it. Knows no models.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from edgespec.errors import MissingDependencyError

__all__ = ["LlamaDevice", "clear_log", "library", "list_devices", "log_lines", "uninterrupted", "version", "why"]

INSTALL = "pip install 'edgespec[llamacpp]'"
KEPT_TEXTS = 20_000  # quantizing logs a few for each tensor
_INFO, _WARNING, _ERROR, _CONTINUED = 2, 3, 4, 5
_NPU_NAMES = ("HTP", "CANN")  # how llama.cpp calls the devices of its Hexagon and Ascend backends
_TYPES = {0: "cpu", 1: "gpu", 2: "gpu", 3: "cpu"}  # ggml's CPU, GPU, integrated GPU, accelerator library

_texts: deque[tuple[int, str]] = deque(maxlen=KEPT_TEXTS)  # level and text of each call


@dataclass(frozen=True)
class LlamaDevice:
    """One of llama.cpp's devices. handle: its pointer."""

    name: str
    kind: str
    description: str
    handle: int


@functools.cache
def library() -> Any:
    """The module with llama.cpp's functions, initialised; raises MissingDependencyError naming the extra."""
    try:
        from llama_cpp import llama_cpp
    except ImportError as error:
        raise MissingDependencyError(f"running a GGUF file in llama.cpp needs llama-cpp-python: {INSTALL}") from error
    except (OSError, RuntimeError) as error:  # the package is there and its compiled part does not load
        raise MissingDependencyError(f"llama-cpp-python is installed but does not load ({error}): {INSTALL}") from error
    _close_at_exit()
    llama_cpp.llama_log_set(_callback(llama_cpp), ctypes.c_void_p(None))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _close_at_exit() -> None:
    """llama_cpp opens two files on import that it never closes, which Python warns of as it exits."""
    from llama_cpp import _utils

    for name in ("outnull_file", "errnull_file"):
        file = getattr(_utils, name, None)
        if file is not None:
            atexit.register(file.close)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: raised in llama.cpp's log callback, Python would print it and go on."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(*pressed[0])


def version() -> str:
    """The installed package's version."""
    library()
    import llama_cpp

    return str(llama_cpp.__version__)


@functools.cache
def _callback(llama: Any) -> Any:
    """Kept for the life of the process: llama.cpp holds a pointer to it."""

    def take(level: int, text: bytes, _data: Any) -> None:
        if level >= _INFO:
            _texts.append((level, text.decode("utf-8", "replace")))

    return llama.llama_log_callback(take)


def clear_log() -> None:
    """Forget what was logged so far."""
    _texts.clear()


def log_lines(lowest: int = _INFO) -> list[str]:
    """What llama.cpp logged since `clear_log`, of the level `lowest` or above; a line may come in several calls."""
    lines: list[tuple[int, str]] = []
    for level, text in list(_texts):
        before, begun = lines[-1] if lines else (level, "\n")
        if not begun.endswith("\n") and level in (before, _CONTINUED):  # an error ends an unfinished line
            lines[-1] = (before, begun + text)
        else:
            lines.append((level, text))
    return [text.strip() for level, text in lines if lowest <= level]


def why() -> str:
    """The errors that llama.cpp logged since `clear_log`, as the end of a sentence; its warnings where it has none."""
    for lowest in (_ERROR, _WARNING):
        found = [line for line in dict.fromkeys(map(_plain, log_lines(lowest))) if line]
        if found:
            return "; ".join(found[:3])
    return "llama.cpp gave no reason"


def _plain(line: str) -> str:
    """A log line without the function that wrote it; where llama.cpp breaks it into several, they become one."""
    return re.sub(r"^\w+: (?:error: |error loading model: )?", "", " ".join(line.split())).rstrip(".")


@functools.cache
def list_devices() -> tuple[LlamaDevice, ...]:
    """What this build of llama.cpp can run on, the CPU among them."""
    count, get = _function("ggml_backend_dev_count"), _function("ggml_backend_dev_get")
    names, texts = _function("ggml_backend_dev_name"), _function("ggml_backend_dev_description")
    types = _function("ggml_backend_dev_type")
    count.restype, get.restype, get.argtypes = ctypes.c_size_t, ctypes.c_void_p, [ctypes.c_size_t]
    types.restype = ctypes.c_int
    for function in (names, texts):
        function.restype = ctypes.c_char_p
    for function in (names, texts, types):
        function.argtypes = [ctypes.c_void_p]
    found = []
    for index in range(count()):
        handle = get(index)
        name = names(handle).decode("utf-8", "replace")
        kind = "npu" if name.startswith(_NPU_NAMES) else _TYPES.get(types(handle), "cpu")
        found.append(LlamaDevice(name, kind, texts(handle).decode("utf-8", "replace"), handle))
    return tuple(found)


def _function(name: str) -> Any:
    """A function of ggml, which is one library or several beside llama.cpp's own."""
    handles = [library()._lib]
    try:
        return getattr(handles[0], name)  # where the loader looks into dependencies too
    except AttributeError:
        import llama_cpp
        from llama_cpp._ctypes_extensions import load_shared_library

        folder = Path(llama_cpp.__file__).parent / "lib"
        handles = [load_shared_library(stem, folder) for stem in ("ggml", "ggml-base")]
    return next(getattr(handle, name) for handle in handles if hasattr(handle, name))

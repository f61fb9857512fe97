"""Other engines, each in a virtual environment of its own under the user's cache folder, driven as child processes.

Owns their pinned versions, their setup and the line protocol. The peer gets the same float weights as our export (the
model's GGUF, dequantized) and quantizes them itself. Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edgespec.children import describe_exit
from edgespec.config import cache_dir, child_environment
from edgespec.errors import BackendError, ConfigError
from edgespec_bench.weights_folder import write_weights_folder

__all__ = ["GENAI", "Peer", "PeerProcess"]

Say = Callable[[str], None]
_CHILD = Path(__file__).with_name("peer_child.py")
# The peer's builder declares the opening of a chat turn an end of sequence. Both sides run for a fixed number of tokens
# here, so its end of sequence is set to a token that no text contains.
_NEVER = 49151


@dataclass(frozen=True)
class Peer:
    """An engine's name, version and exact packages. The first group is installed before the second."""

    name: str
    version: str
    packages: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        return cache_dir() / "bench" / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def model_folder(self, model: str) -> Path:
        """Where the peer's build of a pair lies; raises ConfigError for what is a path and no name."""
        if not re.fullmatch(r"\w[\w.-]*", model):
            raise ConfigError(f"{model!r} is no pair's name: both sides have to be made from one source, so use a pair")
        return self.folder / "models" / model

    def is_ready(self, model: str) -> bool:
        """Whether `setup` has been through for this model."""
        return self.python.is_file() and (self.model_folder(model) / "genai_config.json").is_file()

    def setup(self, model: str, source: Path, say: Say) -> None:
        """Make the environment and the model folder where they are missing; minutes and some 2 GB the first time."""
        if not (self.folder / "installed").is_file():
            self._install(say)
        if not self.is_ready(model):
            self._build(model, source, say)

    def _install(self, say: Say) -> None:
        say(f"{self.name} {self.version}: making its environment in {self.folder}")
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(self.folder / "venv")], f"the environment of {self.name}")
        for group in self.packages:
            say(f"{self.name}: installing {' '.join(group)}")
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *group]
            _run(pip, f"the packages of {self.name}")
        (self.folder / "installed").write_text(self.version, encoding="utf-8")

    def _build(self, model: str, source: Path, say: Say) -> None:
        target, work = self.model_folder(model), self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        try:
            say(f"{self.name}: writing the float weights of {model}")
            write_weights_folder(source, work / "float")
            say(f"{self.name}: building its int4 model")
            built = work / "int4"
            builder = [str(self.python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
            command = [*builder, "-i", str(work / "float"), "-o", str(built), "-c", str(work / "cache")]
            _run(command, f"the model builder of {self.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            built.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def start(self, model: str, threads: int) -> PeerProcess:
        """A process with the model loaded. Raises ConfigError where `setup` is missing."""
        if not self.is_ready(model):
            raise ConfigError(f"{self.name} is not set up: run `python -m edgespec_bench peers --setup`")
        folder = self.model_folder(model)
        _configure(folder / "genai_config.json", threads)
        return PeerProcess(self.name, [str(self.python), str(_CHILD), str(folder)])


GENAI = Peer(
    "onnxruntime-genai",
    "0.18.0",
    (
        ("torch==2.13.0",),
        (
            "onnxruntime-genai==0.18.0",
            "onnxruntime==1.32.0",
            "transformers==5.24.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "numpy==2.4.6",
        ),
    ),
)


class PeerProcess:
    """One request at a time: a JSON line out, a JSON line back."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=child_environment()
        )
        self.version = str(self._read()["version"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises BackendError where the peer died."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` says what happened
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise BackendError(
                f"{self.name} ended with code {code} in the middle of a measurement; see its output above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread request to a peer that died
                    pipe.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _configure(path: Path, threads: int) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    config["model"]["eos_token_id"] = [_NEVER]
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise BackendError(f"{describe_exit(what, done.returncode)}:\n{tail}")

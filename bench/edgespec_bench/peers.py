"""Other engines, each in a virtual environment of its own under the user's cache folder.

Owns their pinned versions, their environments and where their models lie. Every peer gets the same float weights as our
export (`peer_models`). Knows nothing of what is measured, nor how a peer is asked (`sides`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import cache_dir
from edgespec.cpu import cpu_identity
from edgespec.errors import BackendError, ConfigError
from edgespec_bench.peer_models import (
    GENAI_PARTS,
    LLAMACPP_PARTS,
    OPENVINO_PARTS,
    TRANSFORMERS_PARTS,
    Build,
    Workshop,
    make_part,
    run,
)

__all__ = ["GENAI", "LLAMACPP", "OPENVINO", "PEERS", "TRANSFORMERS", "Peer", "find_peer", "set_up"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """An engine's name, version and exact packages. The first group is installed before the second.

    parts: name of a part of its model folder -> what makes it, in order.
    """

    name: str
    version: str
    packages: tuple[tuple[str, ...], ...]
    parts: Mapping[str, Build]

    @property
    def folder(self) -> Path:
        return cache_dir() / "bench" / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def is_installed(self) -> bool:
        return (self.folder / "installed").is_file() and self.python.is_file()

    def model_folder(self, model: str) -> Path:
        """Where the peer's builds of a pair lie; raises ConfigError for what is a path and no name."""
        if not re.fullmatch(r"\w[\w.-]*", model):
            raise ConfigError(f"{model!r} is no pair's name: both sides have to be made from one source, so use a pair")
        return self.folder / "models" / model

    def missing(self, model: str, parts: Sequence[str] | None = None) -> str | None:
        """What `setup` has to make first, as a clause; None where these parts (all of them) are there."""
        if not self.is_installed:
            return f"{self.name} {self.version} is not installed"
        wanted = self.parts if parts is None else parts
        absent = [part for part in wanted if not (self.model_folder(model) / part).is_dir()]
        return f"{self.name} has no {' and no '.join(absent)} of {model} yet" if absent else None

    def setup(self, model: str, source: Path, work: Path, say: Say) -> None:
        """Make the environment and the models where they are missing; minutes and up to 2 GB the first time."""
        if not self.is_installed:
            self._install(say)
        folder = self.model_folder(model)
        shop = Workshop(model, source, self.python, work, folder)
        for part in [part for part in self.parts if not (folder / part).is_dir()]:
            say(f"{self.name}: making {part} of {model}")
            try:
                make_part(self.parts[part], shop, folder / part)
            except (BackendError, ConfigError) as error:
                raise type(error)(f"{self.name}, {part} of {model}: {error}") from error

    def _install(self, say: Say) -> None:
        say(f"{self.name} {self.version}: making its environment in {self.folder}")
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "venv", str(self.folder / "venv")], f"the environment of {self.name}")
        for group in self.packages:
            say(f"{self.name}: installing {' '.join(group)}")
            pip = [
                str(self.python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *_wheels(),
                *group,
            ]
            run(pip, f"the packages of {self.name}")
        (self.folder / "installed").write_text(self.version, encoding="utf-8")


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
    GENAI_PARTS,
)

LLAMACPP = Peer("llama.cpp", "0.3.36", (("llama-cpp-python==0.3.36", "numpy==2.4.6"),), LLAMACPP_PARTS)

OPENVINO = Peer(
    "openvino-genai",
    "2026.4.1",
    (("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "nncf==3.4.0", "numpy==2.4.6"),),
    OPENVINO_PARTS,
)

TRANSFORMERS = Peer(
    "transformers", "5.24.0", (("torch==2.13.0",), ("transformers==5.24.0", "numpy==2.4.6")), TRANSFORMERS_PARTS
)

PEERS = (LLAMACPP, GENAI, OPENVINO, TRANSFORMERS)


def set_up(peers: Sequence[Peer], model: str, source: Path, say: Say) -> None:
    """Make what these peers lack. Raises BackendError and ConfigError naming the peer; what was made stays."""
    if all(peer.missing(model) is None for peer in peers):
        return
    base = cache_dir() / "bench"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix="work-") as work:  # the float weights serve all of them
        for peer in peers:
            peer.setup(model, source, Path(work), say)


def find_peer(name: str) -> Peer:
    """The peer of that name. Raises ConfigError listing the names."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise ConfigError(f"there is no peer {name!r}: use one of {', '.join(peer.name for peer in PEERS)}")


def _wheels() -> list[str]:
    """Where .ci/llamacpp.py keeps the wheel that it compiled for this processor, as options of pip."""
    folder = cache_dir().parent / "edgespec-wheels"
    return [f"--find-links={path}" for path in sorted(folder.glob(f"*-{cpu_identity()}")) if any(path.glob("*.whl"))]

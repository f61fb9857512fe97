"""What each peer engine reads: its own form of a pair's float weights and of the trained draft.

One source for all: the pair's GGUF, dequantized, as a Hugging Face folder in float32; the draft is the TinyDraft of the
zoo on its target's tables, a plain Llama of two layers that every engine can run. A part is a subfolder of the peer's
model folder; it appears whole or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.children import describe_exit
from edgespec.config import child_environment
from edgespec.errors import BackendError, ConfigError

__all__ = ["Build", "Workshop", "build_genai", "run"]


@dataclass(frozen=True)
class Workshop:
    """Where a part is made. python: of the peer's environment. work: scratch of all parts of one setup."""

    model: str
    source: Path
    python: Path
    work: Path

    def floats(self) -> Path:
        """The target as a Hugging Face folder in float32, written once."""
        from edgespec_export.hf_out import write_hf_model

        folder = self.work / "float"
        return folder if folder.is_dir() else write_hf_model(self.source, folder)

    def draft_floats(self) -> Path:
        """The same of the draft. Raises ConfigError where the zoo has none."""
        from edgespec_export.hf_out import write_hf_folder

        from edgespec import zoo

        folder = self.work / "draft-float"
        if folder.is_dir():
            return folder
        drafts = [draft for draft in zoo.list_drafts(self.model) if draft.kind == "tinydraft"]
        if not drafts:
            raise ConfigError(f"{self.model} has no tinydraft in the zoo, so there is no draft model for other engines")
        return write_hf_folder(drafts[0].folder, self.source, folder)


Build = Callable[[Workshop, Path], None]
"""Makes one part in the empty folder that it is given."""


def build_genai(shop: Workshop, out: Path) -> None:
    """onnxruntime-genai's own int4 build of the target."""
    _genai_builder(shop, shop.floats(), out)


def _genai_builder(shop: Workshop, floats: Path, out: Path) -> None:
    command = [str(shop.python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    run([*command, "-i", str(floats), "-o", str(out), "-c", str(shop.work / "cache")], "its model builder")


def run(command: Sequence[str], what: str) -> None:
    """Run to the end. Raises BackendError with the last lines of a failure."""
    done = subprocess.run(list(command), capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise BackendError(f"{describe_exit(what, done.returncode)}:\n{tail}")


def make_part(build: Build, shop: Workshop, target: Path) -> None:
    """Let `build` fill a scratch folder, and move it to `target` once it is whole."""
    made = shop.work / f"made-{target.name}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    build(shop, made)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)

"""A corpus on disk: token ids, which of them the assistant wrote, and the recipe that made it.

Owns the files: arrays in .safetensors (or .npz, read only; never pickle), the recipe as JSON beside them, and the parts
of a corpus that is still being written. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, FormatError, MissingDependencyError

__all__ = ["Corpus", "JoinedRows", "Parts", "check_name", "recipe_path", "token_dtype", "write_json"]

FORMAT = "edgespec-corpus"
HELD_OUT_SHARE = 0.04
MOST_HELD_OUT = 64

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Corpus:
    """tokens: [n, length] uint16 or uint32. assistant: [n, length] bool, True where the target answered.

    recipe: how it was made, None where nobody wrote it down. sources: where several were joined, the (corpus, row) of
    each row as [n, 2].
    """

    tokens: NDArray[Any]
    assistant: NDArray[np.bool_]
    recipe: dict[str, Any] | None = field(default=None, compare=False)
    path: Path | None = None
    sources: NDArray[np.int64] | None = None
    n_judged: int | None = None  # rows held out, where they are not a share of all

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """From a .safetensors or .npz file. Raises ConfigError for a missing file, FormatError for a wrong one."""
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"there is no corpus at {path}: write one with `edgespec train data -o {path}`")
        arrays = _read_arrays(path)
        missing = [name for name in ("tokens", "assistant") if name not in arrays]
        if missing:
            raise FormatError(
                f"{path} holds {', '.join(arrays) or 'nothing'}: a corpus has the arrays tokens and assistant."
            )
        tokens, assistant = arrays["tokens"], arrays["assistant"]
        _check_arrays(path, tokens, assistant)
        return cls(tokens, assistant.astype(bool), _read_recipe(recipe_path(path)), path)

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """Several as one: the rows to train on of each, then the held-out rows of each in turn.

        Raises ConfigError where their rows are not equally long.
        """
        if len(corpora) == 1:
            return corpora[0]
        lengths = {corpus.length for corpus in corpora}
        if len(lengths) > 1:
            said = ", ".join(f"{corpus.path} {corpus.length}" for corpus in corpora)
            raise ConfigError(f"corpora that are joined need rows of one length, these have: {said}")
        trained = [(c, row) for c, corpus in enumerate(corpora) for row in range(len(corpus) - corpus.n_held_out)]
        judged = [
            (place, c, len(corpus) - corpus.n_held_out + place)
            for c, corpus in enumerate(corpora)
            for place in range(corpus.n_held_out)
        ]
        order = np.array([*trained, *((c, row) for _, c, row in sorted(judged))], np.int64)
        tokens = JoinedRows([corpus.tokens for corpus in corpora], order)[:]
        assistant = JoinedRows([corpus.assistant for corpus in corpora], order)[:]
        return cls(tokens, assistant, sources=order, n_judged=len(judged))

    def save(self, path: str | Path) -> None:
        """Write arrays and recipe; the same bytes for the same content."""
        path = Path(path)
        check_name(path)
        if self.recipe is not None:
            write_json(recipe_path(path), self.recipe)
        write_arrays(path, {"tokens": self.tokens, "assistant": self.assistant})

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens a row."""
        return int(self.tokens.shape[1])

    @property
    def n_held_out(self) -> int:
        """Rows at the end that training leaves alone; at least one, an even number where temperatures alternate."""
        if self.n_judged is not None:
            return self.n_judged
        wanted = int(min(MOST_HELD_OUT, len(self) * HELD_OUT_SHARE))
        return max(1, wanted - wanted % 2)

    @cached_property
    def hash(self) -> str:
        """sha256 over shape, tokens and mask."""
        digest = hashlib.sha256(repr((self.tokens.shape, str(self.tokens.dtype))).encode())
        for array in (self.tokens, np.packbits(self.assistant)):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def check_vocabulary(self, n_vocab: int, tokenizer_hash: str | None) -> None:
        """Raise ConfigError where the tokens are not the target's."""
        theirs = (self.recipe or {}).get("tokenizer_hash")
        if theirs is not None and tokenizer_hash is not None and theirs != tokenizer_hash:
            raise ConfigError(
                f"the corpus {self.path} was written with another tokenizer ({theirs[:12]}) than the target's "
                f"({tokenizer_hash[:12]}): make one with `edgespec train data`"
            )
        largest = int(self.tokens.max())
        if largest >= n_vocab:
            raise ConfigError(
                f"the corpus {self.path} holds token {largest}, the target's ids end at {n_vocab - 1}: make a corpus "
                "with `edgespec train data`"
            )


class JoinedRows:
    """Rows of several arrays [n, length, ...] as those of one; only what is asked for is read.

    sources: [n, 2] the (array, row) of each row.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], sources: NDArray[np.int64]) -> None:
        self._arrays = list(arrays)
        self._sources = sources
        self.shape = (len(sources), *arrays[0].shape[1:])

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> NDArray[Any]:
        return np.stack([self._arrays[array][row] for array, row in self._sources[rows]])


class Parts:
    """The finished batches of a corpus in the making, in a folder beside it: what an interrupted run goes on from."""

    def __init__(self, out: Path) -> None:
        self.folder = out.with_name(f"{out.name}.parts")

    def begin(self, recipe: dict[str, Any], free: tuple[str, ...] = ()) -> dict[str, Any]:
        """Start, or go on with what is there; the recipe that counts. Keys of `free` are taken from the first run.

        Raises ConfigError where the folder was begun with other settings.
        """
        path = self.folder / "recipe.json"
        recipe = json.loads(json.dumps(recipe))  # as it will be read again: lists for tuples
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, recipe)
            return recipe
        before = _read_recipe(path) or {}
        for key in sorted({*before, *recipe} - set(free)):
            ours, theirs = recipe.get(key), before.get(key)
            if ours != theirs:
                raise ConfigError(
                    f"{self.folder} was begun with {key} = {theirs} and this run has {ours}: use the same options to "
                    "go on, or delete that folder"
                )
        return before

    def read(self, index: int) -> Arrays | None:
        """A finished batch, or None."""
        path = self._path(index)
        return _read_arrays(path) if path.is_file() else None

    def write(self, index: int, arrays: Arrays) -> None:
        """Keep a finished batch; it is there whole or not at all."""
        write_arrays(self._path(index), arrays)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self.folder / f"part-{index:06}.safetensors"


def token_dtype(n_vocab: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type for the ids of a vocabulary."""
    return np.uint16 if n_vocab <= 1 << 16 else np.uint32


def recipe_path(path: Path) -> Path:
    """Where the recipe of the corpus `path` lies."""
    return path.with_suffix(".json")


def check_name(path: Path) -> None:
    """Raise ConfigError for a name that a corpus cannot be written under."""
    if path.suffix != ".safetensors":
        raise ConfigError(f"the corpus is to be written to {path}: give a name that ends in .safetensors")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Readable JSON with sorted keys, there whole or not at all."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


def write_arrays(path: Path, arrays: Arrays) -> None:
    """A .safetensors file without metadata, whose order would not be stable."""
    beside = path.with_name(f".{path.name}.new")
    beside.parent.mkdir(parents=True, exist_ok=True)
    # not save_file, whose files only their owner may read
    beside.write_bytes(_safetensors().save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    os.replace(beside, path)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        arrays: dict[str, NDArray[Any]] = _safetensors().load_file(path)
        return arrays
    except MissingDependencyError:
        raise
    except Exception as error:
        raise FormatError(f"{path} cannot be read as a corpus (.safetensors or .npz): {error}") from error


def _check_arrays(path: Path, tokens: NDArray[Any], assistant: NDArray[Any]) -> None:
    if tokens.ndim != 2 or tokens.dtype not in (np.uint16, np.uint32):
        raise FormatError(f"{path}: tokens is {tokens.dtype} {tokens.shape}; it must be uint16 or uint32 [n, length].")
    if assistant.shape != tokens.shape or assistant.dtype not in (np.bool_, np.uint8):
        raise FormatError(
            f"{path}: assistant is {assistant.dtype} {assistant.shape}; it must be bool of the tokens' shape "
            f"{tokens.shape}."
        )
    if len(tokens) < 2:
        raise FormatError(f"{path} holds {len(tokens)} rows; training needs at least 2, one of them to judge by.")


def _read_recipe(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON ({error}): delete it, or write the corpus again.") from error
    if not isinstance(recipe, dict) or recipe.get("format") != FORMAT:
        raise FormatError(f'{path} does not say "format": "{FORMAT}": it is no recipe of a corpus.')
    return recipe


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise MissingDependencyError("a corpus needs safetensors: pip install 'edgespec[train]'") from error
    return safetensors.numpy

"""Features of the target for every token of a corpus, on disk as float16 memory maps.

The production runtime computes them, so that a draft is trained on what it will see. Rows already written stay when a
run is interrupted. Owns the folder of features; knows nothing of what is trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, FormatError
from edgespec_models.corpus import Corpus, write_json

__all__ = ["dump_features", "open_features"]

LARGEST = 60_000.0  # float16 ends at 65,504; residual streams have single channels of tens of thousands
STATE = "features.json"
SAVE_EVERY = 16  # batches between two notes of progress

Progress = Callable[[str, float, float | None], None]


def dump_features(
    open_batch: Callable[[int], Any],
    corpus: Corpus,
    taps: Sequence[str],
    out: Path,
    *,
    target: str,
    batch: int = 4,
    progress: Progress | None = None,
) -> dict[str, NDArray[np.float16]]:
    """Write `out`/TAP.npy [n, length, n_embd] for each tap and open them, going on where an earlier run stopped.

    open_batch(n): a new batch session of n sequences. target: what identifies the target's weights. Values beyond
    float16 are clipped. Raises ConfigError where `out` holds features of another corpus or target.
    """
    out.mkdir(parents=True, exist_ok=True)
    identity = {"corpus": corpus.hash, "target": target}
    state = _read_state(out, identity)
    missing = [tap for tap in taps if state["rows"].get(tap, 0) < len(corpus)]
    if missing:
        start = min(state["rows"].get(tap, 0) for tap in missing)
        _run(open_batch, corpus, missing, out, start, identity | {"rows": state["rows"]}, batch, progress)
    return open_features(out, taps)


def open_features(out: Path, taps: Sequence[str]) -> dict[str, NDArray[np.float16]]:
    """Read-only memory maps of finished features."""
    return {tap: np.load(out / f"{tap}.npy", mmap_mode="r", allow_pickle=False) for tap in taps}


def _run(
    open_batch: Callable[[int], Any],
    corpus: Corpus,
    taps: Sequence[str],
    out: Path,
    start: int,
    state: dict[str, Any],
    batch: int,
    progress: Progress | None,
) -> None:
    files: dict[str, Any] = {}
    session: Any = None
    size = 0
    try:
        for number, first in enumerate(range(start, len(corpus), batch)):
            rows = corpus.tokens[first : first + batch].astype(np.int64)
            if len(rows) != size:
                session = _reopened(session, open_batch, len(rows))
                size = len(rows)
            session.keep(0)
            hidden: Mapping[str, NDArray[Any]] = session.forward(rows, taps=tuple(taps)).hidden
            for tap in taps:
                value = hidden[tap].reshape(*rows.shape, -1)
                if tap not in files:
                    files[tap] = _open_file(out / f"{tap}.npy", (len(corpus), corpus.length, value.shape[-1]), start)
                files[tap][first : first + len(rows)] = np.clip(value, -LARGEST, LARGEST)
            done = first + len(rows)
            if number % SAVE_EVERY == SAVE_EVERY - 1 or done == len(corpus):
                _save(out, files, state, done)
            if progress is not None:
                progress("computing features", done, len(corpus))
    finally:
        if session is not None:
            session.close()


def _reopened(session: Any, open_batch: Callable[[int], Any], size: int) -> Any:
    if session is not None:
        session.close()
    return open_batch(size)


def _open_file(path: Path, shape: tuple[int, ...], start: int) -> Any:
    """A new file, or the old one where rows before `start` are in it."""
    if start:
        file = np.load(path, mmap_mode="r+", allow_pickle=False)
        if file.shape != shape:
            raise FormatError(f"{path} is {file.shape} and should be {shape}: delete its folder.")
        return file
    return np.lib.format.open_memmap(path, "w+", np.float16, shape)


def _save(out: Path, files: Mapping[str, Any], state: dict[str, Any], done: int) -> None:
    """Note the finished rows only once they are on disk."""
    for tap, file in files.items():
        file.flush()
        state["rows"][tap] = done
    write_json(out / STATE, state)


def _read_state(out: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    path = out / STATE
    if not path.is_file():
        return {**identity, "rows": {}}
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = state["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} cannot be read ({error!r}): delete its folder.") from error
    for key, value in identity.items():
        if state.get(key) != value:
            raise ConfigError(f"{out} holds features of another {key}: give another folder, or delete it")
    return {**identity, "rows": {tap: n for tap, n in rows.items() if (out / f"{tap}.npy").is_file()}}

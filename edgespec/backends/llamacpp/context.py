"""One llama.cpp context: the KV caches of one or several sequences, and passes over their tokens.

Owns the batch's arrays, the choice of rows that get logits, and what a removal from the cache really left. Every
pointer is freed when its owner is closed or forgotten. It knows no models' names and no tokenizers.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.library import clear_log, uninterrupted, why
from edgespec.errors import BackendError, CacheError
from edgespec.types import FloatArray

__all__ = ["MOST_ROWS", "Context", "Weights", "Work"]

MOST_ROWS = 256  # of one pass over the model: prefill chunks and verify calls are at most as long
# The last layer's feed-forward and the head run only on rows that get logits. So that a row's numbers do not depend on
# how many of them are wanted, a call of up to this many rows gives logits to all, a longer one to a multiple of it.
OUTPUT_ROWS = 32


class Weights:
    """A loaded model's pointer; freed when nothing refers to it."""

    def __init__(self, llama: Any, pointer: Any) -> None:
        self.llama = llama
        self.pointer = pointer
        self.vocab = llama.llama_model_get_vocab(pointer)
        self._free = weakref.finalize(self, llama.llama_model_free, pointer)


@dataclass
class Work:
    """What one sequence wants of a pass: tokens from `start` on, logits of `rows` (ascending indices within them).

    out: [len(rows), n_vocab] float32, filled by the pass.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    rows: Sequence[int]
    out: FloatArray


class Context:
    """`n_sequences` caches over one model, each with room for `n_ctx` tokens.

    window: width of the model's sliding window, 0 without one. Passes and removals take turns: any thread may call.
    """

    def __init__(self, weights: Weights, params: Any, *, name: str, n_vocab: int, window: int) -> None:
        llama = weights.llama
        clear_log()
        with uninterrupted():
            pointer = llama.llama_init_from_model(weights.pointer, params)
            if not pointer:
                raise BackendError(f"{name}: llama.cpp cannot open a context of {params.n_ctx} tokens: {why()}.")
            # the finalizer holds the weights, so that they outlive the context
            self._free = weakref.finalize(self, _free_context, llama, pointer, weights)
        self._llama, self._pointer, self._name = llama, pointer, name
        self._memory = llama.llama_get_memory(pointer)
        self._n_vocab, self._window = n_vocab, window
        self._row = ctypes.c_float * n_vocab
        self._lock = threading.RLock()
        self.weights = weights
        self.unused = list(range(params.n_seq_max))[::-1]
        self.n_sequences = int(params.n_seq_max)
        self._batch = _Batch(llama, min(MOST_ROWS, int(params.n_ubatch)))

    @property
    def is_idle(self) -> bool:
        return len(self.unused) == self.n_sequences

    def take(self) -> int | None:
        """The number of an empty sequence, None where all are taken; of several threads, each gets another one."""
        try:
            return self.unused.pop()
        except IndexError:
            return None

    def give_back(self, sequence: int) -> None:
        """Empty a sequence, so that the next one may have it."""
        with self._lock:
            if self._free.alive:
                self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self.unused.append(sequence)

    def close(self) -> None:
        self._free()

    def remove(self, sequence: int, n_past: int, keep: int) -> None:
        """Cut a sequence of `n_past` tokens to its first `keep`.

        Raises CacheError where llama.cpp refuses, or where what is left is not those tokens: layers with a sliding
        window forget old ones, and removal succeeds all the same.
        """
        if keep == n_past:
            return
        llama, memory = self._llama, self._memory
        with self._lock:
            if keep == 0:
                llama.llama_memory_seq_rm(memory, sequence, -1, -1)
                return
            done = llama.llama_memory_seq_rm(memory, sequence, keep, -1)
            first = llama.llama_memory_seq_pos_min(memory, sequence)
            last = llama.llama_memory_seq_pos_max(memory, sequence)
        if not done:
            raise CacheError(
                f"{self._name}: llama.cpp cannot take back {n_past - keep} of {n_past} tokens of its cache."
            )
        needed = max(0, keep + 1 - self._window) if self._window else 0
        if last != keep - 1 or not 0 <= first <= needed:
            raise CacheError(
                f"{self._name}: of {keep} tokens to keep, llama.cpp's cache holds the positions {first} to {last} and "
                f"{needed} to {keep - 1} are needed: its sliding window has moved on."
            )

    def undo(self, work: Work) -> None:
        """Take back what a stopped `run` put into the cache; raises CacheError as `remove` does."""
        with self._lock:
            n_held = int(self._llama.llama_memory_seq_pos_max(self._memory, work.sequence)) + 1
            self.remove(work.sequence, n_held, work.start)

    def run(self, works: Sequence[Work]) -> float:
        """Run the tokens of every work, in as few passes as fit; seconds in llama.cpp.

        Raises BackendError. Where anything stops it, some of the tokens are in the caches: see `undo`.
        """
        with self._lock:
            queue = [(work, 0) for work in works]
            run_s = 0.0
            while queue:
                run_s += self._pass(queue)
            return run_s

    def _pass(self, queue: list[tuple[Work, int]]) -> float:
        """One llama_decode over the next tokens of the queue, which it shortens."""
        batch, llama = self._batch, self._llama
        batch.clear()
        wanted: list[tuple[Work, int, int]] = []  # work, index of the wanted row in it, row of the batch
        while queue and batch.room:
            work, done = queue.pop(0)
            n = min(batch.room, len(work.tokens) - done)
            rows = [row - done for row in work.rows if done <= row < done + n]
            at = batch.add(work.tokens[done : done + n], work.start + done, work.sequence, rows)
            first = next((i for i, row in enumerate(work.rows) if row >= done), 0)
            wanted += [(work, first + i, at + row) for i, row in enumerate(rows)]
            if done + n < len(work.tokens):
                queue.insert(0, (work, done + n))
        clear_log()
        started_s = time.perf_counter()
        status = llama.llama_decode(self._pointer, batch.struct())
        if status != 0:
            raise BackendError(f"{self._name}: llama.cpp failed on {batch.n} tokens with status {status}: {why()}.")
        llama.llama_synchronize(self._pointer)
        run_s = time.perf_counter() - started_s
        for work, index, row in wanted:
            logits = llama.llama_get_logits_ith(self._pointer, row)
            if not logits:
                raise BackendError(f"{self._name}: llama.cpp gave no logits for row {row}: {why()}.")
            work.out[index] = self._row.from_address(ctypes.addressof(logits.contents))
        return run_s


def _free_context(llama: Any, pointer: Any, _weights: Weights) -> None:
    llama.llama_free(pointer)


class _Batch:
    """A llama_batch whose arrays belong to numpy; each token is of one sequence."""

    def __init__(self, llama: Any, size: int) -> None:
        self._llama, self.size, self.n = llama, size, 0
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._counts = np.ones(size, np.int32)
        self._wants = np.zeros(size, np.int8)
        # seq_id is an array of pointers, one a token
        self._pointers = np.uintp(self._sequences.ctypes.data) + 4 * np.arange(size, dtype=np.uintp)

    @property
    def room(self) -> int:
        return self.size - self.n

    def clear(self) -> None:
        self.n = 0

    def add(self, tokens: Sequence[int], position: int, sequence: int, rows: Sequence[int]) -> int:
        """Append a sequence's tokens; the place of the first one."""
        start, end = self.n, self.n + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens))
        self._sequences[start:end] = sequence
        self._wants[start:end] = 0
        self._wants[start + np.array(_outputs(rows, len(tokens)), np.int64)] = 1
        self.n = end
        return start

    def struct(self) -> Any:
        def at(array: Any, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        return self._llama.llama_batch(
            self.n,
            at(self._tokens, ctypes.c_int32),
            None,
            at(self._positions, ctypes.c_int32),
            at(self._counts, ctypes.c_int32),
            at(self._pointers, ctypes.POINTER(ctypes.c_int32)),
            at(self._wants, ctypes.c_int8),
        )


def _outputs(rows: Sequence[int], n_tokens: int) -> Sequence[int]:
    """The rows that get logits: the wanted ones and, before anything else is asked, the last others to fill up."""
    if not rows or n_tokens <= OUTPUT_ROWS:
        return range(n_tokens) if rows else ()
    n = min(n_tokens, -(-len(rows) // OUTPUT_ROWS) * OUTPUT_ROWS)
    wanted = set(rows)
    others = [row for row in range(n_tokens - 1, -1, -1) if row not in wanted]
    return sorted([*wanted, *others[: n - len(wanted)]])

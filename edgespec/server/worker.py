"""One thread that decodes: requests wait for their turn, and one that nobody waits for any more ends within a round,
or once its prompt is read.

Knows no HTTP. An `edgespec.LLM` serves one request at a time; its caches are reused from one to the next.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator

from edgespec.errors import EdgeSpecError
from edgespec.outputs import Delta

__all__ = ["MOST_WAITING", "Busy", "Job", "Stopped", "Worker"]

MOST_WAITING = 64


class Busy(EdgeSpecError):
    """MOST_WAITING requests wait already."""


class Stopped(EdgeSpecError):
    """The worker was stopped before the request came to its end."""


class Job:
    """One request. deltas: not begun yet; run on the worker's thread alone."""

    def __init__(self, deltas: Iterator[Delta]) -> None:
        self._deltas = deltas
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._is_left = threading.Event()

    async def deltas(self) -> AsyncIterator[Delta]:
        """As they come; raises what decoding raised. Leaving the loop, or being cancelled in it, ends the request."""
        try:
            while (news := await self._news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody waits any more."""
        self._is_left.set()

    def run(self) -> None:
        """On the worker's thread: to the end, or until nobody waits. Raises nothing, for the sake of the next one."""
        error: BaseException | None = None
        try:
            self._decode()
        except BaseException as caught:
            error = caught
        self._end(error)

    def refuse(self) -> None:
        """Say that it will not be run."""
        self._end(Stopped("the server stops"))

    def _decode(self) -> None:
        is_done = False
        try:
            while not self._is_left.is_set() and not is_done:
                delta = next(self._deltas)
                is_done = delta.output is not None
                self._tell(delta)
        finally:
            self._deltas.close()  # type: ignore[attr-defined]
        if not is_done:
            raise Stopped("the request was ended")

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._tell(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
        self._tell(None)

    def _tell(self, news: Delta | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:  # the server has stopped
            self.leave()


class Worker:
    """Runs jobs in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._is_stopped = False
        self._lock = threading.RLock()  # a signal may stop it in the thread that submits
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, deltas: Iterator[Delta]) -> Job:
        """A job that waits for its turn; raises Busy where too many wait, Stopped after `stop`."""
        with self._lock:
            if self._is_stopped:
                raise Stopped("the server stops")
            if self._waiting.qsize() >= MOST_WAITING:
                raise Busy(f"{MOST_WAITING} requests wait already: try again later")
            job = Job(deltas)
            self._waiting.put(job)
            return job

    def stop(self) -> None:
        """End the request that runs within a round, and those that wait at once."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            if self._current is not None:
                self._current.leave()
            self._waiting.put(None)

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            if self._begin(job):
                job.run()
                with self._lock:
                    self._current = None
            else:
                job.refuse()

    def _begin(self, job: Job) -> bool:
        with self._lock:
            if not self._is_stopped:
                self._current = job
            return not self._is_stopped

"""One thread that decodes: requests wait for their turn, and one that nobody waits for any more ends within a round.

Knows no HTTP. An `edgespec.LLM` serves one request at a time; its caches are reused from one to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Iterator

from edgespec.outputs import Delta

__all__ = ["Full", "Job", "Worker"]

MOST_WAITING = 256

Full = queue.Full


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
        """On the worker's thread: to the end, or until nobody waits."""
        news: Exception | None = None
        try:
            if not self._is_left.is_set():
                for delta in self._deltas:
                    self._tell(delta)
                    if self._is_left.is_set():
                        break
        except Exception as error:  # the request's own; the next one is none the worse
            news = error
        finally:
            self._deltas.close()  # type: ignore[attr-defined]
            self._tell(news)
            if news is not None:
                self._tell(None)

    def _tell(self, news: Delta | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:  # the server has stopped
            self.leave()


class Worker:
    """Runs jobs in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Job | None] = queue.Queue(MOST_WAITING)
        self._current: Job | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, deltas: Iterator[Delta]) -> Job:
        """A job that waits for its turn; raises Full where MOST_WAITING wait already."""
        job = Job(deltas)
        self._waiting.put_nowait(job)
        return job

    def close(self) -> None:
        """End the request that runs and those that wait, and the thread."""
        self._is_closed = True
        current = self._current
        if current is not None:
            current.leave()
        with contextlib.suppress(queue.Full):  # then whoever is next sees that it is closed
            self._waiting.put_nowait(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None and not self._is_closed:
            self._current = job
            job.run()
            self._current = None

"""How engines are measured: each side, edgespec among them, is a child process that speaks JSON lines.

It runs in its engine's own environment; its end of the protocol is `children/line_server.py`. A request to decode:

    {"do": "decode", "setting": "plain", "prompt": [ids], "n_tokens": 128, "temperature": 0.0,
     "top_p": 1.0, "seed": 1}

Answer: `tokens` (exactly n_tokens; the end of sequence is ignored), `first_tokens` (how many came at once with the
first), `ttft_s` (prompt to first token), `seconds` and `cpu_s` (wall and processor time from the first token's arrival
to the last's), `peak_rss_mb` (of the process so far, weights included), and, where the engine tells, else null:
`rounds` (target passes after the first arrival), `drafted`, `accepted`, `by_position` (share of the rounds that offered
a place and accepted one there), `host_s` (of the rounds). `decode_tok_s` makes tokens a second of an answer.

Owns the processes and this end of the protocol; `sides` lists what there is, `peers` owns environments and models.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from edgespec.children import describe_exit
from edgespec.config import child_environment
from edgespec.errors import BackendError, ConfigError
from edgespec_bench.peers import Peer

__all__ = ["CHILDREN", "Child", "Side", "SideProcess", "What", "decode_tok_s", "open_sides"]

CHILDREN = Path(__file__).with_name("children")
What = Literal["plain", "speculative"]
_GOODBYE_S = 10.0  # to end by itself once its input is closed; afterwards it is ended


@dataclass(frozen=True)
class Side:
    """An engine in one setting.

    what: plain | speculative. options: what its child is told, and every result repeats. note: in words, what it is and
    why it is the engine's best sensible setting. peer: None is edgespec itself, in this environment. child: a script in
    `children`, or a program among the peer's models. parts: of the peer's models that it needs.
    """

    engine: str
    setting: str
    what: What
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    peer: Peer | None = None
    child: str = "edgespec_child.py"
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique: `llama.cpp/prompt-lookup`."""
        return f"{self.engine}/{self.setting}"

    def missing(self, model: str) -> str | None:
        """What keeps it from running on this pair, as a clause; None where it is ready."""
        return None if self.peer is None else self.peer.missing(model, self.parts)

    def start(self, model: str, threads: int) -> SideProcess:
        """A process of its own with this setting alone. Raises ConfigError where the peer is not set up."""
        child = _start([self], model, threads)
        return SideProcess(self, child, owns=True)


class SideProcess:
    """A side that is ready to decode; several sides of one engine may share a process."""

    def __init__(self, side: Side, child: Child, *, owns: bool) -> None:
        self.side, self.name, self._child, self._owns = side, side.name, child, owns
        self.version, self.load_s = str(child.ready["version"]), float(child.ready["load_s"])
        self.settings: dict[str, Any] = {**child.ready["settings"][side.setting], "threads": child.ready["threads"]}

    def decode(
        self, prompt: Sequence[int], n_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 1
    ) -> dict[str, Any]:
        """The answer to a decode request. Raises BackendError where the engine fails or miscounts."""
        request = {"prompt": list(prompt), "n_tokens": n_tokens, "temperature": temperature, "top_p": top_p}
        answer = self.ask(do="decode", **request, seed=seed)
        if len(answer["tokens"]) != n_tokens:
            raise BackendError(f"{self.name} gave {len(answer['tokens'])} tokens where {n_tokens} were asked for")
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to any request. Raises BackendError where the engine fails or dies."""
        return self._child.ask(self.name, {**request, "setting": self.side.setting})

    def close(self) -> None:
        if self._owns:
            self._child.close()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Child:
    """A child process: a JSON line out, a JSON line back, one at a time. Its stderr goes into a file."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=child_environment(**(environment or {})),
        )
        try:
            self.ready = self._read(name, "while it was loaded")
        except BackendError:
            self.close()
            raise

    def ask(self, side: str, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` says what happened
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read(side, "in the middle of a measurement")

    def _read(self, side: str, when: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise BackendError(f"{describe_exit(side, code)} {when}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BackendError(f"{side} failed {when}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def close(self) -> None:
        """Let it end, or end it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread request to a child that died
                    pipe.close()
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


@contextmanager
def open_sides(sides: Sequence[Side], model: str, threads: int) -> Iterator[dict[str, SideProcess]]:
    """All of them, ready, by name; the sides of one engine share a process (peak memory is then that of all).

    Raises ConfigError before anything is started where one is not set up.
    """
    _refuse_missing(sides, model)
    engines = dict.fromkeys(side.engine for side in sides)
    with ExitStack() as stack:
        running: dict[str, SideProcess] = {}
        for engine in engines:
            group = [side for side in sides if side.engine == engine]
            child = _start(group, model, threads)
            stack.callback(child.close)
            running.update({side.name: SideProcess(side, child, owns=False) for side in group})
        yield running


def _refuse_missing(sides: Sequence[Side], model: str) -> None:
    for side in sides:
        missing = side.missing(model)
        if missing:
            raise ConfigError(f"{side.name}: {missing}; run `python -m edgespec_bench peers --setup`")


def _start(group: Sequence[Side], model: str, threads: int) -> Child:
    _refuse_missing(group, model)
    side, peer = group[0], group[0].peer
    given: dict[str, Any] = {"threads": threads, "settings": {s.setting: dict(s.options) for s in group}}
    if peer is None:
        given["model"] = model
        command = [sys.executable, str(CHILDREN / side.child)]
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    else:
        folder = peer.model_folder(model)
        given["model"] = str(folder)
        is_script = side.child.endswith(".py")
        command = [str(peer.python), str(CHILDREN / side.child)] if is_script else [str(folder / side.child)]
        # Some libraries take their threads from here. No path of ours reaches the peer, and it needs no network.
        environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    return Child(side.engine, [*command, json.dumps(given)], environment)


def decode_tok_s(answer: Mapping[str, Any]) -> float:
    """Tokens a second after the first arrival. Raises BackendError where everything came at once."""
    n_timed = len(answer["tokens"]) - answer["first_tokens"]
    if n_timed < 1 or answer["seconds"] <= 0:
        raise BackendError(f"{len(answer['tokens'])} tokens came at once, so there is no speed: ask for more tokens")
    return float(n_timed / answer["seconds"])

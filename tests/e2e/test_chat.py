"""`edgespec chat` on the real model: piped, as JSON, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from edgespec import LLM, SamplingParams

pytestmark = pytest.mark.real_model

SUM = "What is two plus three? Answer in one word."


def chat(*arguments: str, stdin: bytes, env: dict[str, str], code: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "chat", "-n", "12", *arguments],
        env=env,
        input=stdin,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done


def test_lines_are_messages_of_one_conversation(child_env: dict[str, str], real_bundle: str) -> None:
    done = chat("--json", stdin=f"{SUM}\nAnd minus one?\n".encode(), env=child_env)
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    params, messages = SamplingParams(temperature=0.0, max_tokens=12), [{"role": "user", "content": SUM}]
    with LLM(real_bundle, draft="none") as llm:
        for turn, text in zip(turns, ("And minus one?", None), strict=True):
            output = llm.chat(messages, params).outputs[0]
            assert (turn["text"], turn["token_ids"]) == (output.text, output.token_ids)
            messages += [{"role": "assistant", "content": output.text}, {"role": "user", "content": text or "-"}]
    assert turns[1]["stats"]["cached_tokens"] >= turns[0]["stats"]["prompt_tokens"]
    assert turns[0]["stats"]["controller"]["plan"], "the plan chooses where no draft is named"


def test_commands_blocks_and_ends(child_env: dict[str, str]) -> None:
    looks = ' /usr is what?\n"""\n/* no command */\n"""\n/clear\n'
    block = '"""\nSay\n\nyes\n"""\n'
    text = f"{looks}/help\n{SUM}\n/stats\n/regen\n/clear\n{block}/system Answer in French.\n{SUM}\n/bye\nnever\n"
    done = chat("--draft", "none", "--json", stdin=text.encode(), env=child_env)
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(turns) == 6
    turns = turns[2:]  # the first two only look like commands
    assert turns[0]["token_ids"] == turns[1]["token_ids"]
    assert turns[2]["stats"]["prompt_tokens"] < turns[1]["stats"]["prompt_tokens"]
    assert b"/regen" in done.stderr
    assert b"tokens of conversation" in done.stderr


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"/nope\n", b"there is no command /nope"),
        (b"/regen\n", b"nothing has been asked"),
        (b"/clear all\n", b"/clear takes nothing"),
        (b"/stats\n", b"no answer"),
        (b'"""\nhello\n', b"has no end"),
        (b"ok\n\xff\n", b"line 2 is not UTF-8"),
    ],
)
def test_mistakes_in_a_pipe_are_one_line(child_env: dict[str, str], stdin: bytes, message: bytes) -> None:
    done = chat("--draft", "none", stdin=stdin, env=child_env, code=2)
    assert message in done.stderr


def test_nothing_to_say_is_no_error(child_env: dict[str, str]) -> None:
    assert chat("--draft", "none", stdin=b"\n\n", env=child_env).stdout == b""


class Terminal:
    """A child process in a terminal of its own."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.execve(sys.executable, [sys.executable, "-m", "edgespec", *arguments], {**env, "TERM": "dumb"})
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Read until `text` has come since the last wait."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.terminal], [], [], 1.0)[0]:
                self.seen += os.read(self.terminal, 4096).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def end(self) -> int:
        """The exit status, once everything has been read."""
        try:
            while data := os.read(self.terminal, 4096):
                self.seen += data.decode(errors="replace")
        except OSError:  # the other end is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_ends_an_answer_and_not_the_chat(child_env: dict[str, str]) -> None:
    terminal = Terminal(["chat", "--draft", "ngram", "-n", "4000", "--ignore-eos", "-c", "8192"], child_env)
    terminal.wait_for(">>> ")
    terminal.type("Write a long story about a fox.\n")
    terminal.wait_for("fox.")  # its echo
    terminal.wait_for("he", 60)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for(">>> ")
    terminal.type("Go on.\n")
    terminal.wait_for("Go on.")
    time.sleep(0.2)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for(">>> ")
    terminal.type("/nope\n")
    terminal.wait_for("there is no command /nope")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen

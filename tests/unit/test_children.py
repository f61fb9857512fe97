"""Exit statuses in words, from real children."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from edgespec.children import describe_exit

KILL_SELF = "import os, sys; print('partial', flush=True); os.kill(os.getpid(), int(sys.argv[1]))"


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGKILL, "memory"), (signal.SIGILL, "instruction"), (signal.SIGSEGV, "native code")],
)
def test_a_killed_child_keeps_its_output_and_the_cause_is_hinted(number: signal.Signals, word: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILL_SELF, str(int(number))], capture_output=True, text=True, check=False
    )
    assert child.stdout == "partial\n"
    sentence = describe_exit("the worker", child.returncode)
    assert sentence.startswith(f"the worker was killed by signal {int(number)} ({number.name})")
    assert word in sentence


def test_shells_report_signals_as_128_and_more() -> None:
    child = subprocess.run(["sh", "-c", "kill -9 $$; :"], capture_output=True, check=False)
    assert describe_exit("it", child.returncode) == describe_exit("it", 128 + 9)


@pytest.mark.parametrize("code", [0, 1, 2, 255])
def test_plain_statuses_are_just_that(code: int) -> None:
    assert describe_exit("pip", code) == f"pip ended with status {code}"

"""Exit statuses in words, from real children."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.children import describe_exit
from edgespec.cpu import missing_features, read_topology

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


ARM_CPUINFO = "processor\t: 0\nFeatures\t: fp asimd {extra}crc32 cpuid\nCPU part\t: 0xd08\n"


@pytest.mark.parametrize(("extra", "said"), [("", "(it lacks dotprod)"), ("asimddp ", "does not have: the installed")])
def test_an_illegal_instruction_names_the_feature_that_the_cpu_lacks(tmp_path: Path, extra: str, said: str) -> None:
    """CASES 50: a phone without dotprod ran a build that wants it, and all that was seen was the status -4."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(ARM_CPUINFO.format(extra=extra), encoding="utf-8")
    topology = read_topology(tmp_path, allowed=[0])
    assert ("dotprod" in topology.features) == bool(extra)
    child = subprocess.run([sys.executable, "-c", KILL_SELF, str(int(signal.SIGILL))], capture_output=True, check=False)
    sentence = describe_exit("the compiler", child.returncode, topology, "aarch64")
    assert sentence.startswith(
        "the compiler was killed by signal 4 (SIGILL), an instruction that this CPU does not have"
    )
    assert said in sentence


def test_a_cpu_that_lists_nothing_is_accused_of_nothing(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, allowed=[0])
    assert missing_features(topology, "aarch64") == []
    assert "lacks" not in describe_exit("it", -int(signal.SIGILL), topology, "aarch64")

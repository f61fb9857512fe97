"""The README's commands work as they stand there.

A ```sh or ```python block is marked after the language: `run` blocks are run here, in order, in one empty folder;
`setup` blocks (clone, virtual environment, make) are what the continuous integration script does, and may hold nothing
else. A block with neither mark is a mistake, so that no command goes untested unnoticed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LANGUAGES = ("sh", "python")
SETUP = re.compile(
    r"(git clone|cd|make (demo|test|check|bench|venv)|python3? -m venv|(\S*/)?pip install|(source|\.) \S+activate)\b.*"
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its first line in the file, language, mark and text."""

    line: int
    language: str
    mark: str
    text: str


def blocks(text: str) -> list[Block]:
    """Every fenced block in a language that could be run."""
    found, start, info, lines = [], 0, None, []
    for number, line in enumerate(text.splitlines(), 1):
        if info is None and line.startswith("```"):
            start, info, lines = number, line[3:].split(), []
        elif info is not None and line.startswith("```"):
            if info and info[0] in LANGUAGES:
                found.append(Block(start, info[0], " ".join(info[1:]), "\n".join(lines)))
            info = None
        elif info is not None:
            lines.append(line)
    assert info is None, f"README.md line {start}: the block is not closed"
    return found


def commands(block: Block) -> list[str]:
    joined = block.text.replace("\\\n", " ")
    return [line.split("#", 1)[0].strip() for line in joined.splitlines() if line.split("#", 1)[0].strip()]


def test_every_block_is_marked() -> None:
    found = blocks(README.read_text(encoding="utf-8"))
    assert any(block.mark == "run" and block.language == "sh" for block in found)
    for block in found:
        where = f"README.md line {block.line}"
        assert block.mark in {"run", "setup"}, f"{where}: mark the block as `run` or `setup` after the language"
        if block.mark == "setup":
            strange = [command for command in commands(block) if not SETUP.fullmatch(command)]
            assert not strange, f"{where}: not a set-up command: {strange}"


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_commands_work(tmp_path: Path, real_bundle: Path, child_env: dict[str, str]) -> None:
    """All `run` blocks, one after the other, with this interpreter's edgespec first on the path."""
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    python = shlex.quote(sys.executable)
    for name, module in (("edgespec", "-m edgespec"), ("python", ""), ("python3", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {python} {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    environment = {**child_env, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks(README.read_text(encoding="utf-8")):
        if block.mark == "run":
            run_block(block, work, environment)


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """One bash for the whole block, which must end well and print no traceback."""
    program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, block.text],
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    report = f"README.md line {block.line}, exit {done.returncode}:\n{block.text}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, report
    assert "Traceback" not in done.stderr, report

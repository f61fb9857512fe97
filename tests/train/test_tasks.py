"""First user turns: built-in tasks and files of prompts, and rows that begin with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgespec_bench.prompts import KINDS, load_prompts
from edgespec_models.conversation import Row, Script
from edgespec_models.tasks import read_prompts, task

from edgespec.errors import ConfigError


def test_tasks_are_a_function_of_their_number_and_mostly_different() -> None:
    tasks = [task(number) for number in range(600)]
    assert tasks == [task(number) for number in range(600)]
    assert len(set(tasks)) > 500
    assert all(text.strip() == text and text and "{" not in text for text in tasks)


def test_tasks_hold_none_of_the_prompts_that_drafts_are_judged_on() -> None:
    held_out = {prompt.prompt for kind in KINDS for prompt in load_prompts(kind)}
    assert not held_out & {task(number) for number in range(3000)}


def test_a_row_with_an_opening_takes_it_and_the_reply_header_before_the_assistant_speaks() -> None:
    row = Row(Script(head=(1, 2), reply=(3, 4), back=(5, 6), stop_ids=(3, 5)), 8, opening=(10, 11))
    steps = 0
    while not row.needs_sample:
        row.push(None)
        steps += 1
    assert row.tokens == [1, 2, 10, 11, 3, 4]
    assert steps == 4
    row.push(20)
    assert row.assistant == [False] * 6 + [True]
    assert not np.any(row.assistant[:6])


def test_prompt_files_are_read_and_their_faults_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 3}\n', encoding="utf-8")
    assert read_prompts(str(path)) == ["one", "two"]
    assert read_prompts("tasks") is None
    for text, complaint in (('{"prompt": 3}', "line 1"), ("{", "line 1"), ('["x"]', "line 1"), ("", "no prompts")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=complaint):
            read_prompts(str(path))
    with pytest.raises(ConfigError, match="does not exist"):
        read_prompts(str(tmp_path / "missing.jsonl"))

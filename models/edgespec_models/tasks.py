"""First user turns for a corpus: short tasks of the kinds that people give an assistant, put together from parts.

What a model asks itself is mostly small talk; drafts that have seen code, JSON, summaries and edits follow a target
there too. Owns the wording (ours, none of it in bench/prompts; its parts are in tasks.toml) and a numbering: the same
number is the same task.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np

from edgespec.errors import ConfigError

__all__ = ["BUILT_IN", "read_prompts", "task"]

BUILT_IN = "tasks"
MOST_BYTES = 64 << 20

_PARTS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "tasks.toml").read_text(encoding="utf-8"))


class _Draw:
    """Choices that depend on a number alone."""

    def __init__(self, number: int) -> None:
        self._rng = np.random.default_rng([20_231, number])

    def pick(self, options: list[str]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def one(self, part: str) -> str:
        return self.pick(_PARTS[part])

    def some(self, part: str, n: int) -> list[str]:
        """`n` different ones."""
        options = _PARTS[part]
        return [options[int(i)] for i in self._rng.permutation(len(options))[:n]]

    def number(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def passage(self, n: int) -> str:
        """`n` sentences."""
        return " ".join(
            text.format(a=self.one("things"), n=self.one("names"), k=self.number(3, 40))
            for text in self.some("sentences", n)
        )


def _chat(draw: _Draw) -> str:
    topic, other = draw.some("topics", 2)
    return draw.pick(
        [
            f"Explain {topic} to {draw.one('people')}.",
            f"What are the most important facts about {topic}?",
            f"Write a short story about {draw.one('heroes')} who {draw.one('deeds')}.",
            f"How do I {draw.one('skills')}? Give me step by step instructions.",
            f"Give me {draw.number(3, 8)} tips to {draw.one('skills')}.",
            f"What is the connection between {topic} and {other}?",
            f"Why are {topic} important?",
            f"Write a poem about {topic}.",
            f"I am planning a trip to {draw.one('places')}. What should I see and what should I avoid?",
            f"What are the advantages and disadvantages of {topic}?",
            f"Compare {topic} with {other}.",
            f"Give me {draw.number(3, 7)} ideas for a birthday present for {draw.one('people')}.",
            f"Write an email to {draw.one('names')} to say that I cannot come to the meeting about {topic}.",
            f"Can you tell me something surprising about {topic}?",
            f"Describe a day in the life of a {draw.one('work')} in {draw.one('places')}.",
        ]
    )


def _code(draw: _Draw) -> str:
    language, job = draw.one("languages"), draw.one("jobs")
    return draw.pick(
        [
            f"Write a {language} function that {job}.",
            f"Write a {language} program that {job}, with comments.",
            f"Show me how to write code in {language} that {job}, and explain it.",
            f"Write a {language} class for {draw.one('records')} with the fields {', '.join(draw.some('fields', 3))}.",
            f"Write unit tests for a {language} function that {job}.",
        ]
    )


def _json(draw: _Draw) -> str:
    record, fields = draw.one("records"), draw.some("fields", draw.number(3, 5))
    name, work, city = draw.one("names"), draw.one("work"), draw.one("places")
    return draw.pick(
        [
            f"Write a JSON object for {record} with the keys {', '.join(fields)}.",
            f"Give me a JSON array with {draw.number(2, 5)} examples of {record}, each with {', '.join(fields)}.",
            f"Convert this to JSON: {name}, {draw.number(18, 70)} years old, works as a {work} in {city}.",
            f"Write a JSON schema for {record} with {', '.join(fields)}.",
            f"List {draw.number(3, 6)} facts about {draw.one('topics')} as JSON with the keys title and text.",
        ]
    )


def _summarise(draw: _Draw) -> str:
    text = draw.passage(draw.number(4, 7))
    return draw.pick(
        [
            f"Summarise this text in {draw.number(1, 3)} sentences:\n\n{text}",
            f"What is this text about?\n\n{text}",
            f"Give the main points of the following text as a list:\n\n{text}",
            f"Write a headline and a short summary for this:\n\n{text}",
        ]
    )


def _edit(draw: _Draw) -> str:
    text = draw.passage(draw.number(2, 4))
    return draw.pick(
        [
            f"Rewrite this text in simpler words:\n\n{text}",
            f"Repeat this text and put every sentence on a line of its own:\n\n{text}",
            f"Rewrite this as if it happens tomorrow:\n\n{text}",
            f"Correct any mistakes and give the whole text again:\n\n{text}",
            f"Repeat the following text, but replace every name by 'the visitor':\n\n{text}",
        ]
    )


_KINDS = (_chat, _chat, _code, _chat, _json, _chat, _summarise, _chat, _edit, _code, _chat, _json)


def task(number: int) -> str:
    """The task of that number: half of them chat, the rest code, JSON, summaries and edits."""
    return _KINDS[number % len(_KINDS)](_Draw(number))


def read_prompts(source: str | None) -> list[str] | None:
    """Prompts of a .jsonl file (one object with `prompt` a line), or None for the built-in tasks and for none.

    Raises ConfigError for a file that holds something else, naming the line.
    """
    if source is None or source == BUILT_IN:
        return None
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give a .jsonl file of prompts, or --prompts {BUILT_IN}")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} is {path.stat().st_size:,} bytes long: prompts have at most {MOST_BYTES:,}")
    prompts: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"] if line.strip() else None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f'{path}, line {number} is no {{"prompt": "..."}}') from error
        if prompt is None:
            continue
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{path}, line {number}: the prompt must be text that is not empty")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts

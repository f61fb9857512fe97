"""The words the exporter needs: strings that end a turn, a passage to compare models on, conversations to calibrate on.

Owns no tokenizer; it asks edgespec's for ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from edgespec.errors import EdgeSpecError, ExportError
from edgespec_export.config import ModelConfig

__all__ = ["CALIBRATION_FILE", "END_OF_TURN", "calibration_tokens", "check_tokens"]

CALIBRATION_FILE = Path(__file__).with_name("calibration.jsonl")  # where it comes from: README.md of export/
END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>"})

_QUESTIONS = (
    (
        "Why does the moon have phases?",
        "The moon does not give light of its own; half of it is always lit by the sun. As it moves around the Earth we"
        " see that lit half from different sides. When the moon stands between us and the sun, the lit half faces away"
        " and the moon is new. A week later we see half of it, and after two weeks, when it is opposite the sun, the"
        " whole face is bright: a full moon. Then the light shrinks again, until the cycle of about 29.5 days is over.",
    ),
    (
        "Write a Python function that counts the words in a file.",
        "Here is a function that opens the file, reads it line by line and adds up the words:\n\n```python\n"
        'def count_words(path):\n    total = 0\n    with open(path, encoding="utf-8") as file:\n'
        "        for line in file:\n            total += len(line.split())\n    return total\n```\n\n"
        'Calling `count_words("notes.txt")` returns the number of words. `split()` without an argument cuts at any'
        " white space, so several spaces in a row do not count as empty words.",
    ),
    (
        "Tell me about bread in three sentences.",
        "Bread is one of the oldest foods that people prepare: flour, water and heat are enough. Yeast or a sourdough"
        " culture fills the dough with gas, which makes the loaf light and gives it flavour. Around the world it is"
        " baked in countless forms, from flat naan and tortillas to dark rye and crisp baguettes.",
    ),
)


class Sizes(Protocol):
    """What a text has to fit: a ModelConfig or a ModelInfo."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...


def check_tokens(folder: Path, config: Sizes, count: int) -> list[int]:
    """At most `count` ids of the passage, by the tokenizer in `folder`, within the model's vocabulary and context.

    A tokenizer that makes too little of it (a test's, or one for another script) is topped up with fixed random ids.
    """
    messages = [
        {"role": role, "content": text}
        for pair in _QUESTIONS
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    ids = _encoded(folder, config, [messages])[0][:count]
    filler: list[int] = np.random.default_rng(0).integers(0, config.n_vocab, count).tolist()
    return (ids + filler[len(ids) :])[: min(count, config.n_ctx)]


def calibration_tokens(folder: Path, config: ModelConfig) -> list[list[int]]:
    """Ids of each conversation in calibration.jsonl by the tokenizer in `folder`; other text than the check's.

    Conversations stay apart: joined to sequences of 512 tokens they gave a KLD of 0.21 instead of 0.15. They are cut at
    the model's context. Raises ExportError where the tokenizer makes nothing of them.
    """
    lines = CALIBRATION_FILE.read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    sequences = [ids[: config.n_ctx] for ids in _encoded(folder, config, conversations) if ids]
    if not sequences:
        raise ExportError("the tokenizer makes no tokens of the calibration text: use quantizer mse or rtn.")
    return sequences


def _encoded(folder: Path, config: Sizes, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
    """Each conversation in the model's chat template, or as bare text where it has none."""
    from edgespec.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    encoded = []
    for messages in conversations:
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
            ids = tokenizer.encode(text, add_special=False)
        except EdgeSpecError:
            ids = tokenizer.encode("\n\n".join(message["content"] for message in messages))
        encoded.append([token for token in ids if token < config.n_vocab])
    return encoded

"""What conversations are tested on: a template of the ChatML family, and logits from a table instead of a model."""

from __future__ import annotations

import numpy as np

from edgespec.types import Rows

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
SCALED_ROPES = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
END, START = 257, 256  # <|im_end|> and <s> of the tiny tokenizer


class TableBatch:
    """Logits by the last token alone; counts its calls. fail_at: the call that is interrupted."""

    n_calls = 0

    def __init__(self, n: int, table: np.ndarray, fail_at: int | None = None) -> None:
        self.n, self.table, self.fail_at = n, table, fail_at
        self.seen: list[np.ndarray] = []
        self.is_closed = False

    def forward(self, tokens: np.ndarray) -> Rows:
        TableBatch.n_calls += 1
        if self.fail_at is not None and TableBatch.n_calls >= self.fail_at:
            raise KeyboardInterrupt
        assert tokens.shape[0] == self.n
        self.seen.append(tokens.copy())
        return Rows(self.table[tokens[:, -1]])

    def close(self) -> None:
        self.is_closed = True

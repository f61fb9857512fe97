"""A table model that can chat: a tiny tokenizer and a template whose turns begin as the conversation before them."""

from __future__ import annotations

from pathlib import Path

from edgespec import LLM
from edgespec.testing import TableModel
from edgespec.testing.tokenizer import write_tokenizer
from edgespec.text import Tokenizer

__all__ = ["N_VOCAB", "SYSTEMLESS", "TEMPLATE", "make_llm"]

N_VOCAB = 67
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}a"
SYSTEMLESS = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


def make_llm(folder: Path, template: str | None = TEMPLATE, n_ctx: int = 256) -> LLM:
    write_tokenizer(folder, N_VOCAB)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return LLM(TableModel(N_VOCAB, seed=4, n_ctx=n_ctx), draft="ngram", tokenizer=Tokenizer.load(folder))

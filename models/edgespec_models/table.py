"""Counts what a target wrote into a table for static lookup: what follows its last few tokens most often.

Owns the counting and the writing of a table's folder; reading it is `edgespec.draft.table`. Knows no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.draft.table import ENTRIES, FORMAT, VERSION, WHOLE, context_keys, entry_type
from edgespec.zoo_config import CONFIG
from edgespec_models.acceptance import SETTINGS, held_out_prompts, measure
from edgespec_models.corpus import Corpus

if TYPE_CHECKING:
    from edgespec_models.pipeline import Progress, Target

__all__ = ["TableRequest", "count_table", "make_table", "write_table"]

LEAST_SEEN = 2  # a continuation that was seen once is chance
UNSEEN = 1.0  # how often every context is taken to have been followed by something else
PROMPTS, TOKENS, DRAFTED = 24, 128, 4
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TableRequest:
    """What `edgespec train table` was asked for. order: tokens of the longest context. most: entries to keep."""

    target: Target
    corpora: tuple[Path, ...]
    out: Path
    order: int = 4
    most: int = 220_000
    commands: tuple[str, ...] = ()


def make_table(request: TableRequest, progress: Progress | None = None) -> dict[str, Any]:
    """Count, measure on the corpus's held-out rows, and leave table and card in `request.out`; its config.json.

    Raises ConfigError before any work for a corpus that is missing or of another tokenizer.
    """
    corpora = [Corpus.load(path) for path in request.corpora]
    info = request.target.bundle.info
    for corpus in corpora:
        corpus.check_vocabulary(info.n_vocab, info.tokenizer_hash)
    corpus = Corpus.join(corpora)
    prompts = held_out_prompts(corpus, PROMPTS)
    n = len(corpus) - corpus.n_held_out
    if progress is not None:
        progress("counting", 0, None)
    entries = count_table(corpus.tokens[:n], corpus.assistant[:n], request.order, info.n_vocab, request.most)
    facts: dict[str, Any] = {
        "target": info.name,
        "tokenizer_hash": info.tokenizer_hash,
        "n_vocab": info.n_vocab,
        "order": request.order,
        "training": {
            "n_rows": n,
            "corpus": {"rows": len(corpus), "length": corpus.length, "sha256": corpus.hash},
            "commands": list(request.commands),
            "license": request.target.license,
        },
    }
    if progress is not None:
        progress("measuring acceptance", 0, None)
    with tempfile.TemporaryDirectory(prefix="edgespec-table-") as folder:
        # nothing half-made takes the place of another table
        write_table(Path(folder), entries, facts)
        found = measure(
            request.target.folder, Path(folder), "table", prompts, k=DRAFTED, max_tokens=TOKENS,
            settings=tuple(SETTINGS), threads=request.target.threads,
        )  # fmt: skip
    first, *others = SETTINGS
    facts["acceptance"] = {**found[first], "setting": first, **{name: found[name] for name in others}}
    config = write_table(request.out, entries, facts)
    (request.out / "README.md").write_text(_card(config, len(entries)), encoding="utf-8")
    return config


def count_table(
    tokens: NDArray[Any], assistant: NDArray[np.bool_], order: int, n_vocab: int, most: int
) -> NDArray[Any]:
    """Rows of `entry_type`, by context. tokens, assistant: [n, length]; counted is what the assistant wrote.

    A longer context is kept where it makes surer than the shorter ones in it; of more than `most`, those that say more
    than the shorter ones most often.
    """
    tokens = tokens.astype(np.int64)
    known = np.zeros(tokens.shape, np.float64)  # the best chance by shorter contexts, at every place
    found: list[tuple[Ints, Ints, NDArray[np.float64], NDArray[np.float64]]] = []
    for n in range(1, min(order, tokens.shape[1] - 1) + 1):
        keys, following = context_keys(tokens, n)[:, :-1], tokens[:, n:]
        place = np.flatnonzero(assistant[:, n:].ravel())
        contexts, nexts, chances, totals, first = _count(keys.ravel()[place], following.ravel()[place])
        gain = totals * (chances - known[:, n:].ravel()[place[first]])
        kept = gain > 0.0
        found.append((contexts[kept], nexts[kept], chances[kept], gain[kept]))
        known[:, n:] = np.maximum(known[:, n:], _look_up(keys, contexts[kept], chances[kept]))
    contexts, nexts, chances, gain = (np.concatenate(part) for part in zip(*found, strict=True))
    best = np.sort(np.argsort(-gain, kind="stable")[:most])
    entries = np.zeros(len(best), entry_type(n_vocab))
    entries["context"], entries["token"] = contexts[best], nexts[best]
    entries["chance"] = np.clip(np.rint(chances[best] * WHOLE), 1, WHOLE)
    entries = entries[np.lexsort((entries["token"], -entries["chance"].astype(np.int64), entries["context"]))]
    return entries[np.unique(entries["context"], return_index=True)[1]]


def _count(keys: Ints, following: Ints) -> tuple[Ints, Ints, NDArray[np.float64], NDArray[np.float64], Ints]:
    """(contexts, what follows most often, its chance, how often the context was there, where it was first)."""
    packed = keys.astype(np.uint64) << np.uint64(32) | following.astype(np.uint64)
    _pairs, first, counts = np.unique(packed, return_index=True, return_counts=True)
    order = np.lexsort((following[first], -counts, keys[first]))
    first, counts = first[order], counts[order]
    contexts, starts = np.unique(keys[first], return_index=True)
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    chances = counts[starts] / (totals + UNSEEN)
    seen = counts[starts] >= LEAST_SEEN
    nexts = following[first[starts]]
    return contexts[seen], nexts[seen], chances[seen], totals[seen].astype(np.float64), first[starts][seen]


def _look_up(keys: Ints, contexts: Ints, chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chance of each key, 0 where it is not among `contexts` (ascending)."""
    if not len(contexts):
        return np.zeros(keys.shape)
    place = np.minimum(np.searchsorted(contexts, keys), len(contexts) - 1)
    return np.where(contexts[place] == keys, chances[place], 0.0)


def write_table(folder: Path, entries: NDArray[Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write config.json and table.npy; what config.json says. The same input gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ENTRIES).open("wb") as file:
        np.save(file, entries, allow_pickle=False)
    config = {"format": FORMAT, "version": VERSION, **facts}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return config


def _card(config: Mapping[str, Any], n_entries: int) -> str:
    """The README of a table: what it is, how good, from what, and the commands that make it again."""
    target, training, corpus = config["target"], config["training"], config["training"]["corpus"]
    licence = f"| licence | {training['license']}, as the target's |\n" if training.get("license") else ""
    found = config["acceptance"]
    rows = {found["setting"]: found, **{name: row for name, row in found.items() if isinstance(row, dict)}}
    commands = "\n".join(training["commands"])
    return f"""# table draft for {target}

For speculative decoding with edgespec: what {target} writes most often after its last 1 to {config["order"]} tokens. No
model runs for a proposal. It changes how fast the target writes, never what.
It works with models of the same tokenizer, the better the more they write alike.

    edgespec run -m {target} --draft ngram,table "..."

| | |
|---|---|
| entries | {n_entries:,}: a hash of the context, the token, its chance in 1/{WHOLE} |
{licence}
## Acceptance

On held-out conversations, by the production decoder, by itself. Tokens a round count the target's own.

| sampling | tokens drafted | tokens a round | accepted by position | rounds |
|---|---|---|---|---|
{_rows(rows)}

## Training

Counted on {training["n_rows"]} conversations that {target} had with itself, on what it answered.
Corpus: {corpus["rows"]} rows of {corpus["length"]} tokens, sha256 `{corpus["sha256"][:16]}`.
Limits: the target's own text is all it knows, mostly English chat; elsewhere fewer drafts are accepted.

## Making it again

```sh
{commands}
```
"""


def _rows(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines: Sequence[str] = [
        f"| {name} | at most {row['k']} | {row['mean_acceptance_length']:.2f} | "
        f"{' / '.join(f'{share:.2f}' for share in row['by_position'])} | {row['rounds']} |"
        for name, row in found.items()
    ]
    return "\n".join(lines)

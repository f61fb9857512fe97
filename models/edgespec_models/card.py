"""The README of a trained draft: what it is, how good, what it was trained on, and the commands that make it again.

Everything comes from config.json, so that a card can be written anew at any time. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_card"]

KINDS = {
    "tinydraft": "a few Llama layers on the target's own embedding table; an independent draft model",
    "eagle": "one decoder layer over the target's features and the next token's embedding",
    "medusa": "residual heads on the target's features, several tokens at once",
    "exit": "an adapter that turns the target's residual stream after its lower layers into a guess",
}
RUN_NAMES = {"exit": "early-exit"}


def write_card(folder: Path) -> Path:
    """Write `folder`/README.md from its config.json; the same text for the same config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = [_head(config), _acceptance(config), _training(config), _commands(config)]
    if (folder / "acceptance.png").is_file():
        parts.append("![loss by step](loss.png)\n\n![acceptance by step](acceptance.png)")
    path = folder / "README.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def _head(config: Mapping[str, Any]) -> str:
    kind, target = config["kind"], config["target"]
    name = RUN_NAMES.get(kind, kind)
    taps = ", ".join(config["taps"]) or "none"
    licence = config["training"].get("license")
    lines = [
        f"# {name} draft for {target}",
        "",
        f"For speculative decoding with edgespec: {KINDS[kind]}. It changes how fast the target writes, never what.",
        f"It works with {target} and models of the same size and tokenizer, and with nothing else.",
        "",
        f'    edgespec run -m {target} --draft {name} "..."',
        "",
        "| | |",
        "|---|---|",
        f"| target's features (taps) | {taps} |",
        f"| channels, heads, key-value heads | {config['n_embd']}, {config['n_heads']}, {config['n_kv_heads']} |",
    ]
    if config.get("n_medusa"):
        lines.append(f"| heads | {config['n_medusa']} |")
    if config.get("exit_layer"):
        lines.append(f"| exit after layer | {config['exit_layer']} |")
    if licence:
        lines.append(f"| licence | {licence}, as the target's |")
    lines.append("| not in here | embedding table and lm head: they are the target's own |")
    return "\n".join(lines)


def _acceptance(config: Mapping[str, Any]) -> str:
    found = config["acceptance"]
    rows = {found["setting"]: found} if "setting" in found else {}
    rows |= {name: value for name, value in found.items() if isinstance(value, dict) and "by_position" in value}
    if not rows:
        return ""
    lines = [
        "## Acceptance",
        "",
        "On held-out conversations, by the production decoder. Tokens a round count the target's own.",
        "",
        "| sampling | tokens drafted | tokens a round | accepted by position | rounds |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        positions = " / ".join(f"{share:.2f}" for share in row["by_position"])
        lines.append(f"| {name} | {row['k']} | {row['mean_acceptance_length']:.2f} | {positions} | {row['rounds']} |")
    return "\n".join(lines)


def _training(config: Mapping[str, Any]) -> str:
    facts = config["training"]
    dropout = f"dropout {facts['dropout']:g}, " if facts.get("dropout") else ""
    lines = [
        "## Training",
        "",
        f"{facts['steps']} steps of {facts['batch_rows']} rows, AdamW at {facts['lr']:g}, {dropout}seed "
        f"{facts['seed']}, on {facts['n_rows']} conversations that {config['target']} had with itself.",
    ]
    corpus = facts.get("corpus")
    if corpus:
        lines.append(f"Corpus: {corpus['rows']} rows of {corpus['length']} tokens, sha256 `{corpus['sha256'][:16]}`.")
    lines += [
        "Limits: the target's own text is all it knows, mostly English chat; elsewhere fewer drafts are accepted."
    ]
    return "\n".join(lines)


def _commands(config: Mapping[str, Any]) -> str:
    commands = config["training"].get("commands")
    if not commands:
        return ""
    body = "\n".join(commands)
    return f"## Making it again\n\n```sh\n{body}\n```"

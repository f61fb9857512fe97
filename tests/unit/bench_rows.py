"""A small run as rows, for tests of reports: two own sides and a peer, round speeds, no clock."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
CARD: Row = {
    "row": "card",
    "machine": {
        "cpu": "a <small> CPU",
        "cores": 2,
        "governor": None,
        "memory_mb": 1000,
        "system": "Linux",
        "load": 0.1,
    },
    "versions": {"python": "3.11", "numpy": None},
    "commit": "abc",
    "started": "2026-01-02T03:04:05+00:00",
    "size": "quick",
    "model": "m",
    "scaled": "m-x3",
    "threads": 2,
    "note": "",
}


def side(name: str, what: str, part: str = "sides", model: str = "m", **settings: Any) -> Row:
    return {
        "row": "side", "part": part, "model": model, "side": name, "engine": name.split("/")[0], "what": what,
        "note": "best", "version": "1", "settings": settings, "load_s": 0.5, "cold_ttft_s": 0.2, "peak_rss_mb": 250.0,
    }  # fmt: skip


def run(name: str, tok_s: float, kind: str = "chat", prompt: str = "p1", turn: int = 0, **more: Any) -> Row:
    """An answer of 101 tokens at so many a second."""
    row = {
        "row": "run", "part": "sides", "side": name, "kind": kind, "setting": "t0", "prompt": prompt, "turn": turn,
        "place": 0, "n_prompt": 10, "n_tokens": 101, "text": "x", "ttft_s": 0.1, "first_tokens": 1,
        "seconds": 100 / tok_s, "cpu_s": 1.0, "rounds": 100, "host_s": 0.02,
    }  # fmt: skip
    return row | more


PLAIN, NGRAM, PEER, PEER8 = "edgespec/plain", "edgespec/ngram-3", "engine/plain", "engine/plain-8"
NGRAM_COUNTS = {
    "rounds": 50,
    "drafted": 100,
    "accepted": 50,
    "by_position": [0.6, 0.4],
    "target_s": 0.4,
    "draft_s": 0.05,
}


def small_run() -> list[Row]:
    """Plain 100 tok/s, n-gram 150 on chat and 250 on what is copied, the peer 80; its 8-bit setting is faster."""
    rows = [CARD, side(PLAIN, "plain"), side(NGRAM, "speculative"), side(PEER, "plain"), side(PEER8, "plain", bits=8)]
    for turn, pace in enumerate((1.0, 0.5)):  # the machine is twice as slow in the second turn
        for kind, speed in (("chat", 150), ("summarise", 250), ("edit", 250), ("json", 250)):
            rows.append(run(PLAIN, 100 * pace, kind, turn=turn))
            rows.append(run(NGRAM, speed * pace, kind, turn=turn, **NGRAM_COUNTS))
            rows.append(run(PEER, 80 * pace, kind, turn=turn))
            rows.append(run(PEER8, 90 * pace, kind, turn=turn))
    rows += [
        {"row": "cost", "part": "costs", "model": "m", "rows": n, "past": 128, "ms": {"median": ms}}
        for n, ms in ((1, 5.0), (5, 10.0))
    ]
    for n, products in ((1, 3.0), (5, 7.0)):
        ms = {"qkv": products, "attention": 1.0, "between nodes": 1.0}
        rows.append(
            {"row": "profile", "part": "costs", "model": "m", "rows": n, "ms": ms, "products": ["qkv"], "gops": 99.0}
        )
    rows += [
        {"row": "bandwidth", "part": "costs", "threads": 2, "gb_s": 30.0},
        {"row": "weights", "part": "costs", "model": "m", "read_bytes": 150_000_000},
        {"row": "fidelity", "part": "fidelity", "model": "m", "side": PLAIN, "kld": 0.3, "top1": 0.8, "rows": 9},
        {"row": "fidelity", "part": "fidelity", "model": "m", "side": PEER, "kld": 0.4, "top1": 0.7, "rows": 9},
        {"row": "skip", "part": "scaled", "side": None, "reason": "there is no m-x3 | yet"},
        {
            "row": "prediction", "part": "prediction", "model": "m", "label": "ngram, k = 2, serial, on cpu",
            "predicted_tok_s": 200.0, "measured_tok_s": 180.0, "relative_error": 0.25,
        },
    ]  # fmt: skip
    return rows

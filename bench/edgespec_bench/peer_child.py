"""The peer engine's side of a measurement: runs in the peer's own interpreter, one JSON line back for each line read.

Imports nothing of edgespec, which is not installed there. Usage: python peer_child.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as og


def decode(model: Any, prompt: list[int], n_tokens: int) -> dict[str, Any]:
    """Greedy tokens after the prompt; `seconds`: from the first new token to the last, so without the prompt."""
    generator = _generator(model, len(prompt) + n_tokens + 1)
    generator.append_tokens(prompt)
    tokens: list[int] = []
    started = finished = 0.0
    while len(tokens) < n_tokens and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        finished = time.perf_counter()
        started = started or finished
    return {"tokens": tokens, "seconds": finished - started}


def logits(model: Any, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
    """Teacher-forced logits [len(continuation), n_vocab] written to `path`: row i predicts continuation[i]."""
    generator = _generator(model, len(prompt) + len(continuation) + 1)
    rows = []
    for tokens in [prompt, *([token] for token in continuation[:-1])]:
        generator.append_tokens(tokens)
        rows.append(np.array(generator.get_logits(), np.float32).reshape(-1)[-_n_vocab(generator) :])
    np.save(path, np.stack(rows))
    return {"rows": len(rows)}


def _generator(model: Any, length: int) -> Any:
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=length, do_sample=False)
    return og.Generator(model, parameters)


def _n_vocab(generator: Any) -> int:
    return int(generator.get_logits().shape[-1])


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "decode":
        return decode(model, request["prompt"], request["n_tokens"])
    if request["do"] == "logits":
        return logits(model, request["prompt"], request["continuation"], request["path"])
    raise ValueError(f"unknown request {request['do']!r}")


def main() -> None:
    model = og.Model(sys.argv[1])
    print(json.dumps({"version": og.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

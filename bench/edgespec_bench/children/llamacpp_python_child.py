"""The end of a measurement of llama-cpp-python, llama.cpp's binding: its own `generate` loop, as its users run it.

Every setting has `part` (the folder of its model.gguf), `llama` (keywords of `Llama`) and for speculation `lookup`
(keywords of LlamaPromptLookupDecoding, the one draft that the binding has).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from line_server import Recorder, serve
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

N_CTX = 4096


class Lookup(LlamaPromptLookupDecoding):
    """Counts what it proposes: the binding does not tell."""

    rounds = drafted = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        proposal = super().__call__(input_ids, **kwargs)
        self.rounds += 1
        self.drafted += len(proposal)
        return proposal


class LlamaCppPython:
    """A context for each setting, over mapped weights that contexts share."""

    name, version = "llama-cpp-python", llama_cpp.__version__

    def __init__(self, given: dict[str, Any]) -> None:
        self._llamas: dict[str, Any] = {}
        for setting, options in given["settings"].items():
            lookup = Lookup(**options["lookup"]) if "lookup" in options else None
            self._llamas[setting] = llama_cpp.Llama(
                str(Path(given["model"]) / options["part"] / "model.gguf"),
                n_ctx=N_CTX,
                n_threads=given["threads"],
                n_threads_batch=given["threads"],
                draft_model=lookup,
                logits_all=lookup is not None,  # or prompts longer than a batch fail: it keeps no room for their rows
                verbose=False,
                **options.get("llama", {}),
            )

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        llama, sampling = self._llamas[setting], {"temp": 0.0}
        if len(request["prompt"]) + request["n_tokens"] > N_CTX:
            raise ValueError(f"{len(request['prompt'])} + {request['n_tokens']} tokens, the context holds {N_CTX}")
        llama.reset()  # or the keys and values of a common beginning would be kept
        if request["temperature"] > 0:
            llama.set_seed(request["seed"])
            sampling = {"temp": request["temperature"], "top_p": request["top_p"], "top_k": 0, "min_p": 0.0}
        lookup = llama.draft_model
        if lookup is not None:
            lookup.rounds = lookup.drafted = 0
        tokens = llama.generate(request["prompt"], **sampling)
        while recorder.add([next(tokens)]):
            pass
        tokens.close()
        if lookup is None:
            return {}
        accepted = request["n_tokens"] - 1 - lookup.rounds
        return {"rounds": lookup.rounds, "drafted": lookup.drafted, "accepted": max(accepted, 0)}

    def logits(self, setting: str, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
        llama, rows = self._llamas[setting], []
        llama.reset()
        for tokens in [prompt, *([token] for token in continuation[:-1])]:
            llama.eval(tokens)
            logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
            rows.append(np.ctypeslib.as_array(logits, (llama.n_vocab(),)).copy())
        np.save(path, np.stack(rows))
        return {"rows": len(rows)}


if __name__ == "__main__":
    serve(LlamaCppPython)

"""onnxruntime-genai's end of a measurement.

Threads are in a model's genai_config.json and are overridden here when it is loaded; its end of sequence was when it
was built. Every setting has `part` (the folder of its model) and, for speculation, `speculative` (names of
`set_speculative_options`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from line_server import Recorder, serve


class GenAI:
    """Models by folder, loaded once each."""

    name, version = "onnxruntime-genai", og.__version__

    def __init__(self, given: dict[str, Any]) -> None:
        self._settings = given["settings"]
        parts = {options["part"] for options in self._settings.values()}
        self._models = {part: load(Path(given["model"]) / part, given["threads"]) for part in parts}

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        generator = self._generator(setting, len(request["prompt"]) + request["n_tokens"] + 17, request)
        generator.append_tokens(request["prompt"])
        is_speculative = bool(self._settings[setting].get("speculative"))
        while not recorder.is_full and not generator.is_done():
            generator.generate_next_token()
            recorder.add([int(generator.get_next_tokens()[0])])
            if is_speculative and len(recorder.tokens) == 1:
                recorder.first_tokens += int(generator.get_speculative_stats()["tokens_buffered"])
        if not is_speculative:
            return {}
        # Its own count of passes leaves out plain steps and has two for some rounds: a round is what gave tokens.
        stats = generator.get_speculative_stats()
        accepted = int(stats["draft_tokens_accepted"])
        rounds = request["n_tokens"] - 1 - accepted
        return {"rounds": rounds, "drafted": int(stats["draft_tokens_proposed"]), "accepted": accepted}

    def logits(self, setting: str, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
        generator = self._generator(setting, len(prompt) + len(continuation) + 1, {"temperature": 0.0})
        rows = []
        for tokens in [prompt, *([token] for token in continuation[:-1])]:
            generator.append_tokens(tokens)
            values = np.array(generator.get_logits(), np.float32)
            rows.append(values.reshape(-1)[-values.shape[-1] :])
        np.save(path, np.stack(rows))
        return {"rows": len(rows)}

    def _generator(self, setting: str, length: int, request: dict[str, Any]) -> Any:
        options = self._settings[setting]
        model = self._models[options["part"]]
        parameters = og.GeneratorParams(model)
        search: dict[str, Any] = {"max_length": length, "do_sample": request["temperature"] > 0}
        if request["temperature"] > 0:
            search |= {"temperature": request["temperature"], "top_p": request["top_p"]}
            search |= {"top_k": 0, "random_seed": request["seed"]}
        parameters.set_search_options(**search)
        if options.get("speculative"):
            parameters.set_speculative_options(**options["speculative"])
        return og.Generator(model, parameters)


def load(folder: Path, threads: int) -> Any:
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    overlay: dict[str, Any] = {"model": {}}
    for role in ("decoder", "draft"):
        if role in config["model"]:
            overlay["model"][role] = {"session_options": {"intra_op_num_threads": threads}}
    settings = og.Config(str(folder))
    settings.overlay(json.dumps(overlay))
    return og.Model(settings)


if __name__ == "__main__":
    serve(GenAI)

"""OpenVINO GenAI's end of a measurement.

Every setting has `part` (the folder of its model), `properties` of the CPU plugin, and for speculation `prompt_lookup`
or `draft` (the folder of the draft) with `generation`, names of its GenerationConfig. Prompts are handed over as token
ids; a prompt's keys and values are not kept for the next one, as no other side keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from line_server import Recorder, serve


class Streamer(genai.StreamerBase):
    """Hands over tokens as they come, one or several."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def write(self, token: int | Sequence[int]) -> genai.StreamingStatus:
        self._recorder.add([token] if isinstance(token, int) else token)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


class OpenVINO:
    """A pipeline for each setting: speculation is chosen when one is made."""

    name, version = "openvino-genai", genai.__version__.split("-")[0]

    def __init__(self, given: dict[str, Any]) -> None:
        self._settings = given["settings"]
        self._folder, self._threads = Path(given["model"]), given["threads"]
        self._pipelines = {
            name: pipeline(self._folder, options, self._threads) for name, options in self._settings.items()
        }

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        options, pipe = self._settings[setting], self._pipelines[setting]
        config = genai.GenerationConfig()
        config.max_new_tokens = request["n_tokens"]
        config.ignore_eos = True
        config.do_sample = request["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = request["temperature"], request["top_p"]
            config.rng_seed = request["seed"]
        for name, value in options.get("generation", {}).items():
            setattr(config, name, value)
        ids = ov.Tensor(np.array([request["prompt"]], np.int64))
        pipe.generate(ids, config, Streamer(recorder))
        if "generation" not in options:
            return {}
        rounds = recorder.arrivals - 1  # it hands over a round's tokens at once
        return {"rounds": rounds, "accepted": request["n_tokens"] - recorder.first_tokens - rounds}

    def logits(self, setting: str, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
        """By the runtime below: the pipelines give no logits."""
        options, rows, n_past = self._settings[setting], [], 0
        file = self._folder / options["part"] / "openvino_model.xml"
        properties = {**options.get("properties", {}), "INFERENCE_NUM_THREADS": self._threads}
        request = ov.Core().compile_model(file, "CPU", properties).create_infer_request()
        for tokens in [prompt, *([token] for token in continuation[:-1])]:
            end = n_past + len(tokens)
            inputs = {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(n_past, end)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            rows.append(next(iter(request.infer(inputs).values()))[0, -1].astype(np.float32))
            n_past = end
        np.save(path, np.stack(rows))
        return {"rows": len(rows)}


def pipeline(folder: Path, options: dict[str, Any], threads: int) -> Any:
    properties = {**options.get("properties", {}), "INFERENCE_NUM_THREADS": threads}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 8192
    extra: dict[str, Any] = {"scheduler_config": scheduler}
    if options.get("prompt_lookup"):
        extra["prompt_lookup"] = True
    if "draft" in options:
        extra["draft_model"] = genai.draft_model(str(folder / options["draft"]), "CPU", **properties)
    return genai.LLMPipeline(str(folder / options["part"]), "CPU", **extra, **properties)


if __name__ == "__main__":
    serve(OpenVINO)

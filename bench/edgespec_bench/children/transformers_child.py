"""The transformers library's end of a measurement, on PyTorch's CPU build.

Every setting has `part` (the folder of its weights) and `dtype`, and for speculation `assistant` (the draft's folder,
with `assisting`, names of the draft's GenerationConfig) or names of the target's in `generation`. It has no int4
kernels for CPUs: the weights stay float.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from line_server import Recorder, serve


class Streamer:
    """Leaves out the prompt, which comes first."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._has_prompt = recorder, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._recorder.add(value.reshape(-1).tolist())
        self._has_prompt = True

    def end(self) -> None: ...


class Transformers:
    """A model for each folder and dtype, loaded once."""

    name, version = "transformers", transformers.__version__

    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(given["threads"])
        transformers.utils.logging.set_verbosity_error()
        self._settings, self._folder = given["settings"], Path(given["model"])
        self._models: dict[tuple[str, str], Any] = {}
        for options in self._settings.values():
            for part in (options["part"], options.get("assistant")):
                if part is not None:
                    self._model(part, options["dtype"])

    def _model(self, part: str, dtype: str) -> Any:
        if (part, dtype) not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(self._folder / part, dtype=getattr(torch, dtype))
            model.eval()
            # The end of sequence is ignored by having none.
            model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
            self._models[part, dtype] = model
        return self._models[part, dtype]

    def decode(self, setting: str, request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
        options = self._settings[setting]
        model = self._model(options["part"], options["dtype"])
        passes = Passes(model)
        ids = torch.tensor([request["prompt"]])
        how: dict[str, Any] = {"do_sample": request["temperature"] > 0, **options.get("generation", {})}
        if how["do_sample"]:
            torch.manual_seed(request["seed"])
            how |= {"temperature": request["temperature"], "top_p": request["top_p"], "top_k": 0}
        if "assistant" in options:
            how["assistant_model"] = self._model(options["assistant"], options["dtype"])
            for name, value in options.get("assisting", {}).items():
                setattr(how["assistant_model"].generation_config, name, value)
        with torch.inference_mode(), passes:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=request["n_tokens"],
                max_new_tokens=request["n_tokens"],
                streamer=Streamer(recorder),
                **how,
            )
        if len(how) == 1 + 3 * how["do_sample"]:
            return {}
        rows = passes.rows[1:]  # the first holds the prompt
        drafted = sum(rows) - len(rows)
        return {"rounds": len(rows), "drafted": drafted, "accepted": request["n_tokens"] - 1 - len(rows)}

    def logits(self, setting: str, prompt: list[int], continuation: list[int], path: str) -> dict[str, Any]:
        options = self._settings[setting]
        ids = torch.tensor([prompt + continuation[:-1]])
        with torch.inference_mode():
            rows = self._model(options["part"], options["dtype"])(ids, logits_to_keep=len(continuation)).logits[0]
        np.save(path, rows.float().numpy())
        return {"rows": len(rows)}


class Passes:
    """Counts the target's passes and their rows while it is entered: the library does not tell."""

    def __init__(self, model: Any) -> None:
        self._model, self.rows = model, list[int]()

    def __enter__(self) -> None:
        self._hook = self._model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: self.rows.append(int(output.shape[1]))
        )

    def __exit__(self, *_error: Any) -> None:
        self._hook.remove()


if __name__ == "__main__":
    serve(Transformers)

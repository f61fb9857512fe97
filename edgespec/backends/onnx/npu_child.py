"""A child process for what may crash in a vendor's library: `python -m edgespec.backends.onnx.npu_child`.

A request is JSON on stdin: `compile` makes code for a chip out of graphs, `load` tries that code, `run` gives the
logits of a few tokens. Results are files in the folder that the request names; what went wrong is one line on stderr.
`contexts.py` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from edgespec.errors import EdgeSpecError

__all__ = ["RESULT", "main"]

RESULT = "result.json"


def compile_graphs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile every graph of the request, each with a binary of its own.

    One binary for all widths would hold the weights once, but the emulator of onnxruntime-qnn 2.7.0 crashes where it
    loads a graph from such a binary, so that it could not be tried before it reaches a phone.
    """
    from edgespec.backends.onnx.devices import create_runtime, find_device, placement

    device, out, n_nodes = find_device(request["device"]), Path(request["out"]), 0
    for graph, name in request["graphs"]:
        config = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(out / name),
        }
        runtime = create_runtime(Path(graph), device, 1, options=request["options"], strict=True, config=config)
        n_nodes = sum(placement(runtime, device).nodes.values())
    return {"n_nodes": n_nodes}


def load_graphs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load each compiled graph once: what crashes here would crash the program that uses it."""
    from edgespec.backends.onnx.devices import create_runtime, find_device

    device = find_device(request["device"])
    for graph in request["graphs"]:
        create_runtime(Path(graph), device, 1, options=request["options"], strict=True)
    return {}


def run_tokens(request: Mapping[str, Any]) -> dict[str, Any]:
    """Logits of each of the request's texts, every call on the widest graph, one after the other as logits.npy."""
    import numpy as np

    from edgespec.backends import load_model
    from edgespec.backends.onnx.static import StaticSession
    from edgespec.types import ExactRows

    model = load_model(request["bundle"], device=request["device"], device_options=request["options"])
    session = cast(StaticSession, model.open_session())
    session.exact = ExactRows(1, model.info.max_rows or 1)
    if request["extra"]:
        session.set_extra(request["extra"])
    parts = []
    for tokens in request["texts"]:
        session.keep(0)
        parts.append(session.forward(tokens).logits.copy())
    np.save(Path(request["out"]) / "logits.npy", np.concatenate(parts))
    return {"nodes": dict(model.info.placement), "fallbacks": list(model.info.fallbacks)}


TASKS = {"compile": compile_graphs, "load": load_graphs, "run": run_tokens}


def main() -> int:
    request = json.load(sys.stdin)
    try:
        result = TASKS[request["task"]](request)
    except EdgeSpecError as error:
        print(f"edgespec: {error}", file=sys.stderr)
        return 1
    (Path(request["out"]) / RESULT).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

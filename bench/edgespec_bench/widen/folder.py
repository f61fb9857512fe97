"""A wide model's weights as a Hugging Face folder, written tensor by tensor, and the manifest that names it.

Owns the two files' formats. The folder says that it is synthetic in config.json, the manifest in its description.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgespec.config import cache_dir
from edgespec.text.tokenizer import Tokenizer
from edgespec_bench.weights_folder import llama_config
from edgespec_bench.widen.widening import WidenedSource

__all__ = ["write_folder", "write_manifest"]

Report = Callable[[str, int, int], None]


def write_folder(source: WidenedSource, folder: Path, report: Report) -> None:
    """The weights of `source` into the new `folder`: float16 where there is noise, else float32."""
    config = source.config
    settings = {**llama_config(config), "edgespec_synthetic": dict(source.synthetic)}
    kind = np.float16 if source.noise.size else np.float32
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        _write_tensors(file, source, np.dtype(kind), report)
    _write_json(folder / "config.json", settings)
    tokenizer = Tokenizer.load(source.path)
    (folder / "tokenizer.json").write_text(source.tokenizer_json(tokenizer), encoding="utf-8")
    template = source.chat_template()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_tensors(file: IO[bytes], source: WidenedSource, kind: np.dtype[Any], report: Report) -> None:
    """The safetensors format: length and JSON of the header, then the tensors' bytes."""
    label = {"float16": "F16", "float32": "F32"}[kind.name]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "synthetic": json.dumps(source.synthetic)}}
    end = 0
    for name, shape in source.shapes.items():
        start, end = end, end + int(np.prod(shape)) * kind.itemsize
        full = name if name.startswith("lm_head.") else f"model.{name}"
        header[full] = {"dtype": label, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for done, name in enumerate(source.shapes, 1):
        file.write(source.tensor(name).astype(kind).tobytes())
        report("Writing the wide weights", done, len(source.shapes))


def write_manifest(name: str, description: str, notes: str, weights: Path, export: Mapping[str, Any]) -> Path:
    """`edgespec` knows the model by `name` from then on. export: options, as in any manifest."""
    path = cache_dir() / "models" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        "schema_version = 1",
        f"name = {_toml(name)}",
        f"description = {_toml(description)}",
        'license = "Apache-2.0"',
        f"notes = {_toml(notes)}",
        "[target.source]",
        'kind = "path"',
        f"path = {_toml(Path(os.path.relpath(weights, path.parent)).as_posix())}",  # a cache may be moved
        "[target.export]",
        *(f"{key} = {_toml(value)}" for key, value in export.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _toml(value: Any) -> str:
    """Texts, numbers, flags and lists look the same in JSON."""
    return json.dumps(value)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

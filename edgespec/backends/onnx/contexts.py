"""Graphs of fixed shapes compiled for a chip: made once in a child process, kept in the user's cache.

Vendors' compilers crash; in a child that is an error message. A compiled graph is code for the device: it comes from
the user's own cache, or from a bundle whose bundle.json lists it, loaded on a device that the user named.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from edgespec.backends.onnx.devices import Place
from edgespec.backends.onnx.npu_child import RESULT
from edgespec.backends.onnx.providers import locate
from edgespec.backends.onnx.socs import Soc
from edgespec.bundle import Bundle, static_graph
from edgespec.children import describe_exit
from edgespec.config import cache_dir
from edgespec.downloads import lock, staging
from edgespec.errors import BackendError

__all__ = ["Contexts", "compiled", "compiler", "from_bundle", "run_child"]

_log = logging.getLogger(__name__)
CHILD = (sys.executable, "-m", "edgespec.backends.onnx.npu_child")
_KEPT_LINES = 3
# Without it, the provider leaves what turns the host's floats into integers and back to the CPU.
_OPTIONS = {"w8a16": {"offload_graph_io_quantization": "0"}}


@dataclass(frozen=True)
class Contexts:
    """Compiled graphs of a bundle by width. n_nodes: of the graph for the widest, all of which the device took."""

    folder: Path
    graphs: Mapping[int, str]
    compiler: str
    n_nodes: int

    def path(self, width: int) -> Path:
        return self.folder / self.graphs[width]

    def copy_into(self, folder: Path) -> dict[str, str]:
        """Copy the files into a bundle's folder; its graphs by width, as bundle.json wants them."""
        for item in self.folder.iterdir():
            if item.name != RESULT:
                shutil.copyfile(item, folder / item.name)
        return {str(width): name for width, name in self.graphs.items()}


def compiler() -> str:
    """The package that compiles, and its version: what decides on the code beside graph and chip."""
    try:
        return f"onnxruntime-qnn {metadata.version('onnxruntime-qnn')}"
    except metadata.PackageNotFoundError:
        return f"onnxruntime {metadata.version('onnxruntime')}"  # a build that has QNN inside


def from_bundle(bundle: Bundle, soc: Soc) -> Contexts | None:
    """What the bundle brings for the chip; None where that is nothing."""
    static = bundle.info.static
    entry = None if static is None else static["contexts"].get(soc.name)
    if entry is None:
        return None
    graphs = {int(width): name for width, name in entry["graphs"].items()}
    for name in graphs.values():
        bundle.path(name)  # listed, or refused
    return Contexts(bundle.folder, graphs, entry["compiler"], entry["n_nodes"])


def compiled(bundle: Bundle, place: Place, soc: Soc | None) -> Contexts:
    """The bundle's graphs compiled for `soc`, or for the device at hand; from the cache where they were before.

    Raises BackendError where the compiler refuses the graph or crashes, BundleError for files that were altered.
    """
    static = bundle.info.static
    assert static is not None
    options = {**_OPTIONS.get(static["dtype"], {}), **place.options, **(soc.options if soc else {})}
    widths = static["widths"]
    hashes = [bundle.files[name]["sha256"] for name in sorted(bundle.files) if ".onnx" in name]
    key = json.dumps([hashes, sorted(options.items()), compiler(), widths])
    chip = soc.name if soc else "device"
    folder = cache_dir() / "contexts" / f"{chip}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    names = {width: _name(width, chip) for width in widths}
    kept = _kept(folder, names)
    if kept is None:
        with lock(folder.parent / "lock", None):
            kept = _kept(folder, names)
            if kept is None:
                bundle.verify_hashes()  # the key trusts them, and other bundles come to the same place
                is_ours = soc is None or locate(place.device).is_emulated  # code for another chip cannot be tried
                _compile(bundle, replace(place, options=options), names, folder, is_tried=is_ours)
                kept = _kept(folder, names)
    assert kept is not None
    return kept


def _kept(folder: Path, names: Mapping[int, str]) -> Contexts | None:
    """What the cache has; None where that is nothing, or damaged: then it is made again."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        is_whole = _sizes(folder) == result["bytes"] and set(names.values()) <= set(result["bytes"])
        return Contexts(folder, names, str(result["compiler"]), int(result["n_nodes"])) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sizes(folder: Path) -> dict[str, int]:
    return {item.name: item.stat().st_size for item in folder.iterdir() if item.name != RESULT}


def _name(width: int, chip: str) -> str:
    return f"width-{width}.{chip}.onnx"


def _compile(bundle: Bundle, place: Place, names: Mapping[int, str], folder: Path, *, is_tried: bool) -> None:
    """Run the child on all widths; `folder` appears whole or not at all. is_tried: only if the code loads."""
    _log.info("%s: compiling for %s (cached afterwards)", bundle.info.name, place.device.name)
    with staging(folder.parent) as temporary:
        out = temporary / "contexts"
        out.mkdir()
        graphs = [[str(bundle.path(static_graph(width))), name] for width, name in names.items()]
        request = {"device": place.device.name, "options": dict(place.options), "out": str(out)}
        run_child({**request, "task": "compile", "graphs": graphs}, f"the compiler of {compiler()}")
        result = {**json.loads((out / RESULT).read_bytes()), "compiler": compiler(), "bytes": _sizes(out)}
        if is_tried:
            made = [str(out / name) for name in names.values()]
            run_child({**request, "task": "load", "graphs": made}, f"loading what {compiler()} compiled")
        (out / RESULT).write_text(json.dumps(result))
        shutil.rmtree(folder, ignore_errors=True)  # what is there is damaged
        out.rename(folder)


def run_child(request: Mapping[str, Any], what: str) -> None:
    """Run the child on `request`; raises BackendError that says what it reported, or which signal killed it."""
    done = subprocess.run(CHILD, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if done.returncode == 1 and done.stderr.startswith("edgespec: "):
        raise BackendError(f"{what} refused the model: {done.stderr.removeprefix('edgespec: ').strip()}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()][-_KEPT_LINES:]
    said = f" It said: {' | '.join(lines)[:400]}" if lines else ""
    raise BackendError(f"{describe_exit(what, done.returncode)}.{said}")

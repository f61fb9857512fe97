"""Which backend loads which folder: a small registry, each backend imported only when a folder asks for it.

Knows how a folder of each kind is recognised and nothing of how it is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.devices import read_device_options
from edgespec.errors import ConfigError
from edgespec.types import Model

__all__ = ["backend_kind", "load_model", "register_backend"]


@dataclass(frozen=True)
class _Backend:
    kind: str
    looks_like: Callable[[Path], bool]
    loader: str
    looked_for: str


_BACKENDS: list[_Backend] = []


def register_backend(kind: str, looks_like: Callable[[Path], bool], loader: str, looked_for: str) -> None:
    """Add a backend, or replace the one of the same kind.

    looks_like: whether a path (a folder, or a file) is one of this kind; asked in order of registration.
    loader: "module:function", imported on use and called as function(path, kind=, device=, device_options=,
    strict_device=, n_ctx=, threads=, name=, tree=, split=).
    looked_for: what the path should hold, for the error message.
    """
    _BACKENDS[:] = [backend for backend in _BACKENDS if backend.kind != kind]
    _BACKENDS.append(_Backend(kind, looks_like, loader, looked_for))


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    device_options: Mapping[str, str] | Sequence[str] = (),
    strict_device: bool = False,
    n_ctx: int | None = None,
    threads: int | None = None,
    name: str | None = None,
    tree: bool = False,
    split: bool = False,
) -> Model:
    """Load the model in the folder `path`, or the GGUF file that it is.

    device: a name of `edgespec.devices`. device_options: of its provider, passed through. strict_device: raise where
    the device does not run all of the model. n_ctx: tokens of context, at most what the model was made for (None).
    threads: None for the fast cores that this process may use. name: how messages call the model; None for the
    folder's own. tree: with a graph that verifies trees of drafted tokens. split: in two halves, whose sessions are
    `edgespec.backends.onnx.split.SplitSession`.
    Raises ConfigError (settings, unknown folder), MissingDependencyError, BundleError or BackendError.
    """
    folder = Path(path)
    backend = _find(folder)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}: give 1 or more, or leave it out for the fast cores.")
    module, _, function = backend.loader.partition(":")
    load: Callable[..., Model] = getattr(importlib.import_module(module), function)
    return load(
        folder,
        kind=backend.kind,
        device=device,
        device_options=read_device_options(device_options),
        strict_device=strict_device,
        n_ctx=n_ctx,
        threads=threads,
        name=name,
        tree=tree,
        split=split,
    )


def backend_kind(path: str | Path) -> str:
    """The kind of the backend that would load `path`; raises ConfigError where none would."""
    return _find(Path(path)).kind


def _find(path: Path) -> _Backend:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a model.")
    for backend in _BACKENDS:
        if backend.looks_like(path):
            return backend
    looked_for = "; ".join(f"{backend.looked_for} ({backend.kind})" for backend in _BACKENDS)
    what = "holds no model that edgespec knows" if path.is_dir() else "is a file, not a model folder"
    raise ConfigError(f"{path} {what}. Looked for: {looked_for}.")


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and all(any(path.glob(name)) for name in names)


_LOADER = "edgespec.backends.onnx.model:load"
register_backend("bundle", _has("bundle.json"), _LOADER, "bundle.json")
register_backend("genai", _has("genai_config.json"), _LOADER, "genai_config.json")
register_backend("optimum", _has("config.json", "*.onnx"), _LOADER, "config.json beside an .onnx file")
register_backend(
    "gguf",
    lambda path: path.is_file() and path.suffix.lower() == ".gguf",
    "edgespec.backends.llamacpp.model:load",
    "a .gguf file",
)

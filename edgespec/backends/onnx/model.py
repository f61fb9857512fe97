"""One decoder graph loaded by ONNX Runtime: the weights, shared by any number of sessions.

Puts the other modules of the package together: folder, device, signature, capabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.backends.base import check_context
from edgespec.backends.onnx.devices import Device, create_runtime, find_device, import_onnxruntime
from edgespec.backends.onnx.folders import ModelFolder, read_folder
from edgespec.backends.onnx.probe import open_session, probe_capabilities
from edgespec.backends.onnx.session import Capabilities, OnnxSession
from edgespec.backends.onnx.signature import Signature, read_signature
from edgespec.cpu import default_threads
from edgespec.errors import BackendError, IncompatibleError
from edgespec.types import ModelInfo

__all__ = ["OnnxModel", "load"]


class OnnxModel:
    """A loaded graph. `threads` is what it runs with, `folder` what it was loaded from."""

    def __init__(
        self,
        runtime: Any,
        signature: Signature,
        info: ModelInfo,
        capabilities: Capabilities,
        folder: ModelFolder,
        threads: int,
    ) -> None:
        self._runtime = runtime
        self._signature = signature
        self._info = info
        self.capabilities = capabilities
        self.folder = folder
        self.threads = threads

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def content_key(self) -> str:
        """Names the weights, the runtime's version, the device and the threads: what decides on kernels."""
        version = import_onnxruntime().__version__
        return f"{self.folder.content_key} onnxruntime={version} device={self._info.device} threads={self.threads}"

    def open_session(self) -> OnnxSession:
        if self._runtime is None:
            raise BackendError(f"{self._info.name}: the model is closed; load it again.")
        return open_session(self._runtime, self._signature, self._info, self.capabilities)

    def close(self) -> None:
        """Drop the weights; they are freed when the last open session is closed too."""
        self._runtime = None


def load(
    path: Path,
    *,
    kind: str,
    device: str = "cpu",
    n_ctx: int | None = None,
    threads: int | None = None,
    name: str | None = None,
) -> OnnxModel:
    """Load the model folder `path`; see `edgespec.backends.load_model`."""
    place = find_device(device)
    folder = read_folder(path, kind)
    name = name or folder.name
    context = check_context(name, n_ctx, folder.n_ctx)
    n_threads = threads or default_threads()
    runtime = create_runtime(folder.graph, place, n_threads)
    kv_shape = (folder.n_kv_heads, folder.head_dim) if folder.n_kv_heads and folder.head_dim else None
    signature = read_signature(runtime, name, names=folder.names, n_vocab=folder.n_vocab, kv_shape=kv_shape)
    _check_declared(folder, signature, name)
    info = _info(folder, signature, place, name, context)
    if kind == "bundle":
        capabilities = Capabilities()
    else:
        capabilities = probe_capabilities(runtime, signature, info)
        info = _info(folder, signature, place, name, context, capabilities)
    return OnnxModel(runtime, signature, info, capabilities, folder, n_threads)


def _info(
    folder: ModelFolder,
    signature: Signature,
    device: Device,
    name: str,
    n_ctx: int,
    capabilities: Capabilities | None = None,
) -> ModelInfo:
    capabilities = capabilities or Capabilities()
    return ModelInfo(
        name=name,
        n_vocab=signature.n_vocab,
        n_ctx=n_ctx,
        eos_ids=folder.eos_ids,
        tokenizer_hash=folder.tokenizer_hash,
        device=device.name,
        weight_bytes=folder.weight_bytes,
        kv_bytes_per_token=signature.kv_bytes_per_token,
        max_rewind=None if capabilities.can_rewind else 0,
        max_rows=capabilities.max_rows,
        taps=tuple(signature.taps or ()) if folder.kind == "bundle" else (),
    )


def _check_declared(folder: ModelFolder, signature: Signature, name: str) -> None:
    """The configuration of one model beside the weights of another: raise, listing what differs."""
    _, heads, _, dim = signature.kv_shape(signature.past[0], 0)
    pairs = {
        "n_vocab": (folder.n_vocab, signature.n_vocab),
        "n_layers": (folder.n_layers, signature.n_layers),
        "n_kv_heads": (folder.n_kv_heads, heads),
        "head_dim": (folder.head_dim, dim),
    }
    differing = [
        f"{key} {declared} against {found}" for key, (declared, found) in pairs.items() if declared not in (None, found)
    ]
    missing = [tap for tap in folder.taps if tap not in (signature.taps or {})]
    if missing:
        differing.append(f"taps {list(folder.taps)} against {sorted(signature.taps or {})}")
    if differing:
        raise IncompatibleError(
            f"{name}: the configuration and the graph are of different models ({'; '.join(differing)}): "
            "put the files of one model together."
        )

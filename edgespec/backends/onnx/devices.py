"""An InferenceSession made for a device, and what it says about where its nodes run.

Owns session options: provider, threads, spinning, what is recorded. Knows nothing of what the graph computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.backends.onnx.native import OPERATORS, native_graph
from edgespec.backends.onnx.providers import (
    Located,
    find_device,
    has_native_kernels,
    import_onnxruntime,
    locate,
    provider_options,
)
from edgespec.devices import Device, fixed_shapes_hint, name_some
from edgespec.errors import BackendError, EdgeSpecError
from edgespec.kernels import library, source_hash

__all__ = ["Place", "Placement", "create_runtime", "find_device", "import_onnxruntime", "placement", "short_message"]

# How long idle threads of a pool spin before they sleep (releases that do not know the entry ignore it). With the
# default, a target's threads still spin on the cores while its draft runs: two draft steps and a verify pass took
# 23.9 ms on two cores, 18.6 with 50..1000 us, 23.7 without any spinning; single steps 4.8, 4.8 and 6.1 ms. Beside other
# busy processes short spinning is 2-3 times faster than the default. A process-wide pool is not used: once set,
# no other session of the process may have its own.
SPIN_US = "100"
CPU_PROVIDER = "CPUExecutionProvider"
OWN = "edgespec"  # whose kernels run a node, among the providers


@dataclass(frozen=True)
class Place:
    """Where and how graphs are to be loaded: the four settings that go together from a flag to every graph.

    options: of the provider, over our defaults. strict: a node that the device does not take is an error.
    """

    device: Device
    threads: int
    options: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    def __str__(self) -> str:
        """What decides on kernels besides the graph: part of the key under which measured facts are kept."""
        options = "".join(f" {key}={value}" for key, value in sorted(self.options.items()))
        own = f" source={source_hash()}" if has_native_kernels(self.device, self.options) else ""
        return f"device={self.device.name}{options}{own} threads={self.threads}"

    def load(self, path: Path) -> Any:
        """An InferenceSession over the graph at `path`; see `create_runtime`."""
        return create_runtime(path, self.device, self.threads, options=self.options, strict=self.strict)


@dataclass(frozen=True)
class Placement:
    """nodes: provider -> number of nodes. fallbacks: operators that the device left to the CPU, most frequent first."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    n_fallen: int = 0

    def __add__(self, other: Placement) -> Placement:
        nodes = Counter(self.nodes) + Counter(other.nodes)
        fallbacks = tuple(dict.fromkeys((*self.fallbacks, *other.fallbacks)))
        return Placement(dict(nodes), fallbacks, self.n_fallen + other.n_fallen)


def create_runtime(
    path: Path,
    device: Device,
    threads: int,
    *,
    options: Mapping[str, str] | None = None,
    strict: bool = False,
    config: Mapping[str, str] | None = None,
    profile: Path | None = None,
) -> Any:
    """An InferenceSession over the graph at `path`.

    device: as `find_device` gives it. options: of the provider, the user's. strict: raise where a node would fall back
    to the CPU. config: further entries of the session's configuration. profile: how the name of a file begins that gets
    the time of every node (a few microseconds a node slower), until `end_profiling` of the session.
    Raises BackendError with one sentence where it cannot load.
    """
    ort, located = import_onnxruntime(), locate(device)
    _check_external_data(path)
    entries = {**(config or {}), "session.record_ep_graph_assignment_info": "1"}
    chosen = provider_options(located, threads, options or {})
    must = (options or {}).get("kernels") == "native"
    own = native_graph(path, threads, must=must) if has_native_kernels(device, options or {}) else None

    def open_graph(own: bytes | None) -> Any:
        settings = _session_options(device, threads, entries)
        if profile is not None:
            settings.enable_profiling = True
            settings.profile_file_prefix = str(profile)
        if own is not None:
            settings.register_custom_ops_library(str(library()))
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        return _open(ort, str(path) if own is None else own, settings, located, chosen)

    try:
        try:
            runtime = open_graph(own)
        except Exception:
            if own is None or must:
                raise
            runtime = open_graph(None)  # a runtime that cannot take our operators; the report counts whose nodes run
    except EdgeSpecError:
        raise
    except Exception as error:
        where = "" if device.provider == "cpu" else f" on device {device.name!r}"
        raise BackendError(
            f"onnxruntime {ort.__version__} cannot load {path}{where}: {short_message(error)}"
        ) from error
    if strict:
        _refuse_fallen(runtime, path, device, options or {})
    return runtime


def _refuse_fallen(runtime: Any, path: Path, device: Device, options: Mapping[str, str]) -> None:
    """Raises BackendError where nodes of a session fell back to the CPU."""
    found = _listed(runtime, device)
    if not found.n_fallen:
        return
    n_nodes = sum(found.nodes.values())
    total = "" if device.row.is_unlisted else f" of {n_nodes}"
    is_fixed = all(isinstance(size, int) for port in runtime.get_inputs() for size in port.shape)
    hint = "" if is_fixed else fixed_shapes_hint(device, found.n_fallen, n_nodes)
    if options and found.n_fallen == n_nodes:
        hint += f"; the device options were {', '.join(f'{key}={value}' for key, value in options.items())}"
    raise BackendError(
        f"{path}: {found.n_fallen}{total} nodes are not taken by device {device.name!r} "
        f"and would run on the CPU ({name_some(found.fallbacks)}): export the model for that device, "
        f"choose another one, or drop strict_device (--strict-device){hint}"
    )


def placement(runtime: Any, device: Device) -> Placement:
    """Which provider runs how many nodes of a session that `create_runtime` made and that has run at least once.

    To be asked once: where the runtime lists no nodes, this ends the profile of the calls so far.
    """
    listed = _listed(runtime, device)
    return replace(listed, nodes=_profiled(runtime) or listed.nodes) if device.row.is_unlisted else listed


def _listed(runtime: Any, device: Device) -> Placement:
    """What the runtime said when it divided the graph."""
    nodes: Counter[str] = Counter()
    fallen: Counter[str] = Counter()
    for part in runtime.get_provider_graph_assignment_info():
        operators = [node.op_type for node in part.get_nodes()]
        n_own = sum(operator in OPERATORS for operator in operators)
        nodes.update({part.ep_name: len(operators) - n_own, **({OWN: n_own} if n_own else {})})
        if part.ep_name == CPU_PROVIDER and device.provider != "cpu":
            fallen.update(operators)
    return Placement(dict(nodes), tuple(name for name, _count in fallen.most_common()), fallen.total())


@cache
def _profiles() -> tempfile.TemporaryDirectory[str]:
    """Where profiles are written; removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="edgespec-nodes-", ignore_cleanup_errors=True)


def _profiled(runtime: Any) -> dict[str, int]:
    """provider -> nodes that ran since the session was made; empty where nothing has been written down."""
    path = Path(runtime.end_profiling())
    if not path.is_file():
        return {}
    events = json.loads(path.read_text(encoding="utf-8"))
    shutil.rmtree(path.parent, ignore_errors=True)
    ran = {event["name"]: event["args"].get("provider") for event in events if event.get("cat") == "Node"}
    return dict(Counter(provider for provider in ran.values() if provider))


def short_message(error: Exception) -> str:
    """The first line of a runtime's message without its status prefix and source locations."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0])
    text = re.sub(r"\S*/onnxruntime/\S+\.(?:cc|h):\d+ ", "", text)
    return text.strip().rstrip(".")[:400] + "."


def _session_options(device: Device, threads: int, config: Mapping[str, str]) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_mem_pattern = device.provider != "directml"  # which refuses to run with it
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    if device.row.is_unlisted:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(tempfile.mkdtemp(dir=_profiles().name)) / "nodes")
    options.log_severity_level = 4  # failures are raised; the runtime's own prints would repeat them
    return options


def _open(ort: Any, source: str | bytes, settings: Any, located: Located, options: Mapping[str, str]) -> Any:
    row = located.device.row
    if located.ep_devices:
        settings.add_provider_for_devices([*located.ep_devices], dict(options))
        with _without_stdout():
            return ort.InferenceSession(source, settings)
    providers = [(row.ep_name, dict(options))]
    return ort.InferenceSession(source, settings, providers=providers, enable_fallback=0)


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    """What native code prints meanwhile goes nowhere: a vendor's library greets on stdout, where only output belongs.

    Works on the file descriptor, so it holds for the whole process.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # stdout is closed, so nothing can get onto it
        yield
        return
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _check_external_data(path: Path) -> None:
    """onnxruntime refuses data files behind a symbolic link, with a message about escaping the folder."""
    for name in dict.fromkeys((f"{path.name}.data", f"{path.name}_data", "model.onnx.data")):
        data = path.parent / name
        if data.is_symlink():
            raise BackendError(
                f"{data} is a symbolic link, which onnxruntime does not follow for weights: copy or hard-link the file."
            )

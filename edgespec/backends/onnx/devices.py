"""Devices by name, and an InferenceSession made for one: provider, its options, threads.

A device is a row of DEVICES; a plugin provider becomes another row. Knows nothing of what the graph computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError, ConfigError, MissingDependencyError

__all__ = ["DEVICES", "Device", "create_runtime", "find_device", "import_onnxruntime", "short_message"]

# How long idle threads of a pool spin before they sleep (releases that do not know the entry ignore it). With the
# default, a target's threads still spin on the cores while its draft runs: two draft steps and a verify pass took
# 23.9 ms on two cores, 18.6 with 50..1000 us, 23.7 without any spinning; single steps 4.8, 4.8 and 6.1 ms. Beside other
# busy processes short spinning is 2-3 times faster than the default. A process-wide pool is not used: once set,
# no other session of the process may have its own.
SPIN_US = "100"


@dataclass(frozen=True)
class Device:
    """A place to run graphs: an execution provider and its options."""

    name: str
    provider: str
    options: Mapping[str, str] = field(default_factory=dict)


DEVICES: dict[str, Device] = {"cpu": Device("cpu", "CPUExecutionProvider")}


def find_device(name: str) -> Device:
    """The device called `name`; raises ConfigError listing the known ones."""
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise ConfigError(f"device {name!r} is unknown to the ONNX backend: use one of {sorted(DEVICES)}.") from None


def import_onnxruntime() -> Any:
    """The onnxruntime module; raises MissingDependencyError naming the extra."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("running an ONNX model needs onnxruntime: pip install 'edgespec[onnx]'") from error
    return onnxruntime


def create_runtime(path: Path, device: Device, threads: int) -> Any:
    """An InferenceSession over the graph at `path`; raises BackendError with one sentence where it cannot load."""
    ort = import_onnxruntime()
    if device.provider not in ort.get_available_providers():
        raise BackendError(
            f"{device.provider} for device {device.name!r} is not in this onnxruntime {ort.__version__} "
            f"(it has {', '.join(ort.get_available_providers())}): install the package that brings it."
        )
    _check_external_data(path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    options.log_severity_level = 4  # failures are raised; the runtime's own prints would repeat them
    try:
        providers = [(device.provider, dict(device.options))]
        return ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except Exception as error:
        raise BackendError(f"onnxruntime {ort.__version__} cannot load {path}: {short_message(error)}") from error


def short_message(error: Exception) -> str:
    """The first line of a runtime's message without its status prefix and source locations."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0])
    text = re.sub(r"\S*/onnxruntime/\S+\.(?:cc|h):\d+ ", "", text)
    return text.strip().rstrip(".")[:400] + "."


def _check_external_data(path: Path) -> None:
    """onnxruntime refuses data files behind a symbolic link, with a message about escaping the folder."""
    for name in dict.fromkeys((f"{path.name}.data", f"{path.name}_data", "model.onnx.data")):
        data = path.parent / name
        if data.is_symlink():
            raise BackendError(
                f"{data} is a symbolic link, which onnxruntime does not follow for weights: copy or hard-link the file."
            )

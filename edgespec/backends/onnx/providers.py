"""Which execution providers this installation has, and what a device's name stands for among them.

A provider is built into the installed onnxruntime or comes as a plugin of a package of its own, which is registered
once a process. What gets loaded is decided by the installed packages and by the user's options alone. Knows the table
of `edgespec.devices`, not graphs.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import util
from typing import Any

from edgespec.devices import PROVIDERS, Device
from edgespec.errors import BackendError, ConfigError, EdgeSpecError, MissingDependencyError
from edgespec.kernels import obstacle

__all__ = ["Located", "find_device", "has_native_kernels", "import_onnxruntime", "is_emulated", "locate",
           "provider_options"]  # fmt: skip

# The emulator has to be told which chip it is: Snapdragon 8 Gen 3. A real one tells by itself.
EMULATED_SOC = {"soc_model": "57", "htp_arch": "75"}
NUMBERED = ("cuda", "directml", "openvino")  # built-in providers that take the number of a device
KERNELS = ("auto", "native", "onnxruntime")  # of the device option of that name, the first by default
COREML_UNITS = {"npu": "CPUAndNeuralEngine", "gpu": "CPUAndGPU", "cpu": "CPUOnly"}


@dataclass(frozen=True)
class Located:
    """A device that is here. ep_devices: what the plugin lists for it; empty for a provider built into onnxruntime.

    is_emulated: the hardware is not here, a library acts as if.
    """

    device: Device
    ep_devices: tuple[Any, ...] = ()
    is_emulated: bool = False


def import_onnxruntime() -> Any:
    """The onnxruntime module; raises MissingDependencyError naming the extra, BackendError where it is broken."""
    try:
        import onnxruntime

        _ = onnxruntime.InferenceSession  # a folder that an uninstall left behind imports too
    except Exception as error:  # broken installations raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            missing = "running an ONNX model needs onnxruntime: pip install 'edgespec[onnx]'"
            raise MissingDependencyError(missing) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendError(
            f"onnxruntime is installed, but does not load ({lines[0][:300]}): install it again, with "
            "pip install --force-reinstall onnxruntime"
        ) from error
    return onnxruntime


def find_device(name: str | Device) -> Device:
    """The device that `name` means on this system; a generic name is the first provider of its kind that works here.

    Raises ConfigError (unknown name, another runtime's), MissingDependencyError naming the extra, or BackendError
    where the package is here and the device is not.
    """
    device = Device.parse(name) if isinstance(name, str) else name
    if device.runtime != "onnx":
        raise ConfigError(f"device {device.name!r} runs GGUF files, and this is an ONNX model: use another device")
    if device.provider:
        return locate(device).device
    reasons = []
    for candidate in device.candidates():
        try:
            return locate(candidate).device
        except EdgeSpecError as error:
            reasons.append((candidate, error))
    installed = [f"{candidate.name}: {error}" for candidate, error in reasons if isinstance(error, BackendError)]
    if installed:
        raise BackendError(f"device {device.name!r}: no installed provider finds one ({'; '.join(installed)})")
    ways = ", ".join(
        f"{candidate.provider} ({candidate.row.install or candidate.row.needs})" for candidate, _ in reasons
    )
    what = f" that numbers its devices (or write {device.kind})" if device.index else ""
    raise MissingDependencyError(f"device {device.name!r} needs a provider{what}, and none is installed. Known: {ways}")


@cache
def locate(device: Device) -> Located:
    """Find `device` on this system, registering its plugin; asked once a process for each.

    Raises MissingDependencyError where its package is not installed, BackendError where it lists no such device.
    """
    # A registered plugin is among the available providers too, so that list tells nothing where there is a plugin.
    ort, row = import_onnxruntime(), device.row
    if row.plugin is None or util.find_spec(row.plugin) is None:
        if row.ep_name in ort.get_available_providers():
            if device.index and row.name not in NUMBERED:
                raise BackendError(
                    f"device {device.name!r}: {row.name} built into onnxruntime uses the GPU that the system prefers, "
                    f"and takes no number: write {row.name}"
                )
            return Located(device)
        raise MissingDependencyError(
            f"device {device.name!r} needs {row.ep_name}, which onnxruntime {ort.__version__} does not have here: "
            f"{row.hint}"
        )
    _register(row.name)
    listed = [found for found in ort.get_ep_devices() if found.ep_name == row.ep_name]
    wanted = [found for found in listed if _kind(found) == device.kind]
    chosen = wanted or (listed[:1] if device.kind in row.lists_cpu else [])
    if not chosen:
        here = ", ".join(sorted({_kind(found) for found in listed})) or "none"
        raise BackendError(
            f"device {device.name!r}: {row.package} finds no {device.kind} here (it finds: {here}); "
            f"it needs {row.needs}"
        )
    if (index := device.index or 0) >= len(chosen):
        raise BackendError(f"device {device.name!r}: {row.package} finds {len(chosen)} of that kind, numbered from 0")
    return Located(device, (chosen[index],), is_emulated=row.name == "qnn" and _is_linux_x86())


def is_emulated(name: str) -> bool:
    """Whether the device of a loaded model is a library that acts as the hardware."""
    device = Device.parse(name)
    return device.provider == "qnn" and locate(device).is_emulated


def has_native_kernels(device: Device, options: Mapping[str, str]) -> bool:
    """Whether products run by our own kernels, which only onnxruntime's CPU provider can take.

    By default they do where they are made for the CPU and can be compiled.
    Raises ConfigError for other options of that provider, which has none of its own, and for other kernels.
    """
    if device.provider != "cpu":
        return False
    strange = [key for key in options if key != "kernels"]
    if strange:
        raise ConfigError(
            f"the device option {strange[0]!r} has no effect: the CPU takes kernels={'|'.join(KERNELS)} and no other"
        )
    kernels = options.get("kernels", KERNELS[0])
    if kernels not in KERNELS:
        raise ConfigError(f"the device option kernels is {kernels!r}: use one of {', '.join(KERNELS)}")
    return kernels == "native" or (kernels == "auto" and obstacle() is None)


def provider_options(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the provider is opened with: our defaults for `located`, and the user's options `given` over them.

    Raises ConfigError for options where the provider has none.
    """
    if located.device.provider == "cpu":  # onnxruntime ignores options of its own without a word
        has_native_kernels(located.device, given)
        return {}
    make = _OPTIONS.get(located.device.provider)
    return {**(make(located, threads, given) if make else {}), **given}


@cache
def _register(provider: str) -> None:
    """Load the plugin library of a row; the registration lasts as long as the process."""
    row = PROVIDERS[provider]
    assert row.plugin is not None
    try:
        module, ort = importlib.import_module(row.plugin), import_onnxruntime()
        path = (getattr(module, "get_library_path", None) or module.library_path)()
        if not any(found.ep_name == row.ep_name for found in ort.get_ep_devices()):  # the program may have done it
            ort.register_execution_provider_library(row.ep_name, path)
    except Exception as error:  # broken installations raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendError(f"{row.package} is installed, but its library does not load: {lines[0][:300]}") from error


def _kind(found: Any) -> str:
    """npu | gpu | cpu of an OrtEpDevice; OpenVINO lists its own name for it."""
    name = found.ep_metadata.get("ov_device") or found.device.type.name
    return str(name).split(".")[0].lower()


def _is_linux_x86() -> bool:
    return sys.platform.startswith("linux") and platform.machine() in {"x86_64", "AMD64"}


# --- what each provider is opened with --------------------------------------------------------------------------------


def _qnn(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    part = "gpu" if located.device.kind == "gpu" else "htp"
    options = {}
    if "backend_type" not in given:  # the provider takes one of the two
        options["backend_path"] = _qnn_library(located, part)
    if part == "htp":
        options["enable_htp_fp16_precision"] = "1"
        if located.is_emulated and not {"soc_model", "htp_arch"} & set(given):
            options.update(EMULATED_SOC)
    return options


def _qnn_library(located: Located, part: str) -> str:
    """Path of the library for one part of the chip: the plugin's own, or its bare name for builds that have QNN."""
    if located.ep_devices:
        return str(getattr(importlib.import_module("onnxruntime_qnn"), f"get_qnn_{part}_path")())
    stem = f"Qnn{part.capitalize()}"
    return f"{stem}.dll" if sys.platform == "win32" else f"lib{stem}.so"


def _numbered(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    return {"device_id": str(located.device.index or 0)}


def _openvino(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    device = located.device
    number = "" if device.index is None else f".{device.index}"
    return {} if located.ep_devices else {"device_type": f"{device.kind.upper()}{number}"}


def _coreml(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    return {"ModelFormat": "MLProgram", "MLComputeUnits": COREML_UNITS[located.device.kind]}


def _xnnpack(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    return {"intra_op_num_threads": str(threads)}


def _ggml(located: Located, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    return {"device": located.device.kind, "threads": str(threads)}


_OPTIONS: dict[str, Callable[[Located, int, Mapping[str, str]], dict[str, str]]] = {
    "qnn": _qnn,
    "cuda": _numbered,
    "directml": _numbered,
    "openvino": _openvino,
    "coreml": _coreml,
    "xnnpack": _xnnpack,
    "ggml": _ggml,
}

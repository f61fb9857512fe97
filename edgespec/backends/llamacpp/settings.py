"""What `--device` and `--device-option` mean for llama.cpp: layers on a GPU, types of the KV cache, attention.

Every value is checked here, so that llama.cpp is never asked for something it would abort over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.library import LlamaDevice, list_devices, version
from edgespec.config import nearest
from edgespec.devices import Device
from edgespec.errors import BackendError, ConfigError, FormatError
from edgespec.gguf import GGUFFile

__all__ = ["KV_TYPES", "MOST_SEQUENCES", "KVType", "Settings", "check_length", "find_devices", "read_settings"]

MOST_SEQUENCES = 64
MOST_CONTEXT = 2**31 // MOST_SEQUENCES - 1  # llama.cpp counts the tokens of all sequences of a context in 32 bits
FLASH = {"auto": -1, "off": 0, "on": 1}
SWITCH = {"on": True, "off": False, "1": True, "0": False, "true": True, "false": False}


@dataclass(frozen=True)
class KVType:
    """A type of cached keys and values: ggml's number, values in a block, bytes of a block."""

    id: int
    block: int
    n_bytes: int


KV_TYPES = {
    "f32": KVType(0, 1, 4),
    "f16": KVType(1, 1, 2),
    "bf16": KVType(30, 1, 2),
    "q8_0": KVType(8, 32, 34),
    "q5_1": KVType(7, 32, 24),
    "q5_0": KVType(6, 32, 22),
    "q4_1": KVType(3, 32, 20),
    "q4_0": KVType(2, 32, 18),
    "iq4_nl": KVType(20, 32, 18),
}


@dataclass(frozen=True)
class Settings:
    """n_gpu_layers: layers on the GPU, None for all of them. type_k, type_v: of the cache (type_v below f16 needs
    flash attention). flash_attn: auto | on | off; on the CPU it treats each of 2 to 63 rows alike, while without it one
    row takes other kernels than several. sequences: how many share one context and may run in one pass.
    swa_full: the cache of sliding-window layers holds the whole context, so that any rewind works. mmap: map the file.
    repack: reorder the weights for this CPU's kernels.
    """

    n_gpu_layers: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    sequences: int = 1
    swa_full: bool = True
    mmap: bool = True
    repack: bool = True


def read_settings(options: Mapping[str, str], device: Device) -> Settings:
    """Settings from `--device-option` texts; raises ConfigError naming the option, its value and what is allowed."""
    known = {field.name for field in fields(Settings)}
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise ConfigError(
                f"device option {key!r} is unknown to llama.cpp{nearest(key, known)} "
                f"(known: {', '.join(sorted(known))})"
            )
        values[key] = _READERS[key](key, str(text))
    if device.kind == "cpu" and values.get("n_gpu_layers"):
        raise ConfigError(
            f"n_gpu_layers={values['n_gpu_layers']} would have no effect on device {device.name!r}: use llamacpp:gpu"
        )
    settings = Settings(**values)
    if settings.flash_attn == "off" and KV_TYPES[settings.type_v].block > 1:
        raise ConfigError(
            f"type_v={settings.type_v} needs flash attention and flash_attn is off: use type_v=f16, or flash_attn=on"
        )
    return settings


def find_devices(device: Device) -> tuple[LlamaDevice, ...]:
    """llama.cpp's device for `device`, none for the CPU; raises BackendError where this build has none."""
    if device.kind == "cpu":
        if device.index:
            raise ConfigError(f"device {device.name!r}: llama.cpp counts the CPU as one device, use llamacpp:cpu")
        return ()
    found = [item for item in list_devices() if item.kind == device.kind]
    index = device.index or 0
    if index >= len(found):
        have = ", ".join(f"{item.name} ({item.kind})" for item in list_devices())
        raise BackendError(
            f"device {device.name!r}: this llama-cpp-python {version()} has {len(found)} devices of the kind "
            f"{device.kind} (all of them: {have}): install a build for yours (docs/llamacpp.md), or use llamacpp:cpu"
        )
    return (found[index],)


def check_length(path: Path, file: GGUFFile) -> None:
    """llama.cpp takes any context length for good, as a 32-bit number."""
    key = f"{file.metadata.get('general.architecture')}.context_length"
    length = file.metadata.get(key)
    if isinstance(length, int) and not 2 <= length <= MOST_CONTEXT:
        raise FormatError(f"{path}: {key} is {length}, possible are 2..{MOST_CONTEXT}: convert the model again.")


def _number(lowest: int, highest: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise ConfigError(f"device option {key}={text}: it must be a whole number from {lowest} to {highest}")
        return int(text)

    return read


def _word(allowed: Mapping[str, Any]) -> Callable[[str, str], str]:
    def read(key: str, text: str) -> str:
        if text.lower() not in allowed:
            raise ConfigError(f"device option {key}={text}: use one of {', '.join(allowed)}")
        return text.lower()

    return read


def _switch(key: str, text: str) -> bool:
    return SWITCH[_word(SWITCH)(key, text)]


_READERS: dict[str, Callable[[str, str], Any]] = {
    "n_gpu_layers": _number(0, 10_000),
    "type_k": _word(KV_TYPES),
    "type_v": _word(KV_TYPES),
    "flash_attn": _word(FLASH),
    "sequences": _number(1, MOST_SEQUENCES),
    "swa_full": _switch,
    "mmap": _switch,
    "repack": _switch,
}

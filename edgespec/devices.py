"""Names of devices: one table of providers, and what a name such as `npu`, `qnn:htp` or `webgpu:0` means in it.

Pure parsing: nothing here asks which packages are installed or what this machine has. Whoever runs a model (the ONNX
backend, llama.cpp) turns a `Device` into something real; a new provider is one more row of PROVIDERS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.config import nearest
from edgespec.errors import ConfigError

__all__ = [
    "GENERIC",
    "KINDS",
    "PROVIDERS",
    "Device",
    "Provider",
    "device_names",
    "fixed_shapes_hint",
    "name_some",
    "read_device_options",
]

KINDS = ("npu", "gpu", "cpu")
GENERIC = ("npu", "gpu")  # kinds that are names too: the first provider of that kind that this system has
MAX_NAMED = 8  # operators that a message lists


@dataclass(frozen=True)
class Provider:
    """One row: a way to run models.

    words: what may stand after the name -> kind of hardware; the first is meant where nothing stands there.
    ep_name: what onnxruntime calls it; empty for other runtimes. plugin: the module that ships it as a library of its
    own; without one, or where it is built into the installed onnxruntime, that one is used. package: what pip installs.
    extra: the extra of edgespec that brings it. needs: hardware and system, for people. has_index: whether its devices
    are numbered. is_static: whether it runs only graphs of fixed shapes. lists_cpu: kinds for which its plugin may
    list the CPU as the hardware and mean another. is_unlisted: onnxruntime does not list the nodes that it took, so
    they are read from a profile of the first calls. is_generic: whether `npu` and `gpu` may stand for it.
    """

    name: str
    words: Mapping[str, str]
    ep_name: str = ""
    runtime: str = "onnx"
    plugin: str | None = None
    package: str = "onnxruntime"
    extra: str | None = None
    needs: str = ""
    has_index: bool = False
    is_static: bool = False
    lists_cpu: tuple[str, ...] = ()
    is_unlisted: bool = False
    is_generic: bool = True

    @property
    def install(self) -> str:
        """The command that brings it; empty where onnxruntime itself has it on the right system."""
        if self.extra:
            return f"pip install 'edgespec[{self.extra}]'"
        return "" if self.package == "onnxruntime" else f"pip install {self.package}"

    @property
    def hint(self) -> str:
        """How to get it, in one line."""
        return f"{self.install} (it needs {self.needs})" if self.install else f"it needs {self.needs}"

    @property
    def pattern(self) -> str:
        """How its names are written: `qnn[:htp|npu|gpu]`."""
        words = f"[:{'|'.join(self.words)}]" if len(self.words) > 1 else ""
        return f"{self.name}{words}{'[:N]' if self.has_index else ''}"


# In order of preference for the generic names.
PROVIDERS: dict[str, Provider] = {
    row.name: row
    for row in (
        Provider("cpu", {"cpu": "cpu"}, "CPUExecutionProvider", extra="onnx", needs="any CPU"),
        Provider(
            "qnn",
            {"htp": "npu", "npu": "npu", "gpu": "gpu"},
            "QNNExecutionProvider",
            plugin="onnxruntime_qnn",
            package="onnxruntime-qnn",
            extra="qnn",
            needs="a Snapdragon with a Hexagon NPU (Windows or Linux arm64, Android); emulated on Linux x86-64",
            is_static=True,
            lists_cpu=("npu",),
        ),
        Provider(
            "cuda",
            {"gpu": "gpu"},
            "CUDAExecutionProvider",
            package="onnxruntime-gpu",
            needs="an NVIDIA GPU with CUDA",
            has_index=True,
        ),
        Provider(
            "tensorrt-rtx",
            {"gpu": "gpu"},
            "NvTensorRTRTXExecutionProvider",
            plugin="onnxruntime_ep_nv_tensorrt_rtx",
            package="onnxruntime-ep-nv-tensorrt-rtx",
            needs="an NVIDIA RTX GPU of the 30 series or newer",
            has_index=True,
        ),
        Provider(
            "coreml",
            {"npu": "npu", "gpu": "gpu", "cpu": "cpu"},
            "CoreMLExecutionProvider",
            needs="macOS, where the onnxruntime package has it",
        ),
        Provider(
            "directml",
            {"gpu": "gpu"},
            "DmlExecutionProvider",
            package="onnxruntime-directml",
            needs="Windows with a DirectX 12 GPU",
            has_index=True,
        ),
        Provider(
            "openvino",
            {"cpu": "cpu", "gpu": "gpu", "npu": "npu"},
            "OpenVINOExecutionProvider",
            plugin="onnxruntime_ep_openvino",
            package="onnxruntime-ep-openvino",
            extra="openvino",
            needs="an Intel CPU, GPU or NPU; onnxruntime-openvino, in place of onnxruntime, takes any x86-64",
            has_index=True,
        ),
        Provider(
            "webgpu",
            {"gpu": "gpu"},
            "WebGpuExecutionProvider",
            plugin="onnxruntime_ep_webgpu",
            package="onnxruntime-ep-webgpu",
            extra="webgpu",
            needs="a GPU with Vulkan, Metal or Direct3D 12; onnxruntime-webgpu, instead of onnxruntime, has it too",
            has_index=True,
            is_unlisted=True,
        ),
        Provider(
            "xnnpack",
            {"cpu": "cpu"},
            "XnnpackExecutionProvider",
            needs="an onnxruntime built with XNNPACK (Android, Termux)",
        ),
        Provider(
            "ggml",
            {"cpu": "cpu", "gpu": "gpu"},
            "ggml",
            plugin="onnxruntime_ggml",
            package="onnxruntime-ggml",
            needs="Linux, macOS or Windows; it runs ONNX graphs on ggml",
            lists_cpu=("gpu",),
            is_generic=False,  # it lists a GPU whether there is one or not
        ),
        Provider(
            "llamacpp",
            {"cpu": "cpu", "gpu": "gpu", "npu": "npu"},
            runtime="llamacpp",
            plugin="llama_cpp",
            package="llama-cpp-python",
            extra="llamacpp",
            needs="models as GGUF files",
            has_index=True,
        ),
    )
}


@dataclass(frozen=True)
class Device:
    """A place to run a model.

    provider: a row of PROVIDERS, empty for a generic name, which `candidates` turns into rows. kind: npu | gpu | cpu.
    word: what the name says after the provider (`htp`). index: which of several, None for the first. name: the whole,
    written the same way whatever the user typed.
    """

    provider: str
    kind: str
    word: str = ""
    index: int | None = None

    @property
    def name(self) -> str:
        head = self.provider or self.kind
        if self.provider and len(PROVIDERS[self.provider].words) > 1:
            head = f"{head}:{self.word}"
        return head if self.index is None else f"{head}:{self.index}"

    @property
    def runtime(self) -> str:
        """ "onnx" | "llamacpp"; generic names and `cpu` are for whichever runtime the model's files ask for."""
        return PROVIDERS[self.provider].runtime if self.provider else "onnx"

    @property
    def row(self) -> Provider:
        """Its provider's row; not for generic names."""
        return PROVIDERS[self.provider]

    @classmethod
    def parse(cls, name: str) -> Device:
        """The device that `name` means; raises ConfigError listing what is known."""
        if not isinstance(name, str):
            raise ConfigError(f"device {name!r} is no text: use one of {', '.join(device_names())}")
        head, *rest = name.strip().lower().split(":")
        if head in GENERIC:
            return cls("", head, index=_index(name, rest, f"{head}[:N]"))
        row = PROVIDERS.get(head)
        if row is None:
            hint = nearest(head, [*GENERIC, *PROVIDERS])
            raise ConfigError(f"device {name!r} is unknown{hint or ':'} use one of {', '.join(device_names())}")
        word = next(iter(row.words))
        if rest and not rest[0].isdecimal():
            word = rest.pop(0)
            if word not in row.words:
                raise ConfigError(f"device {name!r}: {row.name} has no {word!r}, write {row.pattern}")
        if rest and not row.has_index:
            raise ConfigError(f"device {name!r}: {row.name} has no numbered devices, write {row.pattern}")
        kind = row.words[word]
        first = next(same for same, its_kind in row.words.items() if its_kind == kind)
        return cls(row.name, kind, first, _index(name, rest, row.pattern))

    def candidates(self, runtime: str = "onnx") -> tuple[Device, ...]:
        """Itself, or for a generic name the devices of that kind in every provider of `runtime`, in table order."""
        if self.provider:
            return (self,)
        found = []
        for row in PROVIDERS.values():
            word = next((word for word, kind in row.words.items() if kind == self.kind), None)
            if word is None or row.runtime != runtime or not row.is_generic:
                continue
            if row.has_index or not self.index:
                found.append(Device(row.name, self.kind, word, self.index if row.has_index else None))
        return tuple(found)


def fixed_shapes_hint(device: Device, n_fallen: int, n_nodes: int) -> str:
    """What to do where a device that takes graphs of fixed shapes alone has taken nothing; empty elsewhere."""
    if not device.provider or not device.row.is_static or n_fallen < n_nodes:
        return ""
    return f"; {device.provider} takes graphs of fixed shapes alone: use a bundle made with --flavour npu"


def device_names() -> list[str]:
    """How every known name is written, the generic ones first."""
    return [*(f"{kind}[:N]" for kind in GENERIC), *(row.pattern for row in PROVIDERS.values())]


def read_device_options(options: Mapping[str, str] | Sequence[str], what: str = "device_options") -> dict[str, str]:
    """Provider options as a dict, from a mapping or from `KEY=VALUE` texts.

    Raises ConfigError for anything else, an empty key, or a key given twice.
    """
    if isinstance(options, Mapping):
        pairs = [(key, value) for key, value in options.items()]
    elif isinstance(options, Sequence) and not isinstance(options, str):
        pairs = [_pair(text, what) for text in options]
    else:
        raise ConfigError(f"{what}={options!r}: give a mapping, or a list of KEY=VALUE")
    found: dict[str, str] = {}
    for key, value in pairs:
        if not isinstance(key, str) or not key or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{what}: {key!r}={value!r} is no option: keys are text, values text or numbers")
        if key in found:
            raise ConfigError(f"{what}: {key!r} is given twice, as {found[key]!r} and {str(value)!r}: give it once")
        found[key] = str(int(value)) if isinstance(value, bool) else str(value)
    return found


def name_some(operators: Sequence[str]) -> str:
    """The first of `operators` and how many more there are, for messages."""
    more = len(operators) - MAX_NAMED
    return ", ".join(operators[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _pair(text: object, what: str) -> tuple[str, str]:
    key, sign, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not sign or not key.strip():
        raise ConfigError(f"{what}: {text!r} is not KEY=VALUE (for instance htp_performance_mode=burst)")
    return key.strip(), value


def _index(name: str, rest: Sequence[str], pattern: str) -> int | None:
    if not rest:
        return None
    if len(rest) > 1 or not re.fullmatch(r"[0-9]{1,3}", rest[0]):
        raise ConfigError(f"device {name!r}: {':'.join(rest)!r} is no number of a device, write {pattern}")
    return int(rest[0])

"""`edgespec doctor`: what this machine has, what is missing and what to install for what.

Collects facts, each on its own, so that one that cannot be read (or a package that breaks on import) becomes a line
under problems and never an exit status.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import click

from edgespec import __version__, config
from edgespec.backends.onnx.inventory import list_devices
from edgespec.cli.console import format_bytes, print_json
from edgespec.cpu import CpuTopology, missing_features, read_topology
from edgespec.kernels import obstacle
from edgespec.pairs import list_pairs

__all__ = ["EXTRAS", "command", "examine"]

EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "onnx": ("run ONNX models", ("onnxruntime",)),
    "export": (
        "convert weights into bundles (`edgespec pull`, `edgespec export`)",
        ("onnx", "onnxruntime", "gguf", "safetensors"),
    ),
    "train": (
        "train drafts (`edgespec train`)",
        ("torch", "matplotlib", "safetensors", "onnx", "onnxruntime", "gguf"),
    ),
    "qnn": ("run on the NPU of a Snapdragon (emulated on Linux x86-64)", ("onnxruntime", "onnxruntime-qnn")),
    "openvino": ("run on Intel CPUs, GPUs and NPUs", ("onnxruntime", "onnxruntime-ep-openvino")),
    "webgpu": ("run on a GPU through WebGPU", ("onnxruntime", "onnxruntime-ep-webgpu")),
    "llamacpp": ("run GGUF files in llama.cpp and quantize to its types", ("llama-cpp-python",)),
    "optimum": (
        "export models of other families (`edgespec export --via optimum`; in an environment of its own)",
        ("optimum", "optimum-onnx", "transformers", "torch", "onnxruntime"),
    ),
    "server": ("answer over HTTP (`edgespec serve`)", ("starlette", "uvicorn")),
    "hub": ("fetch from a model hub", ("huggingface_hub",)),
    "bench": ("measure memory in the benchmarks", ("psutil", "matplotlib")),
}  # extra -> (what it is for, the packages it brings)
CORE = ("numpy", "click", "rich", "jinja2", "tokenizers")

LOW_BYTES = 1_000_000_000  # a first pull needs about 0.4 GB of disk, a run of it about 0.5 GB of memory


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def command(as_json: bool) -> None:
    """Say what this machine has, what is missing, and what to install for what.

    Always exits with 0; what is wrong is listed under problems.
    """
    facts = examine()
    if as_json:
        print_json(facts)
    else:
        click.echo("\n".join(_lines(facts)))


def examine(topology: CpuTopology | None = None) -> dict[str, Any]:
    """Everything that is known about this machine, as plain values; "problems" is a list of sentences."""
    problems: list[str] = []

    def attempt(what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # broken installations raise anything
            problems.append(f"{what} cannot be read: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            return None

    packages = {name: _version(name) for name in (*CORE, *_optional_packages())}
    facts: dict[str, Any] = {
        "edgespec": __version__,
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "pip": util.find_spec("pip") is not None,
        },
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages,
        "extras": {name: _extra(name, packages) for name in EXTRAS},
        "providers": attempt("onnxruntime", _providers) if packages["onnxruntime"] else [],
        "devices": attempt("the devices", list_devices),
        "cpu": attempt("the CPU", lambda: _cpu(topology or read_topology())),
        "kernels": attempt("the kernels", _kernels),
        "memory": attempt("the memory", _memory),
        "cache": attempt("the cache folder", _cache),
        "models": attempt("the list of models", _models),
    }
    facts["problems"] = problems + _problems(facts)
    return facts


def _optional_packages() -> list[str]:
    return [*dict.fromkeys(package for _purpose, brings in EXTRAS.values() for package in brings)]


def _version(package: str) -> str | None:
    """The installed version; "?" for a package that imports and has no metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?" if util.find_spec(package) else None


def _extra(name: str, packages: Mapping[str, str | None]) -> dict[str, Any]:
    purpose, brings = EXTRAS[name]
    missing = [package for package in brings if packages[package] is None]
    return {"for": purpose, "missing": missing, "install": f"pip install 'edgespec[{name}]'" if missing else None}


def _providers() -> list[str]:
    import onnxruntime

    return [*onnxruntime.get_available_providers()]


def _cpu(topology: CpuTopology) -> dict[str, Any]:
    return {
        "model": topology.model or platform.machine(),
        "features": sorted(topology.features),
        "missing_features": missing_features(topology),
        "n_cores": os.cpu_count(),
        "allowed": [*topology.allowed],
        "fast": [*topology.fast],
        "quota": topology.quota,
        "threads": topology.threads,
    }


def _kernels() -> dict[str, str | None]:
    """by: whose kernels run 4-bit products where none are named; why: what stands against edgespec's own."""
    why = obstacle(is_trial=True)
    return {"by": "onnxruntime" if why else "edgespec", "why": why}


def _memory() -> dict[str, int | None]:
    """Bytes in all and bytes that a new process could get (Linux, Android); elsewhere the total alone."""
    path = Path("/proc/meminfo")
    if path.exists():
        lines = path.read_text(encoding="ascii").splitlines()
        fields = {name: rest.split()[0] for name, _colon, rest in (line.partition(":") for line in lines)}
        available = fields.get("MemAvailable")
        return {
            "total_bytes": int(fields["MemTotal"]) * 1024,
            "available_bytes": int(available) * 1024 if available else None,
        }
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"total_bytes": total, "available_bytes": None}


def _cache() -> dict[str, Any]:
    folder = config.cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {
        "folder": str(folder),
        "used_bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "free_bytes": shutil.disk_usage(existing).free,
        "writable": existing.is_dir() and os.access(existing, os.W_OK),
        "offline": config.is_offline(),
    }


def _models() -> list[dict[str, Any]]:
    return [{"name": pair.name, "pulled": pair.is_pulled, "path": str(pair.path or "")} for pair in list_pairs()]


def _problems(facts: Mapping[str, Any]) -> list[str]:
    """Sentences about what would get in a user's way, the way out included."""
    found = []
    if not facts["packages"]["onnxruntime"]:
        found.append("onnxruntime is not installed, so no model can run: pip install 'edgespec[onnx]'")
    elif facts["providers"] and "CPUExecutionProvider" not in facts["providers"]:
        found.append("this onnxruntime has no CPUExecutionProvider: install the onnxruntime package")
    if not facts["python"]["pip"]:
        found.append("this Python has no pip, which `edgespec pull` downloads with: python -m ensurepip")
    return [*found, *_cpu_problems(facts["cpu"]), *_space_problems(facts["memory"], facts["cache"])]


def _cpu_problems(cpu: Mapping[str, Any] | None) -> list[str]:
    missing = cpu["missing_features"] if cpu else []
    if not missing:
        return []
    return [
        f"the CPU lists no {' and no '.join(missing)}: int4 models will be slow, and packages built for newer CPUs end "
        "with signal 4 (SIGILL)"
    ]


def _space_problems(memory: Mapping[str, Any] | None, cache: Mapping[str, Any] | None) -> list[str]:
    found = []
    available = memory["available_bytes"] if memory else None
    if available is not None and available < LOW_BYTES:
        found.append(f"{format_bytes(available)} of memory are free: even small models may not fit")
    if cache is None:
        return found
    if not cache["writable"]:
        found.append(f"{cache['folder']} cannot be written: set EDGESPEC_HOME to a folder of yours")
    if cache["free_bytes"] < LOW_BYTES:
        found.append(
            f"{format_bytes(cache['free_bytes'])} of disk are free beside {cache['folder']}: set EDGESPEC_HOME"
        )
    return found


# --- for people -------------------------------------------------------------------------------------------------------


def _lines(facts: Mapping[str, Any]) -> list[str]:
    python, packages = facts["python"], facts["packages"]
    rows = [
        ("edgespec", facts["edgespec"]),
        ("python", f"{python['version']} ({python['executable']})"),
        ("system", facts["system"]),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("providers", ", ".join(facts["providers"] or []) or "none"),
        *_cpu_rows(facts["cpu"]),
        *_kernel_rows(facts["kernels"]),
        *_space_rows(facts["memory"], facts["cache"]),
        ("models", ", ".join(_model_text(model) for model in facts["models"] or []) or "none known"),
    ]
    lines = [f"{name:<11}{value}" for name, value in rows]
    lines += ["", "devices here", *_device_lines(facts["devices"] or [])]
    lines += ["", "what to install for what"]
    for name, extra in facts["extras"].items():
        lines.append(f"  {name:<9}{extra['for']}: {extra['install'] or 'here'}")
    lines += ["", "problems" if facts["problems"] else "no problems found"]
    return lines + [f"  - {problem}" for problem in facts["problems"]]


def _device_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is usable and what it can do; then a line for each provider that is missing or finds no hardware."""
    lines = [f"  {row['name']:<14}{_abilities(row)}" for row in devices if row["usable"]]
    hints: dict[str, list[str]] = {}
    for row in devices:
        if not row["usable"]:
            hints.setdefault(row["hint"], []).append(row["name"])
    lines += ["", "devices that are not"]
    return lines + [f"  {', '.join(names)}: {hint}" for hint, names in hints.items()]


def _abilities(row: Mapping[str, Any]) -> str:
    can = ["any number of rows" if row["dynamic_shapes"] else f"fixed numbers of rows: {row['widths']}"]
    if not row["several_rows"]:
        can = ["one row at a time (its attention operator is wrong for several)"]
    can += [text for key, text in (("tree", "trees"), ("hidden", "hidden outputs")) if row[key]]
    return ("emulated, not the real hardware; " if row["emulated"] else "") + ", ".join(can)


def _model_text(model: Mapping[str, Any]) -> str:
    return model["name"] if model["pulled"] else f"{model['name']} (not here: edgespec pull {model['name']})"


def _kernel_rows(kernels: Mapping[str, str | None] | None) -> list[tuple[str, str]]:
    if kernels is None:
        return []
    why = f", as {kernels['why']}" if kernels["why"] else ""
    return [("kernels", f"4-bit products by {kernels['by']}{why}")]


def _cpu_rows(cpu: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if cpu is None:
        return []
    quota = "" if cpu["quota"] is None else f", quota {cpu['quota']:.3g} cores"
    cores = f"{cpu['n_cores']}, allowed {_join(cpu['allowed'])}, fast {_join(cpu['fast'])}{quota}"
    return [
        ("cpu", f"{cpu['model']} ({', '.join(cpu['features']) or 'features unknown'})"),
        ("cores", f"{cores}; threads {cpu['threads']}"),
    ]


def _space_rows(memory: Mapping[str, Any] | None, cache: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    rows = []
    if memory is not None and memory["total_bytes"]:
        free = memory["available_bytes"]
        rows.append(("memory", format_bytes(memory["total_bytes"]) + (f", {format_bytes(free)} free" if free else "")))
    if cache is not None:
        offline = ", offline" if cache["offline"] else ""
        used, free = format_bytes(cache["used_bytes"]), format_bytes(cache["free_bytes"])
        rows.append(("cache", f"{cache['folder']} ({used} used, {free} free{offline})"))
    return rows


def _join(numbers: list[int]) -> str:
    """Core numbers with runs shortened: 0-3,6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

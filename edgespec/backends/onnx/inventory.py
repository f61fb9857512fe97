"""What each device of the table can do on this machine: tried out on tiny graphs, each provider in a child process.

A vendor's library that crashes is a line of the report and not the end of it. Knows no models.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import config
from edgespec.children import describe_exit
from edgespec.devices import PROVIDERS, Device, Provider
from edgespec.errors import EdgeSpecError

__all__ = ["list_devices"]

CHILD_TIMEOUT_S = 120
TRIAL_ROWS = 20
HALF_PRECISION = 0.02  # on values around 1; wrong rows were off by 0.3 and more
WIDTHS_OPEN, WIDTHS_FIXED = "any", "those of the bundle (edgespec export --flavour npu --widths 1,4,8)"


def list_devices() -> list[dict[str, Any]]:
    """A row for each device of the table, as plain values.

    name, kind, usable, emulated; of usable ones also dynamic_shapes, several_rows (whether its attention operator is
    right for more than one), tree, hidden and widths; of the others a hint.
    """
    rows: list[dict[str, Any]] = []
    for row in PROVIDERS.values():
        devices = [
            Device.parse(f"{row.name}:{word}")
            for word in dict(zip(row.words.values(), row.words, strict=True)).values()
        ]
        rows += (
            _of_installed(row, devices) if _is_installed(row) else [_missing(device, row.hint) for device in devices]
        )
    return rows


def _is_installed(row: Provider) -> bool:
    """Whether its package is here, without loading a plugin."""
    if row.plugin is not None and util.find_spec(row.plugin) is not None:
        return True
    if row.runtime != "onnx" or util.find_spec("onnxruntime") is None:
        return False
    from edgespec.backends.onnx.providers import import_onnxruntime

    try:
        return row.ep_name in import_onnxruntime().get_available_providers()
    except EdgeSpecError:  # a broken installation has nothing to offer; the CPU's row says why
        return row.name == "cpu"


def _missing(device: Device, hint: str) -> dict[str, Any]:
    return {"name": device.name, "kind": device.kind, "usable": False, "hint": hint}


def _of_installed(row: Provider, devices: list[Device]) -> list[dict[str, Any]]:
    """Ask a child, so that a library that crashes or hangs costs one line."""
    names = [device.name for device in devices]
    command = [sys.executable, "-m", "edgespec.backends.onnx.inventory", *names]
    try:
        child = subprocess.run(
            command,
            env=config.child_environment(PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry)),
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_missing(device, f"{row.package} did not answer within {CHILD_TIMEOUT_S} s") for device in devices]
    lines = child.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        if child.returncode == 0:
            return [
                {**_missing(device, ""), **found} for device, found in zip(devices, json.loads(lines[-1]), strict=True)
            ]
    cause = describe_exit(f"trying {row.package}", child.returncode)
    return [_missing(device, cause) for device in devices]


# --- in the child -----------------------------------------------------------------------------------------------------


def _try(device: Device) -> dict[str, Any]:
    """What `device` can do; `usable` False and a hint where it cannot be used."""
    if device.runtime == "llamacpp":
        return _try_llamacpp(device)
    from edgespec.backends.onnx.providers import locate

    try:
        located = locate(device)
        takes = {what: _takes(device, what) for what in ("fixed", "open", "hidden", "tree")}
    except EdgeSpecError as error:
        return {"usable": False, "hint": str(error)}
    several = not takes["tree"] or _attends_right(device)
    if not takes["fixed"]:
        return {"usable": False, "hint": f"{device.row.package} takes no operator of a simple graph here"}
    return {
        "usable": True,
        "emulated": located.is_emulated,
        "dynamic_shapes": takes["open"],
        "several_rows": several,
        "tree": (takes["tree"] and several) or not takes["open"],  # with fixed shapes the host makes positions and mask
        "hidden": takes["hidden"],
        "widths": WIDTHS_OPEN if takes["open"] else WIDTHS_FIXED,
    }


def _options(device: Device) -> dict[str, str]:
    """Of its provider: the runtime's own kernels, as ours would be compiled into the cache by a mere look."""
    return {"kernels": "onnxruntime"} if device.provider == "cpu" else {}


def _takes(device: Device, what: str) -> bool:
    """Whether the device runs every node of a trial graph."""
    from edgespec.backends.onnx.devices import create_runtime, placement
    from edgespec.backends.onnx.trial_graphs import TRIALS

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{what}.onnx"
        path.write_bytes(TRIALS[what]())
        return placement(create_runtime(path, device, 1, options=_options(device)), device).n_fallen == 0


def _attends_right(device: Device) -> bool:
    """Whether several rows of one call are those of single calls, in the attention operator by itself."""
    from edgespec.backends.onnx.devices import create_runtime
    from edgespec.backends.onnx.trial_graphs import TRIALS, attention_rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.onnx"
        path.write_bytes(TRIALS["tree"]())
        runtime = create_runtime(path, device, 1, options=_options(device))
        try:
            many, single = attention_rows(runtime, [TRIAL_ROWS]), attention_rows(runtime, [1] * TRIAL_ROWS)
        except Exception:  # a runtime raises anything
            return False
    return bool(np.abs(many - single).max() <= HALF_PRECISION)


def _try_llamacpp(device: Device) -> dict[str, Any]:
    """llama.cpp runs GGUF files on the CPU, and on what else it was built for."""
    from edgespec.backends.llamacpp.settings import find_devices

    try:
        find_devices(device)
    except EdgeSpecError as error:
        return {"usable": False, "hint": str(error)}
    found = {"dynamic_shapes": True, "several_rows": True, "tree": False, "hidden": False, "widths": WIDTHS_OPEN}
    return {"usable": True, "emulated": False, **found}


if __name__ == "__main__":
    print(json.dumps([_try(Device.parse(name)) for name in sys.argv[1:]]))

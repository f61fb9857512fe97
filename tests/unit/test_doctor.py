"""`edgespec doctor`: reports what is there, names what is missing, and never fails because of it."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
import types
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec import __version__
from edgespec.backends.onnx import inventory
from edgespec.backends.onnx.inventory import list_devices
from edgespec.cli import doctor, main
from edgespec.config import config_dir
from edgespec.cpu import CpuTopology, read_topology
from edgespec.devices import Device
from edgespec.kernels import obstacle

ROOT = Path(__file__).resolve().parents[2]


tried_once = cache(list_devices)  # a child process for each provider


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_devices", tried_once)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EDGESPEC_OFFLINE", raising=False)


def test_json_has_the_facts(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    topology = read_topology()
    assert facts["edgespec"] == __version__
    assert facts["packages"]["numpy"] == metadata.version("numpy")
    assert "CPUExecutionProvider" in facts["providers"]
    assert facts["cpu"]["threads"] == topology.threads
    assert facts["cpu"]["allowed"] == list(topology.allowed)
    assert facts["memory"]["total_bytes"] > 0
    assert facts["cache"]["folder"] == str(tmp_path / "cache")
    assert {model["name"]: model["pulled"] for model in facts["models"]}["smollm2-135m"] is False


def test_text_names_versions_and_extras() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    for word in (__version__, "onnxruntime", "CPUExecutionProvider", "threads", "hub", "smollm2-135m"):
        assert word in result.stdout


def test_nothing_is_created(tmp_path: Path) -> None:
    obstacle.cache_clear()  # as in a new process: whether kernels can be compiled has to be tried
    assert inventory._try(Device.parse("cpu"))["usable"]
    CliRunner().invoke(main, ["doctor"])
    assert not (tmp_path / "cache").exists()


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "onnxruntime" else real(name))
    facts = doctor.examine()
    assert facts["extras"]["onnx"]["install"] == "pip install 'edgespec[onnx]'"
    assert facts["providers"] == []
    assert any("pip install 'edgespec[onnx]'" in problem for problem in facts["problems"])
    assert "pip install 'edgespec[onnx]'" in "\n".join(doctor._lines(facts))


def test_a_package_that_breaks_on_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("onnxruntime")  # has no get_available_providers
    monkeypatch.setitem(sys.modules, "onnxruntime", broken)
    facts = doctor.examine()
    assert any("onnxruntime cannot be read" in problem for problem in facts["problems"])
    assert doctor._lines(facts)


def test_a_broken_manifest_of_the_users_own_is_a_problem() -> None:
    folder = config_dir() / "models"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("schema_version = 1\nnam = 'x'", encoding="utf-8")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "the key 'name' is missing" in result.stdout


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("EDGESPEC_HOME", str(file / "cache"))
    assert any("set EDGESPEC_HOME" in problem for problem in doctor.examine()["problems"])


@pytest.mark.parametrize(("machine", "word"), [("x86_64", "avx2"), ("aarch64", "dotprod")])
def test_an_old_cpu_is_a_problem(monkeypatch: pytest.MonkeyPatch, machine: str, word: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    slow = CpuTopology((0, 1), (0,), {}, frozenset({"f16c"}), "old", quota=0.5)
    facts = doctor.examine(slow)
    assert any(word in problem for problem in facts["problems"])
    assert facts["cpu"]["threads"] == 1
    assert any("quota 0.5 cores; threads 1" in line for line in doctor._lines(facts))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 6], "0-3,6"), ([0, 2, 4], "0,2,4"), ([1, 2, 5, 6], "1-2,5-6")],
)
def test_runs_of_cores_are_shortened(numbers: list[int], text: str) -> None:
    assert doctor._join(numbers) == text


def test_extras_are_those_of_the_package() -> None:
    """doctor's table of extras names packages that the package's own metadata brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, (_purpose, brings) in doctor.EXTRAS.items():
        declared = {requirement.split(">=")[0] for requirement in project["optional-dependencies"][extra]}
        assert set(brings) == declared, extra
    assert set(project["optional-dependencies"]) - {"dev"} == set(doctor.EXTRAS)


def test_devices_are_tried_out() -> None:
    devices = {row["name"]: row for row in doctor.examine()["devices"]}
    able = {"usable": True, "emulated": False, "dynamic_shapes": True, "several_rows": True, "tree": True}
    able |= {"hidden": True, "widths": "any"}
    assert devices["cpu"].items() >= able.items()
    absent = devices["directml"]
    assert (absent["usable"], absent["hint"]) == (
        False,
        "pip install onnxruntime-directml (it needs Windows with a DirectX 12 GPU)",
    )
    assert {*devices} >= {"qnn:htp", "openvino:npu", "webgpu", "coreml:npu", "cuda", "llamacpp:cpu"}
    lines = doctor._device_lines([*devices.values()])
    assert "  cpu           any number of rows, trees, hidden outputs" in lines
    assert any(line.startswith("  coreml:npu, coreml:gpu, coreml:cpu: it needs macOS") for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is None, reason="needs edgespec[qnn]")
def test_the_npu_is_said_to_be_emulated_and_to_want_fixed_shapes() -> None:
    row = next(row for row in doctor.examine()["devices"] if row["name"] == "qnn:htp")
    assert (row["usable"], row["emulated"], row["dynamic_shapes"], row["tree"], row["hidden"]) == (
        True, True, False, True, True,
    )  # fmt: skip
    (line,) = [line for line in doctor._device_lines([row]) if "qnn:htp" in line]
    assert "emulated, not the real hardware; fixed numbers of rows" in line


def test_a_library_that_crashes_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A vendor's library that ends the process used to end `doctor` with it."""
    package = tmp_path / "onnxruntime_ep_webgpu"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.kill(os.getpid(), 11)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = [row for row in list_devices() if row["name"] == "webgpu"]
    assert row["usable"] is False
    assert row["hint"].startswith("trying onnxruntime-ep-webgpu was killed by signal 11 (SIGSEGV)")

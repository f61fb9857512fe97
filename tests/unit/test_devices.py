"""Names of devices: parsing alone, without any runtime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edgespec.devices import PROVIDERS, Device, device_names, read_device_options
from edgespec.errors import ConfigError
from edgespec.options import EngineOptions

NAMES = {
    "npu": ("npu", "", "npu", "onnx"),
    "npu:0": ("npu:0", "", "npu", "onnx"),
    "gpu": ("gpu", "", "gpu", "onnx"),
    "cpu": ("cpu", "cpu", "cpu", "onnx"),
    "qnn": ("qnn:htp", "qnn", "npu", "onnx"),
    "qnn:htp": ("qnn:htp", "qnn", "npu", "onnx"),
    " QNN:NPU ": ("qnn:htp", "qnn", "npu", "onnx"),
    "qnn:gpu": ("qnn:gpu", "qnn", "gpu", "onnx"),
    "webgpu": ("webgpu", "webgpu", "gpu", "onnx"),
    "webgpu:0": ("webgpu:0", "webgpu", "gpu", "onnx"),
    "openvino": ("openvino:cpu", "openvino", "cpu", "onnx"),
    "openvino:npu": ("openvino:npu", "openvino", "npu", "onnx"),
    "openvino:gpu:1": ("openvino:gpu:1", "openvino", "gpu", "onnx"),
    "coreml": ("coreml:npu", "coreml", "npu", "onnx"),
    "cuda:0": ("cuda:0", "cuda", "gpu", "onnx"),
    "directml": ("directml", "directml", "gpu", "onnx"),
    "xnnpack": ("xnnpack", "xnnpack", "cpu", "onnx"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx", "gpu", "onnx"),
    "ggml": ("ggml:cpu", "ggml", "cpu", "onnx"),
    "llamacpp": ("llamacpp:cpu", "llamacpp", "cpu", "llamacpp"),
    "llamacpp:gpu:1": ("llamacpp:gpu:1", "llamacpp", "gpu", "llamacpp"),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_means_one_device(text: str) -> None:
    device = Device.parse(text)
    assert (device.name, device.provider, device.kind, device.runtime) == NAMES[text]
    assert Device.parse(device.name) == device


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("npux", 'did you mean "npu"'),
        ("magic", "use one of npu[:N], gpu[:N], cpu, qnn[:htp|npu|gpu], cuda[:N]"),
        ("", "use one of npu[:N]"),
        ("cpu:0", "cpu has no numbered devices, write cpu"),
        ("qnn:1", "qnn has no numbered devices, write qnn[:htp|npu|gpu]"),
        ("qnn:tpu", "qnn has no 'tpu', write qnn[:htp|npu|gpu]"),
        ("cuda:x", "cuda has no 'x', write cuda[:N]"),
        ("gpu:one", "'one' is no number of a device, write gpu[:N]"),
        ("webgpu:1:2", "'1:2' is no number of a device"),
        ("cuda:-1", "cuda has no '-1'"),
        (3, "device 3 is no text"),
    ],
)
def test_other_names_are_refused_with_what_is_known(text: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Device.parse(text)
    assert said in str(caught.value)


def test_every_row_can_be_named() -> None:
    for row in PROVIDERS.values():
        for word, kind in row.words.items():
            device = Device.parse(f"{row.name}:{word}")
            assert (device.provider, device.kind, device.runtime) == (row.name, kind, row.runtime)
    assert len(device_names()) == len(PROVIDERS) + 2


def test_a_generic_name_goes_through_the_table_in_its_order() -> None:
    assert [device.name for device in Device.parse("npu").candidates()] == ["qnn:htp", "coreml:npu", "openvino:npu"]
    second = [device.name for device in Device.parse("gpu:1").candidates()]
    assert second == ["cuda:1", "tensorrt-rtx:1", "directml:1", "openvino:gpu:1", "webgpu:1"]  # none without numbers
    assert "ggml:gpu" not in [device.name for device in Device.parse("gpu").candidates()]  # lists one that is not there
    assert [device.name for device in Device.parse("gpu").candidates("llamacpp")] == ["llamacpp:gpu"]
    assert Device.parse("cuda").candidates() == (Device.parse("cuda"),)


def test_options_are_a_mapping_or_texts() -> None:
    wanted = {"a": "1", "path": "x=y", "empty": ""}
    assert read_device_options(["a=1", "path=x=y", "empty="]) == wanted
    assert read_device_options({"a": 1, "path": "x=y", "empty": ""}) == wanted
    assert read_device_options(()) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["fast"], "'fast' is not KEY=VALUE"),
        (["=1"], "'=1' is not KEY=VALUE"),
        (["a=1", "a=2"], "'a' is given twice, as '1' and '2'"),
        ([3], "3 is not KEY=VALUE"),
        ("a=1", "give a mapping, or a list of KEY=VALUE"),
        ({"a": None}, "'a'=None is no option"),
    ],
)
def test_broken_options_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(draft_device_options=given)
    assert said in str(caught.value)
    assert str(caught.value).startswith("draft_device_options")


def test_engine_options_refuse_unknown_devices_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="device 'magic' is unknown"):
        EngineOptions(draft_device="magic")
    options = EngineOptions(
        device="npu", device_options={"a": 1}, draft_device="gpu", strict_device=True, draft_n_ctx=9
    )
    assert options.target_place["device_options"] == {"a": "1"}
    assert options.draft_place == {
        "device": "gpu",
        "device_options": (),
        "strict_device": True,
        "n_ctx": 9,
        "threads": None,
    }


def test_every_provider_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")
    table, _, history = page.partition("## What has run where")
    for row in PROVIDERS.values():
        assert re.search(rf"^\| .*`{row.name}[`\[:]", table, re.MULTILINE), row.name
        assert row.install in table, row.name
        assert row.name in history, row.name

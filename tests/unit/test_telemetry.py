"""The power state from made-up sysfs trees, and the limits that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.telemetry import PowerMonitor, PowerState, read_power


def tree(root: Path, **files: str) -> Path:
    """Files by path below sys/, "__" for a slash."""
    for name, text in files.items():
        path = root / "sys" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def battery(root: Path, level: str, status: str = "Discharging") -> Path:
    return tree(
        root,
        class__power_supply__BAT0__type="Battery",
        class__power_supply__BAT0__capacity=level,
        class__power_supply__BAT0__status=status,
    )


def test_nothing_known_sets_no_limit(tmp_path: Path) -> None:
    state = read_power(tmp_path)
    assert state == PowerState()
    assert (state.name, state.limit()) == ("mains", None)


@pytest.mark.parametrize(
    ("level", "status", "limit", "name"),
    [("12", "Discharging", 2, "battery"), ("12", "Charging", None, "mains"), ("80", "Discharging", None, "battery")],
)
def test_a_low_battery_shortens_drafts_while_it_is_used(
    tmp_path: Path, level: str, status: str, limit: int | None, name: str
) -> None:
    state = read_power(battery(tmp_path, level, status))
    found = state.limit()
    assert (None if found is None else found[0], state.name) == (limit, name)
    if found:
        assert "12 %" in found[1]


def test_the_battery_of_a_mouse_is_not_the_system_s(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        class__power_supply__AA__type="Battery",
        class__power_supply__AA__capacity="3",
        class__power_supply__AA__status="Discharging",
        class__power_supply__AA__scope="Device",
    )
    assert read_power(battery(root, "90")).battery == 90.0


def test_saver_and_heat(tmp_path: Path) -> None:
    tree(tmp_path, firmware__acpi__platform_profile="low-power")
    assert read_power(tmp_path).limit() == (1, "at most 1 drafted token: the power saver is on")
    zone = "class__thermal__thermal_zone1__"
    tree(
        tmp_path,
        **{
            f"{zone}temp": "84000",
            f"{zone}trip_point_0_type": "passive",
            f"{zone}trip_point_0_temp": "85000",
            f"{zone}trip_point_1_type": "critical",
            f"{zone}trip_point_1_temp": "105000",
            "class__thermal__thermal_zone0__temp": "88000",
        },
    )
    assert read_power(tmp_path).name == "saver"
    tree(tmp_path, **{f"{zone}temp": "86000"})
    state = read_power(tmp_path)
    limit = state.limit()
    assert limit is not None
    assert (state.name, limit[0]) == ("hot", 0)
    assert "86 degrees, its limit is 85" in limit[1]


def test_garbage_is_no_reading(tmp_path: Path) -> None:
    battery(tmp_path, "full")
    tree(tmp_path, class__thermal__thermal_zone0__temp="hot", class__thermal__thermal_zone1__temp="-274000")
    assert read_power(tmp_path) == PowerState()


def test_a_monitor_reads_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("edgespec.telemetry.time.monotonic", lambda: now[0])
    monitor = PowerMonitor(battery(tmp_path, "10"))
    assert monitor.limit() is not None
    battery(tmp_path, "90")
    assert monitor.limit() is not None
    now[0] += 11
    assert monitor.limit() is None

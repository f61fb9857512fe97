"""The power state of this machine: battery, heat, saver mode; and the limit on drafting that follows from it.

Reads sysfs (from a root that tests may replace), and psutil where sysfs has no battery. What a system does not tell is
None. Knows no controller: a limit is a number and a reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PowerMonitor", "PowerState", "read_power"]

LOW_BATTERY = 20.0  # per cent
LOW_BATTERY_K, SAVER_K = 2, 1  # most drafted tokens: rejected rows are work for nothing
DEFAULT_HOT_C = 95.0  # where a zone names no passive trip point, the temperature at which the system slows itself down
KEEP_S = 10.0  # how long a reading holds


@dataclass(frozen=True)
class PowerState:
    """battery: per cent. is_discharging, is_saver: None where unknown. heat_c, hot_c: of the zone nearest its limit."""

    battery: float | None = None
    is_discharging: bool | None = None
    is_saver: bool | None = None
    heat_c: float | None = None
    hot_c: float | None = None

    @property
    def name(self) -> str:
        """hot | saver | battery | mains: measured costs hold for one of these."""
        if self.is_hot:
            return "hot"
        if self.is_saver:
            return "saver"
        return "battery" if self.is_discharging else "mains"

    @property
    def is_hot(self) -> bool:
        return self.heat_c is not None and self.hot_c is not None and self.heat_c >= self.hot_c

    def limit(self) -> tuple[int, str] | None:
        """Most tokens to draft a round, and why; None for no limit."""
        if self.is_hot:
            return 0, f"no drafting: the processor is at {self.heat_c:.0f} degrees, its limit is {self.hot_c:.0f}"
        if self.is_saver:
            return SAVER_K, f"at most {SAVER_K} drafted token: the power saver is on"
        if self.is_discharging and self.battery is not None and self.battery < LOW_BATTERY:
            return LOW_BATTERY_K, f"at most {LOW_BATTERY_K} drafted tokens: the battery is at {self.battery:.0f} %"
        return None


class PowerMonitor:
    """Readings that are at most KEEP_S old."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._state: PowerState | None = None
        self._read_s = 0.0

    @property
    def state(self) -> PowerState:
        now = time.monotonic()
        if self._state is None or now - self._read_s > KEEP_S:
            self._state, self._read_s = read_power(self.root), now
        return self._state

    def limit(self) -> tuple[int, str] | None:
        """As `PowerState.limit`, now."""
        return self.state.limit()


def read_power(root: Path = Path("/")) -> PowerState:
    """The state under `root` (its sys/); never raises."""
    battery, is_discharging = _battery(root / "sys/class/power_supply")
    if battery is None and root == Path("/"):
        battery, is_discharging = _psutil_battery()
    heat_c, hot_c = _heat(root / "sys/class/thermal")
    profile = _read(root / "sys/firmware/acpi/platform_profile")
    return PowerState(battery, is_discharging, None if profile is None else profile == "low-power", heat_c, hot_c)


def _battery(folder: Path) -> tuple[float | None, bool | None]:
    """(per cent, whether it is being used up) of the first battery that feeds the system."""
    for supply in _folders(folder, "*"):
        if _read(supply / "type") != "Battery" or _read(supply / "scope") == "Device":  # a mouse has one too
            continue
        level = _number(supply / "capacity")
        if level is not None:
            return level, _read(supply / "status") == "Discharging"
    return None, None


def _psutil_battery() -> tuple[float | None, bool | None]:
    try:
        import psutil

        found = psutil.sensors_battery()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None, None
    return (None, None) if found is None else (float(found.percent), found.power_plugged is False)


def _heat(folder: Path) -> tuple[float | None, float | None]:
    """(temperature, limit) in degrees Celsius of the zone that is nearest its limit."""
    best: tuple[float, float] | None = None
    for zone in _folders(folder, "thermal_zone*"):
        milli = _number(zone / "temp")
        if milli is None or milli <= 0:
            continue
        trips = [
            _number(path.with_name(path.name.removesuffix("type") + "temp"))
            for path in sorted(zone.glob("trip_point_*_type"))
            if _read(path) == "passive"
        ]
        limits = [value / 1000 for value in trips if value is not None and value > 0]
        here = milli / 1000, min(limits, default=DEFAULT_HOT_C)
        if best is None or here[0] - here[1] > best[0] - best[1]:
            best = here
    return (None, None) if best is None else best


def _folders(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _number(path: Path) -> float | None:
    text = _read(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None

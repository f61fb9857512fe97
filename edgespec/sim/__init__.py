"""What a schedule would take on devices that are not here: arithmetic and a simulation by events.

`article` has the formulas of the literature beside the exact expectation, `scenario` the figures of a pair of devices,
`schedules` the rounds, serial and overlapped, `plots` the pictures (matplotlib, on use).
"""

from __future__ import annotations

from edgespec.sim.article import WorkedExample, speedup_table, worked_example
from edgespec.sim.scenario import Scenario
from edgespec.sim.schedules import SCHEDULES, Prediction, Simulation, predict, simulate

__all__ = [
    "SCHEDULES",
    "Prediction",
    "Scenario",
    "Simulation",
    "WorkedExample",
    "predict",
    "simulate",
    "speedup_table",
    "worked_example",
]

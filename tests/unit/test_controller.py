"""Controllers: what they ask for after which rounds."""

from __future__ import annotations

import pytest

from edgespec.engine.controller import Controller, create_controller
from edgespec.errors import ConfigError
from edgespec.types import FILLER, RoundRecord


def feed(controller: Controller, accepted: int, drafted: int, rounds: int) -> int:
    for index in range(rounds):
        controller.update(
            RoundRecord(index, "model", drafted, drafted, accepted, accepted + 1, 0, drafted + 1, "bonus")
        )
    return controller.k


def test_multiplicative_grows_from_a_short_length() -> None:
    """Truncating after every factor of 1.1 kept a length under 10 from ever growing."""
    controller = create_controller("multiplicative", 16)
    assert feed(controller, 0, 4, 100) == 1
    assert feed(controller, 4, 4, 10) > 1
    assert feed(controller, 4, 4, 100) == 16


def test_multiplicative_holds_inside_its_margin() -> None:
    assert feed(create_controller("multiplicative", 5), 7, 10, 50) == 5


def test_window_waits_for_ten_samples_then_steps_by_one_between_one_and_ten() -> None:
    controller = create_controller("window", 10)
    assert feed(controller, 0, 4, 9) == 10
    assert feed(controller, 0, 4, 1) == 9
    assert feed(controller, 0, 4, 50) == 1
    assert feed(controller, 4, 4, 300) == 10


@pytest.mark.parametrize("name", ["multiplicative", "window"])
def test_adaptive_lengths_stay_at_or_over_the_minimum(name: str) -> None:
    """Shortened below the least draft length, nothing was drafted any more, so nothing was ever learnt again."""
    assert feed(create_controller(name, 4, min_k=3), 0, 4, 300) == 3


def test_fillers_teach_nothing() -> None:
    controller = create_controller("window", 6)
    for index in range(50):
        controller.update(RoundRecord(index, FILLER, 6, 1, 0, 1, 0, 2, "correction"))
    assert controller.k == 6


@pytest.mark.parametrize("name", ["fixed", "multiplicative", "window"])
def test_no_controller_drafts_more_than_was_asked_for(name: str) -> None:
    """Adaptive lengths started at --draft-max and grew beyond it."""
    controller = create_controller(name, 2)
    assert feed(controller, 4, 4, 300) == 2
    assert controller.max_k == 2


def test_fixed_never_moves_and_plain_rounds_teach_nothing() -> None:
    assert feed(create_controller("fixed", 3), 0, 4, 50) == 3
    for name in ("multiplicative", "window"):
        controller = create_controller(name, 3)
        controller.update(RoundRecord(0, "none", 0, 0, 0, 1, 0, 1, "bonus"))
        assert controller.k == 3


def test_unknown_controllers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'magic'.*fixed, multiplicative, window, adaptive"):
        create_controller("magic", 3)

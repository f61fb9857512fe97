"""Fixtures shared by all tests: the real model, pulled once into the user's cache by `make test`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes says something of the machine alone
settings.load_profile("untimed")
REAL_MODEL = "smollm2-135m"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the contract suite runs; a key of contract_cases.ON_DEVICE")


@pytest.fixture(scope="session")
def real_bundle() -> Path:
    """Bundle folder of the default target; `edgespec pull smollm2-135m` makes it."""
    from edgespec.pairs import ensure

    return Path(ensure(REAL_MODEL))


@pytest.fixture(scope="session")
def real_draft() -> Path:
    """Bundle folder of a draft that is not the target, made from the same weights."""
    from edgespec.pairs import ensure

    return Path(ensure(f"{REAL_MODEL}:pruned"))


@pytest.fixture(scope="session")
def real_gguf(real_bundle: Path) -> Path:
    """The GGUF file that the default target was made from."""
    from edgespec.pairs import source_path

    return Path(source_path(REAL_MODEL))


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """Environment for child processes that import edgespec from this checkout."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "export"), str(root / "bench"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}

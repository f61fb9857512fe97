"""The `case` fixture: every test that takes it runs once for each backend and layout that `--device` has."""

from __future__ import annotations

import pytest
from contract_cases import BUILDERS, ON_DEVICE, Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", ON_DEVICE[metafunc.config.getoption("--device")], indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    device = request.config.getoption("--device")
    options = {} if device == "cpu" else {"device": device}
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param), **options)

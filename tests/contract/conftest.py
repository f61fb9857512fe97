"""The `case` fixture: every test that takes it runs once for each backend and layout."""

from __future__ import annotations

import pytest
from contract_cases import BUILDERS, Case


@pytest.fixture(scope="session", params=list(BUILDERS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))

"""The `case` fixture: every test that takes it runs once for each backend and layout that `--device` has."""

from __future__ import annotations

import pytest
from contract_cases import BUILDERS, ON_DEVICE, Case

MARKS = {"static-qnn": pytest.mark.npu}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        names = ON_DEVICE[metafunc.config.getoption("--device")]
        params = [pytest.param(name, marks=MARKS[name]) if name in MARKS else name for name in names]
        metafunc.parametrize("case", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param.startswith("llamacpp"):
        pytest.importorskip("llama_cpp", reason="llama.cpp is missing: pip install 'edgespec[llamacpp]'")
    device = request.config.getoption("--device")
    options = {} if device == "cpu" else {"device": device}
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param), **options)

"""What tests on the NPU's emulator share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path

import pytest

SKIP = "needs onnxruntime-qnn, whose library emulates the NPU: pip install 'edgespec[qnn]'"


def require_qnn() -> None:
    """Skip the test where there is no emulator."""
    if util.find_spec("onnxruntime_qnn") is None:
        pytest.skip(SKIP)


@contextmanager
def own_cache(home: Path) -> Iterator[None]:
    """The cache of compiled graphs in `home` instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(home))
        yield

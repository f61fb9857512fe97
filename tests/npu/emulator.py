"""What tests of graphs of fixed shapes and of the NPU's emulator share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.onnx.static import StaticSession

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


def blind_logits(session: StaticSession, mask: float) -> np.ndarray:
    """Logits of four rows that see nothing."""
    session.keep(0)
    session.feeds([5, 9, 14, 5])
    binding = session._binding(4)
    binding.inputs["mask"][...] = mask
    binding.run()
    return binding.outputs["logits"].copy()

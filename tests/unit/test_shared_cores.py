"""What a step of target and draft allocates and copies (CASES 47; `test_llm_folders` has their threads)."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edgespec import LLM, SamplingParams
from edgespec.backends.onnx import kv_memory
from edgespec.testing.onnx_models import write_bundle
from edgespec.testing.tiny import TinySpec

PROMPT = [(7 * i + i // 5) % 60 for i in range(700)]  # a cache that is large beside everything else of a step
TARGET = TinySpec(eos_ids=(), n_ctx=1024, n_kv_heads=4)
DRAFT = TinySpec(eos_ids=(), n_ctx=1024, n_kv_heads=4, n_layers=1, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [write_bundle(base / name, spec, bits=4) for name, spec in (("target", TARGET), ("draft", DRAFT))]


def graphs(llm: LLM) -> list[Any]:
    """What runs the target and the draft, after a request."""
    slot: Any = llm.slots.idle[0]
    return [slot.session._graph, slot.drafters[0].session._graph]


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_no_cache_is_copied_or_made_again_at_a_step(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Rewinds after rejected tokens included: the draft is hardly ever right."""
    made: list[int] = []
    monkeypatch.setattr(kv_memory, "aligned_zeros", _counting(kv_memory.aligned_zeros, made))
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=60) for seed in (1, 2)]
    with LLM(folders[0], draft_model=folders[1], schedule=schedule, threads=1) as llm:
        llm.generate(PROMPT, params[0])
        used = graphs(llm)
        before = [addresses(graph) for graph in used]
        size = sum(array.nbytes for graph in used for array in graph.cache)
        made.clear()
        tracemalloc.start()
        base = tracemalloc.get_traced_memory()[0]
        stats = llm.generate(PROMPT, params[1])[0].outputs[0].stats
        peak = tracemalloc.get_traced_memory()[1] - base
        tracemalloc.stop()
        assert stats.drafted > stats.accepted + 20
        assert not made
        assert graphs(llm) == used
        assert [addresses(graph) for graph in used] == before
        assert peak < size / 4, "a copy of the target's or the draft's cache would show"
        for graph in used:
            assert graph.bindings
            for binding in graph.bindings.values():
                outputs = {value.data_ptr() for value in binding.io.get_outputs()}
                assert set(addresses(graph)) <= outputs, "the present is not where the past is"


def addresses(graph: Any) -> list[int]:
    return [array.ctypes.data for array in graph.cache]


def _counting(make: Any, made: list[int]) -> Any:
    def counted(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape[2] if len(shape) > 2 else 0)
        return make(shape, dtype)

    return counted

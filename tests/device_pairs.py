"""Pairs of tiny models with one of the two on a device: what every device has to show.

The target's text must not depend on the draft or on where it runs; how often the draft is right shows that its device
computes the right thing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec import LLM, SamplingParams
from edgespec.outputs import CompletionOutput
from edgespec.testing.onnx_models import write_bundle, write_optimum
from edgespec.testing.tiny import TinySpec
from edgespec.testing.tokenizer import write_tokenizer

SPEC = TinySpec(eos_ids=())
OTHER = TinySpec(eos_ids=(), n_layers=1, seed=1)
PROMPT = [5, 9, 5, 9, 11, 5, 9]
TEMPERATURES = (0.0, 0.8)


def write_models(base: Path) -> dict[str, Path]:
    """target: a bundle. same: the target's weights in plain operators. other: weights of its own."""
    models = {
        "target": write_bundle(base / "target", SPEC),
        "same": write_optimum(base / "same", SPEC),
        "other": write_bundle(base / "other", OTHER),
        "other-plain": write_optimum(base / "other-plain", OTHER),
    }
    for name in ("same", "other-plain"):
        write_tokenizer(models[name], SPEC.n_vocab)
    return models


def outputs(target: Path, n_tokens: int = 24, **options: Any) -> list[CompletionOutput]:
    """One output a temperature, of which the counters add up."""
    found = []
    with LLM(target, threads=1, **options) as llm:
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=n_tokens)
            output = llm.generate(PROMPT, params)[0].outputs[0]
            stats = output.stats
            accepted = sum(source.accepted for source in stats.sources.values())  # fillers included
            assert n_tokens == stats.emitted == len(output.token_ids) == accepted + stats.rounds - stats.cut
            found.append(output)
    return found


def check_draft(models: dict[str, Path], draft: str, device: str, **options: Any) -> list[CompletionOutput]:
    """The target on the CPU says the same with the draft on `device` as without any; returns the outputs with it."""
    plain = outputs(models["target"], draft="none")
    drafted = outputs(models["target"], draft_model=models[draft], draft_device=device, **options)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert all(output.stats.drafted >= 18 for output in drafted)
    return drafted


def acceptance(found: list[CompletionOutput]) -> list[float]:
    return [output.stats.acceptance_rate or 0.0 for output in found]

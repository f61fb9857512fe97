"""One seed, one text: plain, serial and overlapped, every k, every kind of draft, at T = 0.8.

On table models, where every draft and schedule is cheap, and on small ONNX bundles as the exporter writes them, through
the production API with real threads. Drafts are never the target.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.contract_cases import exported
from draft_driver import HEADS, make_world, plain
from edgespec_export.drafts import export_draft
from export.draft_reference import tensors, write_zoo
from loop_driver import draft_model
from table_world import write_table_of

from edgespec import LLM, SamplingParams
from edgespec.bundle import Bundle
from edgespec.engine.controller import CONTROLLERS
from edgespec.options import BUNDLED_DRAFTS, IN_FLIGHT_DRAFTS
from edgespec.testing import LatencyModel, TableModel

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
PROMPT = [5, 8, 8, 13, 5, 8, 8]
SCHEDULES = ("serial", "overlapped")


@pytest.fixture(autouse=True)
def no_thread_outlives_a_request() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-target")]


@pytest.mark.parametrize("draft", ["ngram", "model", "ngram,model"])
def test_table_models(draft: str) -> None:
    target = TableModel(16, seed=3)
    expected = LLM(target, draft="none").generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    prepared = 0
    for distance in ("noisy", "wrong") if "model" in draft else ("",):
        given = {"draft_model": LatencyModel(draft_model(distance, target), 0.0001)} if distance else {}
        for k in (1, 2, 3, 5, 8):
            for schedule in SCHEDULES:
                llm = LLM(target, draft=draft, num_speculative_tokens=k, schedule=schedule, **given)
                for _ in range(2):  # the second request finds the caches of the first
                    stats = (output := llm.generate(PROMPT, PARAMS)[0].outputs[0]).stats
                    assert output.token_ids == expected, (distance, k, schedule)
                prepared += sum(r.ahead for r in stats.records)
                assert (stats.overlap() is None) or schedule == "overlapped"
    assert (prepared > 0) == ("model" in draft)


@pytest.mark.parametrize("controller", sorted(CONTROLLERS))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_controllers_change_k_and_not_the_text(schedule: str, controller: str) -> None:
    target = TableModel(16, seed=3)
    slow, draft = LatencyModel(target, 0.0005), LatencyModel(draft_model("noisy", target), 0.0001)
    options: dict[str, Any] = {"controller": controller, "num_speculative_tokens": 6, "schedule": schedule}
    expected = LLM(target, draft="none").generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    llm = LLM(slow, draft="ngram,model", draft_model=draft, **options)
    for _ in range(2):
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("kind", HEADS)
def test_heads_on_table_models(kind: str) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40)
    for k in (1, 2, 5):
        assert make_world(kind).run([1, 2], params, k=k).tokens == plain([1, 2], params)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random target and a trained-like draft of each kind for it."""
    folder = tmp_path_factory.mktemp("one-text")
    found = {"target": exported(folder / "target")}
    tokenizer_hash = Bundle.open(found["target"]).info.tokenizer_hash
    for draft, kind in BUNDLED_DRAFTS.items():
        changes: dict[str, Any] = {"exit_layer": 2} if kind == "exit" else {}
        write_zoo(
            folder / f"{kind}-zoo", kind, tensors(kind), np.arange(0, 264, 2), tokenizer_hash=tokenizer_hash, **changes
        )
        found[draft] = export_draft(folder / f"{kind}-zoo", found["target"], folder / kind, bits=32)
    return found


def test_a_table_drafts_the_same_text(bundles: dict[str, Path], tmp_path: Path) -> None:
    """One that knows the text by heart, one that knows another, in front of other drafts and by itself."""
    with LLM(bundles["target"], draft="none", threads=1) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        prompt, n_vocab = llm.encode(PROMPT), llm.target.info.n_vocab
    accepted = {}
    for name, text in {"knows": [*prompt, *expected], "errs": [*prompt, *reversed(expected)]}.items():
        write_table_of(tmp_path / name, text, n_vocab)
        for draft, k, schedule in (("table", 1, "serial"), ("table", 4, "serial"), ("ngram,table", 3, "overlapped")):
            options = {"draft": draft, "draft_model": tmp_path / name, "num_speculative_tokens": k}
            with LLM(bundles["target"], threads=1, schedule=schedule, **options) as llm:
                output = llm.generate(PROMPT, PARAMS)[0].outputs[0]
                assert output.token_ids == expected, (name, draft, k)
                accepted[name, k] = output.stats.accepted
    assert accepted["knows", 4] > accepted["errs", 4]


def test_onnx_bundles_with_every_kind_of_draft(bundles: dict[str, Path]) -> None:
    target = bundles["target"]
    with LLM(target, draft="none", threads=1) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    kinds = [*BUNDLED_DRAFTS, "ngram", "model"]
    for kind in kinds:
        given = {"draft_model": bundles["tinydraft" if kind == "model" else kind]} if kind != "ngram" else {}
        if kind == "model":
            given = {"draft_model": target}  # another session of the same weights, as the noise of a run makes no draft
        for schedule in SCHEDULES if kind not in IN_FLIGHT_DRAFTS else ("serial",):
            with LLM(target, draft=kind, threads=1, schedule=schedule, num_speculative_tokens=4, **given) as llm:
                for k in (1, 2, 4):
                    output = llm.variant(num_speculative_tokens=k).generate(PROMPT, PARAMS)[0].outputs[0]
                    assert output.token_ids == expected, (kind, schedule, k)
                    assert output.stats.exact


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child")
def test_ctrl_c_ends_an_overlapped_run_with_its_thread(child_env: dict[str, str], bundles: dict[str, Path]) -> None:
    """130, no traceback, and a process that ends: a thread that nobody joined would keep it."""
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from edgespec.cli import main\nfrom edgespec.backends.onnx import session\n"
        "forward = session.OnnxSession.forward\n"
        "def slow(self, tokens, **more):\n    print('.', file=sys.stderr, flush=True)\n    time.sleep(0.05)\n"
        "    return forward(self, tokens, **more)\n"
        "session.OnnxSession.forward = slow\n"
        f"main(['run', '-m', {str(bundles['target'])!r}, '-md', {str(bundles['tinydraft'])!r}, '--raw', '-t', '1', "
        "'--schedule', 'overlapped', '--fast', '--ignore-eos', '-n', '200', 'hello'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], env=child_env, stdout=-1, stderr=-1)
    try:
        assert child.stderr is not None
        for _ in range(12):
            assert child.stderr.read(2)
        os.kill(child.pid, signal.SIGINT)
        started = time.monotonic()
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert time.monotonic() - started < 60

"""A draft that fails costs its speed and nothing else; a target that fails is an error."""

from __future__ import annotations

from typing import Any

import pytest
from loop_driver import draft_model, drafter, run

from edgespec import LLM, SamplingParams
from edgespec.draft.model import ModelDrafter
from edgespec.engine.scheduler import SCHEDULES
from edgespec.errors import BackendError, ConfigError, NumericsError
from edgespec.testing import TableModel

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=3)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=40, seed=3)
FAULTS: dict[str, dict[str, Any]] = {
    "nan": {"nan_at": range(12, 400)},
    "nan-unguarded": {"nan_at": range(12, 400), "guard": False},  # seen by the sampler alone
    "gone": {"fail_at": range(12, 400)},
    "gone-at-once": {"fail_at": range(400)},
}


def target_model() -> TableModel:
    return TableModel(16, seed=7, n_ctx=256)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_text_stays_and_the_reason_is_said_once(fault: str, params: SamplingParams) -> None:
    target = target_model()
    expected = run(target, [], PROMPT, params).tokens
    draft = draft_model("noisy", target, **FAULTS[fault])
    outcome = run(target, [ModelDrafter(draft, 16)], PROMPT, params)
    assert outcome.tokens == expected
    outcome.check_identities()
    (note,) = outcome.stats.notes
    assert note.startswith("speculation off: ")
    assert ("NaN" in note or "nan" in note) if "nan" in fault else "the device is gone" in note
    n_calls = len(draft.forwards)
    drafted = [record.drafted for record in outcome.stats.records]
    last = max((i for i, n in enumerate(drafted) if n), default=-1)
    assert last < len(drafted) - 5  # the rest was decoded without it
    assert n_calls <= 5 * (last + 2)
    assert (last >= 0) == (fault != "gone-at-once")


def test_the_next_drafter_takes_over() -> None:
    target = target_model()
    expected = run(target, [], PROMPT, GREEDY).tokens
    broken = ModelDrafter(draft_model("same", target, fail_at=range(12, 400)), 16)
    healthy = ModelDrafter(draft_model("same", target), 16, "tinydraft")
    outcome = run(target, [broken, healthy], PROMPT, GREEDY)
    assert outcome.tokens == expected
    assert outcome.stats.notes == ["draft model off: table: the device is gone after 12 tokens."]
    assert outcome.stats.sources["model"].accepted > 0
    assert outcome.stats.sources["tinydraft"].accepted > 20


def test_features_that_cannot_be_taken_in_are_a_draft_fault_too() -> None:
    class Watcher(ModelDrafter):
        taps = ("final",)

        def observe(self, start: int, tokens: Any, hidden: Any) -> None:
            if start > 10:
                raise BackendError("the device of the fusion is gone")

    target = target_model()
    expected = run(target, [], PROMPT, GREEDY).tokens
    outcome = run(target, [Watcher(draft_model("noisy", target), 16)], PROMPT, GREEDY)
    assert outcome.tokens == expected
    assert outcome.stats.notes == ["speculation off: the device of the fusion is gone"]
    assert target.forwards[-1].taps == ()  # nobody reads them any more


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_makes_it_an_error(fault: str) -> None:
    target = target_model()
    draft = draft_model("noisy", target, **FAULTS[fault])
    kind = NumericsError if "nan" in fault else BackendError
    with pytest.raises(kind):
        run(target, [ModelDrafter(draft, 16)], PROMPT, GREEDY, strict=True)


@pytest.mark.parametrize("kind", ["none", "ngram", "same"])
@pytest.mark.parametrize("fault", ["nan", "nan-unguarded", "gone"])
def test_a_target_fault_is_an_error(fault: str, kind: str) -> None:
    """CASES 34: an error, and never token 0 for ever; a draft that is well must not hide it."""
    target = TableModel(16, seed=7, n_ctx=256, **FAULTS[fault])
    with pytest.raises(BackendError) as caught:
        run(target, drafter(kind, target), PROMPT, GREEDY)
    assert caught.value.exit_code == 1
    assert "table" in str(caught.value) or "NaN" in str(caught.value)


def test_later_requests_do_without_it_and_are_told() -> None:
    target = target_model()
    draft = draft_model("noisy", target, fail_at=range(12, 400))
    llm = LLM(target, draft="model,ngram", draft_model=draft)
    plain = llm.variant(draft="none").generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    first = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    n_calls = len(draft.forwards)
    again = llm.generate(PROMPT, GREEDY)[0].outputs[0]  # on the same caches
    llm.forget()
    fresh = llm.generate(PROMPT, GREEDY)[0].outputs[0]  # on new ones
    assert first.token_ids == again.token_ids == fresh.token_ids == plain
    assert len(draft.forwards) == n_calls
    for output in (first, again, fresh):
        assert [note for note in output.stats.notes if "off:" in note] == [
            "draft model off: table: the device is gone after 12 tokens."
        ]
    alone = llm.variant(draft="model").generate(PROMPT, GREEDY)[0].outputs[0]
    assert alone.token_ids == plain
    assert [note for note in alone.stats.notes if "off:" in note] == [
        "speculation off: table: the device is gone after 12 tokens."
    ]


def test_a_draft_that_cannot_open_a_session_is_contained() -> None:
    class NoMemory(TableModel):
        def open_session(self) -> Any:
            raise BackendError("no memory left on the device")

    target = target_model()
    plain = LLM(target, draft="none").generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    output = LLM(target, draft="model", draft_model=NoMemory(16)).generate(PROMPT, GREEDY)[0].outputs[0]
    assert output.token_ids == plain
    assert [n for n in output.stats.notes if "off" in n] == ["speculation off: no memory left on the device"]
    with pytest.raises(BackendError, match="no memory left"):
        LLM(target, draft="model", draft_model=NoMemory(16), strict_device=True).generate(PROMPT, GREEDY)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_every_schedule(schedule: str, fault: str) -> None:
    """While the target verifies, the draft may fail on a continuation that nobody has asked for yet."""
    target = target_model()
    draft = draft_model("noisy", target, **FAULTS[fault])
    llm = LLM(target, draft="model", draft_model=draft, schedule=schedule, num_speculative_tokens=4)
    plain = llm.variant(draft="none", schedule="serial").generate(PROMPT, SAMPLED)[0].outputs[0].token_ids
    for _ in range(2):
        output = llm.generate(PROMPT, SAMPLED)[0].outputs[0]
        assert output.token_ids == plain
        assert sum("speculation off: " in note for note in output.stats.notes) == 1, output.stats.notes
    with pytest.raises(BackendError):
        LLM(target, draft="model", draft_model=draft, schedule=schedule, strict_device=True).generate(PROMPT, SAMPLED)


@pytest.mark.parametrize("name", ["device", "draft_device", "device_options", "draft_device_options"])
def test_devices_of_loaded_models_are_refused(name: str) -> None:
    """They were loaded somewhere already, and the option was ignored without a word."""
    value: Any = {"a": 1} if name.endswith("options") else "gpu"
    with pytest.raises(ConfigError, match=f"{name}=.* would have no effect, as the (draft )?model is loaded already"):
        LLM(target_model(), draft="model", draft_model=target_model(), **{name: value})

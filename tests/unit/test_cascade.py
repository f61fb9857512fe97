"""Something cheaper drafts for a draft: the same proposals in fewer of its passes, under every rule and schedule."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from loop_driver import Outcome, draft_model, run

from edgespec import LLM
from edgespec import SamplingParams as Params
from edgespec.draft.base import EarlyStop, Guesser
from edgespec.draft.model import ModelDrafter
from edgespec.draft.ngram import NgramDrafter, SuffixAutomaton
from edgespec.engine.scheduler import run_overlapped
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.testing import LatencyModel, TableModel, check_log
from edgespec.testing.latency import FakeClock, VirtualWorker

GREEDY = Params(temperature=0.0, max_tokens=60, seed=1)
SAMPLED = Params(temperature=0.8, top_p=0.95, max_tokens=60, seed=1)
PENALISED = Params(temperature=0.8, repetition_penalty=1.2, max_tokens=40, seed=2)
PROMPT = [1, 2, 3, 1, 2]


class Wrong:
    """Guesses a token that is nearly never right."""

    def reset(self) -> None: ...

    def guess(self, context: Any, k: int) -> list[int]:
        return [(context.tokens[-1] * 7 + 5) % 16] * k

    def close(self) -> None: ...


def guesser_of(kind: str, target: TableModel) -> Guesser | None:
    """none | ngram | same (the draft itself, so that it is always right at T = 0) | small (near it) | wrong."""
    if kind in ("same", "small"):
        return ModelDrafter(draft_model("noisy" if kind == "same" else "wrong", target), 16, "small")
    return {"none": None, "ngram": NgramDrafter(1), "wrong": Wrong()}[kind]


def decode(
    guesser: str, params: Params, k: int = 6, *, stop: EarlyStop | None = None, **options: Any
) -> tuple[Any, ...]:
    """(outcome, draft): a target and a draft near it. order 1 makes texts that repeat themselves."""
    target = TableModel(16, seed=11, order=1)
    draft = draft_model("noisy", target, **options.pop("draft", {}))
    clock: FakeClock | None = options.pop("clock", None)
    models: list[Any] = [target, draft]
    if clock is not None:
        models = [LatencyModel(m, s, clock=clock, sleep=clock.sleep) for m, s in ((target, 1.0), (draft, 0.1))]
    drafter = ModelDrafter(models[1], 16, stop=stop, ahead=clock is not None, guesser=guesser_of(guesser, target))
    if clock is not None:
        worker = partial(VirtualWorker, clock)
        options["schedule"] = partial(run_overlapped, drafters=[drafter], start_worker=worker, clock=clock)
    outcome = run(models[0], [drafter], PROMPT, params, k=k, **options)
    outcome.check_identities()
    check_log(draft)
    drafter.close()
    return outcome, draft


def rounds(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(r.drafted, r.accepted, r.emitted, r.kind) for r in outcome.stats.records]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("guesser", ["ngram", "same", "small", "wrong"])
def test_proposals_are_those_of_the_draft_alone(guesser: str, rule: str, params: Params) -> None:
    """Under rules that need the draft's distributions too: a guess decides on passes, never on what is drawn."""
    for k in (2, 6):
        for stop in (None, EarlyStop(0.5)):
            alone, _ = decode("none", params, k, rule=rule, stop=stop)
            outcome, _ = decode(guesser, params, k, rule=rule, stop=stop)
            assert outcome.tokens == alone.tokens
            assert rounds(outcome) == rounds(alone)


def test_right_guesses_save_passes_and_wrong_ones_cost_none() -> None:
    passes = {}
    for guesser in ("none", "ngram", "same", "wrong"):
        outcome, draft = decode(guesser, GREEDY)
        passes[guesser] = len(draft.forwards)
        n_drafted, n_rounds = outcome.stats.drafted, sum(r.drafted > 0 for r in outcome.stats.records)
    assert passes["none"] == n_drafted
    assert passes["same"] == n_rounds  # one pass a proposal
    assert n_rounds < passes["ngram"] < 0.9 * passes["none"]
    assert n_rounds < passes["wrong"] <= passes["none"]


@pytest.mark.parametrize(
    "options", [{"max_rewind": 5}, {"max_rewind": 20}, {"refuse_keep": True}, {"n_ctx": 40}], ids=str
)
def test_drafts_whose_cache_is_hard_to_cut_or_small(options: dict[str, Any]) -> None:
    for params in (GREEDY, SAMPLED):
        alone, _ = decode("none", params, 4, draft=options)
        outcome, draft = decode("ngram", params, 4, draft=options)
        assert rounds(outcome) == rounds(alone)
        assert len(draft.forwards) > 0


@pytest.mark.parametrize("guesser", ["ngram", "same"])
def test_a_cascade_drafts_ahead_too(guesser: str) -> None:
    """The overlapped schedule pauses between its passes like between any others."""
    for params in (GREEDY, SAMPLED):
        alone, _ = decode("none", params)
        outcome, _ = decode(guesser, params, clock=FakeClock())
        assert outcome.tokens == alone.tokens
        assert rounds(outcome) == rounds(alone)
        assert outcome.stats.overlap()["hits"] > 0


def test_long_prompts_are_caught_up_with_in_chunks_that_leave_the_guess_whole() -> None:
    target = TableModel(16, seed=11, order=1, n_ctx=2000)
    for n in (255, 257, 260, 515):
        prompt = [i * 5 % 16 for i in range(n)]
        found = []
        for guesser in (None, NgramDrafter(1)):
            draft = draft_model("noisy", target)
            outcome = run(target, [ModelDrafter(draft, 16, guesser=guesser)], prompt, GREEDY, k=6)
            check_log(draft)
            found.append((outcome.tokens, rounds(outcome)))
        assert found[0] == found[1]


def test_a_text_is_followed_beyond_its_end_without_indexing() -> None:
    """Against a search: the longest suffix of text + more that occurs in the text."""
    dice = random.Random(4)
    for _ in range(200):
        text = [dice.randrange(3) for _ in range(dice.randrange(1, 25))]
        more = [dice.randrange(4) for _ in range(dice.randrange(1, 6))]
        index = SuffixAutomaton()
        for token in text:
            index.append(token)
        length, end = index.follow(more)
        both, size = [*text, *more], 0
        for n in range(1, len(both)):
            if any(text[at : at + n] == both[-n:] for at in range(len(text) - n + 1)):
                size = n
        assert length == size
        assert length == 0 or text[end - length + 1 : end + 1] == both[-length:]
        assert index.tokens == text


def test_one_name_for_users() -> None:
    target = TableModel(16, seed=11, order=1)
    texts, calls = [], []
    for kind in ("none", "ngram"):
        draft = draft_model("noisy", target)
        with LLM(target, draft_model=draft, draft_draft=kind, exact=False, num_speculative_tokens=6) as llm:
            texts.append(llm.generate(PROMPT, SAMPLED)[0].outputs[0].token_ids)
            calls.append(len(draft.forwards))
            assert llm.variant(draft="none").options.draft_draft == "none"
    assert texts[0] == texts[1]
    assert calls[1] < calls[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_draft": "magic"}, "draft_draft='magic' is not known: use none, ngram, tinydraft"),
        ({"draft_draft": "ngram", "draft": "ngram"}, "draft='ngram' has none: use draft='model' or 'tinydraft'"),
        ({"draft_draft": "ngram", "draft": "eagle"}, "draft='eagle' has none"),
        ({"draft_draft": "tinydraft", "draft": "tinydraft"}, "draft='tinydraft' has none: use draft='model'"),
        ({"draft_draft": "ngram", "draft": "auto"}, "with draft='auto': name the draft"),
        ({"draft_draft": "ngram", "draft": "tinydraft", "tree": True, "exact": False}, "it guesses along chains"),
    ],
)
def test_what_cannot_cascade_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, IncompatibleError), match=message.replace("(", r"\(")):
        LLM(TableModel(16), **options)


def test_the_seconds_of_all_passes_are_booked() -> None:
    clock, target = FakeClock(), TableModel(16, seed=11, order=1)
    draft = LatencyModel(draft_model("noisy", target), 1.0, clock=clock, sleep=clock.sleep)
    outcome = run(target, [ModelDrafter(draft, 16, guesser=NgramDrafter(1))], PROMPT, GREEDY, k=6)
    assert sum(r.draft_s for r in outcome.stats.records) == pytest.approx(draft.n_calls)


@pytest.mark.parametrize("max_rows", [1, 2, 5])
@pytest.mark.parametrize("draft_draft", ["none", "ngram"])
def test_a_draft_that_takes_few_rows_a_call_drafts_the_same(max_rows: int, draft_draft: str) -> None:
    """Static graphs take so many and no more; catching up with a prompt was one call of all its rows."""
    proposals = []
    for limit in (None, max_rows):
        draft = TableModel(8, seed=3, noise=0.5, max_rows=limit)
        with LLM(TableModel(8, seed=3), draft_model=draft, draft_draft=draft_draft, exact=False) as llm:
            records = llm.generate(2 * PROMPT, SAMPLED)[0].outputs[0].stats.records
        proposals.append([(record.drafted, record.accepted) for record in records])
    assert proposals[0] == proposals[1]
    assert sum(drafted for drafted, _ in proposals[0]) > 0

"""What drafters know of their own proposals: those that were run and those that were not."""

from __future__ import annotations

import pytest

from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.track import AcceptanceTrack
from edgespec.types import DraftContext, JudgedOffer, Proposal


@pytest.mark.parametrize(
    ("committed", "judged"),
    [
        ([], (0, 0)),
        ([7], (1, 1)),
        ([7, 8], (2, 2)),
        ([7, 8, 9, 1], (3, 3)),
        ([7, 5], (2, 1)),
        ([5], (1, 0)),
        ([7, 8, 5, 6], (3, 2)),
    ],
)
def test_a_proposal_is_judged_as_far_as_tokens_were_committed(committed: list[int], judged: tuple[int, int]) -> None:
    track = AcceptanceTrack([(1.0, 2.0), (0.0, 1.0)])
    track.ask(Proposal([7, 8, 9], "x"), 4, 1)
    before = [1, 2, 3, 4]
    assert track.learn([*before, *committed])[1:] == judged
    drafted, accepted = judged
    n_judged = min(drafted, accepted + 1)
    assert track.rate(1) == accepted / (1 + n_judged)
    assert track.rate(0) == 0.5, "another bucket"
    if committed:
        assert track.learn([*before, *committed, 1, 2]) == JudgedOffer(0, 0, 0), "only once"


def test_only_the_first_tokens_count_where_a_track_says_so() -> None:
    """A long copy would outvote many short ones: what is asked is how often copying goes on at all."""
    track = AcceptanceTrack([(0.0, 1.0)], counted=2)
    track.ask(Proposal([1, 2, 3, 4, 5], "x"), 1)
    assert track.learn([0, 1, 2, 3, 4, 9]) == JudgedOffer(0, 5, 4)
    assert track.rate() == 2 / 3
    track.ask(Proposal([1, 2, 3], "x"), 1)
    assert track.learn([0, 1, 9]) == JudgedOffer(0, 2, 1)
    assert track.rate() == 3 / 5


def test_an_offer_says_what_became_of_the_one_before() -> None:
    drafter, tokens = NgramDrafter(1), [1, 2, 3, 4, 1]
    assert ask(drafter, tokens).judged == JudgedOffer(0, 0, 0)
    tokens += [2, 3, 9]  # it would have said 2, 3, 4, 1, 2, ...
    offer = ask(drafter, tokens)
    assert offer.max_k == 0, "9 is new"
    assert offer.judged is not None
    assert offer.judged[1:] == (3, 2)
    assert ask(drafter, [*tokens, 1]).judged == JudgedOffer(0, 0, 0)


def context(tokens: list[int]) -> DraftContext:
    return DraftContext(tokens, None, None, None, 1)  # type: ignore[arg-type]


def ask(drafter: NgramDrafter, tokens: list[int]):  # type: ignore[no-untyped-def]
    return drafter.offer(context(tokens))

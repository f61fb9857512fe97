"""What a controller knows beyond a request: costs, acceptance, the account, and which sources sit out.

Starts from a profile where there is one, and decides nothing: see `edgespec.engine.adaptive`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgespec.engine.acceptance import FADE_REQUEST, Acceptance, Calibration
from edgespec.engine.costs import CostTable, MeasuredCosts
from edgespec.engine.ledger import Ledger
from edgespec.types import Offer

__all__ = ["FEW", "GUESS_PRIOR", "Expectation", "Key", "Learned", "Rest"]

GUESS_PRIOR = 0.25  # acceptance of the free guess in a row that exact mode runs anyway
FIRST_REST, LONGEST_REST = 8, 1024  # rounds without a source between two tries of it while it does not pay
SHORTER = 2  # so many times, for another text
WEIGHED_EVERY = 16  # rounds of a rest
NEWS = 0.05  # how much better a source's own estimate must have become to be weighed at once
FEW = 3  # tries of a source that are remembered
EXPECTED, ELSEWHERE = 8.0, 2.0  # judgements that a profile's acceptance is worth, and that of the other temperature


class Key(NamedTuple):
    """What acceptance is kept by. is_drawn: of texts that are drawn (T > 0) and agree with drafts less."""

    source: str
    bucket: int
    is_drawn: bool


@dataclass
class Rest:
    """How long a source that does not pay sits out before it is tried again: twice as long each time.

    left: rounds, None while it is not sitting out. hope: the acceptance that it named when it was last weighed.
    """

    left: int | None = None
    wait: int = FIRST_REST
    hope: float = 0.0

    def begin(self) -> None:
        self.left, self.wait = self.wait, min(2 * self.wait, LONGEST_REST)

    def shorten(self) -> None:
        """Another text: to be tried sooner than on the last one, though what failed on several not at once."""
        self.left, self.wait = None, max(FIRST_REST, self.wait // SHORTER)

    def sleeps(self, offer: Offer) -> bool:
        """Count a round; whether the source need not be weighed in it: only now and then while it sits out.

        Weighing costs a percent of a small model's step, and nothing has changed unless the source itself says so.
        """
        has_news = (offer.acceptance or 0.0) > self.hope + NEWS
        if self.left:
            self.left -= 1
            if self.left % WEIGHED_EVERY and not has_news:
                return True
        self.hope = offer.acceptance or 0.0
        return False


@dataclass(frozen=True)
class Expectation:
    """What a profile says before anything was decoded.

    chances: source -> acceptance of each position, given that those before it were right. guess: of a free guess.
    buckets: the same of sources that tell proposals apart, by (source, bucket of their offers). is_drawn: whether the
    texts were drawn (T > 0).
    """

    costs: MeasuredCosts
    chances: Mapping[str, Sequence[float]] = field(default_factory=dict)
    guess: float = GUESS_PRIOR
    is_drawn: bool = False
    buckets: Mapping[tuple[str, int], Sequence[float]] = field(default_factory=dict)


@dataclass
class Learned:
    """What outlives a request: costs, acceptance, the account, and who is sitting out."""

    costs: CostTable = field(default_factory=CostTable)
    ledger: Ledger = field(default_factory=Ledger)
    acceptance: dict[Key, Acceptance] = field(default_factory=dict)
    guess: Acceptance = field(default_factory=Acceptance)
    calibration: dict[str, Calibration] = field(default_factory=dict)
    known_k: dict[str, int] = field(default_factory=dict)  # longest chain of which every position was judged
    rest: dict[Key, Rest] = field(default_factory=dict)
    tries: defaultdict[str, deque[int]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=FEW)))
    pending: tuple[Key, int, int] | None = None  # the last proposal that was run, while its next offer may say more
    is_drawn: bool = False  # of the request
    hosts: dict[bool, tuple[float, float]] = field(default_factory=dict)  # host_s and token_s of the other temperature
    rounds: int = 0
    last_plain: int = 0  # the round that was plain last

    @classmethod
    def expecting(cls, expected: Expectation | None) -> Learned:
        """To start with: as if a profile's acceptance had been seen EXPECTED times; nothing where None."""
        if expected is None:
            return cls()
        learned = cls(CostTable(expected.costs))
        learned.guess.expect([expected.guess], EXPECTED)
        known = {(source, 0): chances for source, chances in expected.chances.items()}
        for (source, bucket), chances in {**known, **expected.buckets}.items():
            for is_drawn in (False, True):
                entry = learned.acceptance[Key(source, bucket, is_drawn)] = Acceptance()
                entry.expect(chances, EXPECTED if is_drawn == expected.is_drawn else ELSEWHERE)
            learned.known_k[source] = max(learned.known_k.get(source, 0), len(chances))
        return learned

    def known_chances(self, sources: Collection[str]) -> dict[Key, float]:
        """Chances of a first token of these sources in texts like the request's, as far as there is evidence."""
        return {
            key: entry.chances(1, 0.0)[0]
            for key, entry in self.acceptance.items()
            if key.source in sources and key.is_drawn == self.is_drawn and entry.evidence >= 1.0
        }

    def learn(self, key: Key, drafted: int, accepted: int) -> None:
        """Take in what became of a proposal."""
        self.pending = None
        self.acceptance.setdefault(key, Acceptance()).learn(drafted, accepted)
        self.known_k[key.source] = max(self.known_k.get(key.source, 0), min(drafted, accepted + 1))

    def begin_request(self, is_drawn: bool) -> None:
        """Another text: old evidence of its kind counts less, and whoever sits out may be tried again sooner."""
        if self.pending:
            self.learn(*self.pending)
        if is_drawn != self.is_drawn:
            costs, self.is_drawn = self.costs, is_drawn
            self.hosts[not is_drawn] = costs.host_s, costs.token_s
            costs.host_s, costs.token_s = self.hosts.get(is_drawn, self.hosts[not is_drawn])
        self.fade(FADE_REQUEST)
        for key, rest in self.rest.items():
            if key.is_drawn == is_drawn:
                rest.shorten()

    def fade(self, share: float) -> None:
        """Keep only so much of the weight of what was seen of texts like the request's."""
        for key, entry in self.acceptance.items():
            if key.is_drawn == self.is_drawn:
                entry.fade(share)

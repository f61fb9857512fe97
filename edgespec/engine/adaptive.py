"""The controller that weighs: each round the (source, k) with the most expected tokens a second, k = 0 included.

Expected tokens come from acceptance by source, match length and position (`acceptance.py`), seconds from what calls
cost here (`costs.py`), and what may be lost by trying from an account (`ledger.py`). Renewal reward: the best long-run
rate is that of the round with the best ratio (Leviathan 2211.17192, generalised to a measured V(n)). What was learnt
outlives requests and never reaches the text: under the coupled rule it does not depend on k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from edgespec.engine.acceptance import FADE_ROUND, Acceptance, Calibration
from edgespec.engine.bids import LEAST_GAIN, Bid, Bidder, Plain, shortest
from edgespec.engine.controller import Controller
from edgespec.engine.costs import KEPT
from edgespec.engine.learned import FEW, FIRST_REST, GUESS_PRIOR, Expectation, Key, Learned, Rest
from edgespec.types import FILLER, DraftContext, Drafter, ExactRows, Offer, RoundRecord

__all__ = ["AdaptiveController", "Expectation", "Learned"]

MODEL_PRIOR = 0.55  # acceptance of a source that says nothing of itself
SOON, LATE = 8, 32  # a source tried fewer than FEW times gets a try 8 rounds after the last, another 32
OFTEN, SELDOM = 32, 256  # rounds after which a plain step is due, while its cost was seen seldom and then
AMORTISED = 32  # tokens over which catching up is expected to pay
FADE_EVERY = 16  # rounds
POWER_EVERY = 256  # rounds between two looks at battery and heat
TIRED, NAP = 16, 4  # rounds without a proposal after which sources are asked only in every fourth
LEAST_SURVIVAL = 0.02  # of a proposal's last token: longer ones are not weighed
LEAST_S = 1e-9  # that anything takes; a clock may say nothing at all
MOST_OVERRUN = 4.0  # a proposal that took longer than this many times the usual is booked as that


class AdaptiveController(Controller):
    """At most `k` tokens a round, from whichever source promises most, or none where none pays.

    memory: what earlier requests taught; a new one where None. exact: the row counts that calls are padded to.
    most_k: asked now and then for a limit on k that battery or heat set, and the reason; None for no limit.
    """

    name = "adaptive"

    def __init__(
        self,
        k: int,
        min_k: int = 0,
        memory: Learned | None = None,
        exact: ExactRows | None = None,
        most_k: Callable[[], tuple[int, str] | None] | None = None,
    ) -> None:
        super().__init__(k, min_k)
        self.memory = memory or Learned()
        self.exact = exact
        self.most_k = most_k
        self._widths = [self._wide(n) for n in range(k + 2)]  # rows that run for so many wanted ones
        self._limit: tuple[int, str] | None = None
        self._bid: Bid | None = None
        self._plain: Plain | None = None
        self._n_tokens = 0
        self._idle = 0  # rounds since the last proposal
        self._known: Mapping[Key, float] = {}  # chances of first tokens when the request began
        self._sunk = 0  # rows that this round runs in any case beyond a step's: the end of a prompt
        self._fed: dict[str, int] = {}  # source -> committed tokens when it last proposed
        self._chosen: Counter[tuple[str, int]] = Counter()
        self._off: dict[str, dict[str, Any]] = {}

    # --- before a round ---------------------------------------------------------------------------------------------

    def choose(
        self, drafters: Sequence[Drafter], context: DraftContext, room: int, n_pending: int = 1
    ) -> tuple[Drafter | None, int]:
        tried = self._bid.by.key.source if self._bid else None
        self._begin(context, drafters)
        if not drafters:
            return None, 0
        if self._naps():
            return self._none("no gain")
        offers = [(drafter, drafter.offer(context)) for drafter in drafters]
        self._learn_judged(offers, tried)
        self._sunk = self._width(n_pending) - self._width(1)
        seconds = self.memory.costs.target_s(self._width(1), self._n_tokens)
        if seconds is None or self._wants_plain():
            return self._none("measuring", "the cost of a plain step is measured")
        self._plain = plain = self._weigh_plain(seconds)
        awake = [(drafter, offer) for drafter, offer in offers if not self._sleeps(drafter, offer)]
        bids = [bid for drafter, offer in awake for bid in self._bids(drafter, offer, room, plain)]
        if not bids:
            return self._none(*(self._why_no_bids(offers, room) if len(awake) == len(offers) else ("no gain",)))
        chosen = self._best(bids, plain)
        chosen = self._rival(bids, plain, chosen) if chosen else self._probe(bids, plain)
        if chosen is None:
            return self._none(*self._why_none(bids, plain))
        self._bid, self._idle = chosen, 0
        source = chosen.by.key.source
        self.memory.tries[source].append(self.memory.rounds)
        self._set_stop(context, chosen, plain)
        self._chosen[source, chosen.k] += 1
        return chosen.by.drafter, chosen.k

    def _begin(self, context: DraftContext, drafters: Sequence[Drafter]) -> None:
        self._bid, self._plain, self.min_survival = None, None, 0.0
        self._n_tokens = len(context.tokens)
        if context.round == 0:
            self.memory.begin_request(context.sampler.params.temperature > 0.0)
            self._known = self.memory.known_chances({drafter.source for drafter in drafters})
        if self.most_k is not None and context.round % POWER_EVERY == 0:
            self._limit = self.most_k()

    def _naps(self) -> bool:
        """Whether nobody is asked in this round: after a long stretch without a proposal only every NAPth time.

        Asking takes a tenth of a millisecond, as Python is not in the caches after a pass over the weights.
        """
        self._idle += 1
        return self._idle > TIRED and self._idle % NAP > 0

    def _learn_judged(self, offers: Sequence[tuple[Drafter, Offer]], tried: str | None) -> None:
        """What became of offers, of those who know it without having been run. tried: the source of the last round."""
        for drafter, offer in offers:
            if offer.judged is not None and offer.judged.drafted:
                bucket, drafted, accepted = offer.judged
                self.memory.learn(Key(drafter.source, bucket, self.memory.is_drawn), drafted, accepted)
                if accepted and drafter.source != tried and self._saves(drafted, accepted):
                    self.memory.ledger.vindicate(drafter.source)

    def _saves(self, drafted: int, accepted: int) -> bool:
        """Whether rows beyond a plain step's, for so many tokens, are quicker than plain steps to the accepted ones."""
        plain_s = self.memory.costs.target_s(self._width(1), self._n_tokens) or 0.0
        call_s = self.memory.costs.target_s(self._width(1 + drafted), self._n_tokens) or 0.0
        return (
            self._width(1 + drafted) > self._width(1) and call_s < (1 + accepted) * self._weigh_plain(plain_s).token_s
        )

    def _wants_plain(self) -> bool:
        """Whether a plain step is due: without a fresh figure of its cost nothing says what drafting loses."""
        n_seen = self.memory.costs.samples(self._width(1))
        if n_seen < FEW:
            return True
        return self.memory.rounds - self.memory.last_plain >= (OFTEN if n_seen < KEPT else SELDOM)

    def _weigh_plain(self, call_s: float) -> Plain:
        costs = self.memory.costs
        guess = self.memory.guess.chances(1, GUESS_PRIOR)[0] if self._width(1) > 1 else 0.0
        return Plain(max(call_s + costs.host_s + guess * costs.token_s, LEAST_S), 1.0 + guess, call_s)

    def _sleeps(self, drafter: Drafter, offer: Offer) -> bool:
        return offer.judged is None and self._rest(self._key(drafter, offer)).sleeps(offer)

    def _width(self, n_rows: int) -> int:
        return self._widths[n_rows] if n_rows < len(self._widths) else self._wide(n_rows)

    def _wide(self, n_rows: int) -> int:
        return self.exact.width(n_rows) if self.exact else n_rows

    def _bids(self, drafter: Drafter, offer: Offer, room: int, plain: Plain) -> list[Bid]:
        """Lengths up to known ground and one beyond; a source that costs nothing fills the rows that run anyway."""
        costs, source = self.memory.costs, drafter.source
        top = min(self.k, room, offer.max_k, self._limit[0] if self._limit else self.k)
        reach = max(self.memory.known_k.get(source, 0) + 1, self.min_k)
        if offer.passes == 0:
            reach = self._width(1 + reach) - 1
        if min(top, reach) < max(1, self.min_k):
            return []
        by, chances = self._bidder(drafter, offer, min(top, reach))
        fixed_s = costs.host_s + by.catch_up_s / max(1, min(AMORTISED, room))
        usual, forgone_s = 1.0 - costs.saved(source), (plain.tokens - 1.0) * plain.token_s
        bids, survival, tokens = [], 1.0, 1.0
        for k, chance in enumerate(chances, 1):
            survival *= chance
            tokens += survival
            if k < self.min_k:
                continue
            rows = self._width(1 + k + self._sunk) - self._sunk
            more_s = max(0.0, (costs.target_s(rows, self._n_tokens) or 0.0) - plain.call_s)
            draft_s = costs.draft_s(source, k, offer.passes, plain.call_s)
            seconds = plain.call_s + more_s + draft_s * usual + fixed_s + (tokens - 1.0) * costs.token_s
            passes = k if offer.passes is None else offer.passes
            worth = tokens / max(seconds, LEAST_S) / (LEAST_GAIN if passes else 1.0)
            at_risk_s = more_s + draft_s + forgone_s
            bids.append(Bid(by, k, worth, tokens, seconds, at_risk_s, rows - self._width(1), passes, chance))
            if survival < LEAST_SURVIVAL:
                break
        return bids

    def _bidder(self, drafter: Drafter, offer: Offer, n: int) -> tuple[Bidder, list[float]]:
        """The source, and its chances at the first n positions."""
        key, costs = self._key(drafter, offer), self.memory.costs
        evidence = self.memory.acceptance.setdefault(key, Acceptance())
        chances = evidence.chances(n, MODEL_PRIOR if offer.acceptance is None else offer.acceptance)
        n_missed = self._n_tokens - self._fed.get(drafter.source, 0)
        catch_up_s = costs.catch_up_s(drafter.source, n_missed) if n_missed > self.k + 1 else 0.0
        is_proven = evidence.evidence >= 1.0
        return Bidder(drafter, key, chances[0], n_missed, catch_up_s, is_proven, offer.judged is not None), chances

    def _best(self, bids: Sequence[Bid], plain: Plain) -> Bid | None:
        """The bid that is worth most, if it beats a plain step and the account can pay for its failure.

        Before anything has paid, of the source that promises most for what it may cost the account.
        """
        ordered = sorted(bids, key=attrgetter("worth"), reverse=True)
        if not self.memory.ledger.won_steps:
            promises: dict[Key, float] = {}
            for bid in ordered:
                promises.setdefault(bid.by.key, bid.promise(plain))
            ordered.sort(key=lambda bid: -promises[bid.by.key])
        for bid in ordered:
            if bid.worth * plain.token_s > 1.0 and self._affords(bid, plain):
                if not bid.by.judges_itself:
                    self._rest(bid.by.key).left = None
                return bid
        return None

    def _rival(self, bids: Sequence[Bid], plain: Plain, best: Bid) -> Bid:
        """Now and then, instead of the best bid, the shortest one of a source that was hardly or long not tried."""
        for bid in shortest(bids):
            source, is_known = bid.by.key.source, bid.by.judges_itself
            if source != best.by.key.source and not is_known and self._is_due(source) and self._affords(bid, plain):
                return bid
        return best

    def _is_due(self, source: str, after: int | None = None) -> bool:
        """Whether a source was last tried so many rounds ago; where None, SOON after its first tries and LATE after."""
        tries = self.memory.tries[source]
        last = tries[-1] if tries else -SOON
        return self.memory.rounds - last >= (after or (SOON if len(tries) < FEW else LATE))

    def _probe(self, bids: Sequence[Bid], plain: Plain) -> Bid | None:
        """The shortest try of a source that does not pay, when it has sat out long enough.

        Of what judges itself only now and then, for what its rows cost: nothing else would measure that again.
        """
        chosen = None
        for bid in sorted(shortest(bids), key=lambda bid: -bid.rate):
            if bid.by.judges_itself:
                if chosen is None and self._is_due(bid.by.key.source, SELDOM) and self._affords(bid, plain):
                    chosen = bid
                continue
            rest = self._rest(bid.by.key)
            if rest.left is None:
                rest.begin()
            elif rest.left == 0 and chosen is None and self._affords(bid, plain):
                rest.begin()
                chosen = bid
        return chosen

    def _key(self, drafter: Drafter, offer: Offer) -> Key:
        return Key(drafter.source, offer.bucket, self.memory.is_drawn)

    def _rest(self, key: Key) -> Rest:
        rest = self.memory.rest.get(key)
        if rest is None:
            rest = self.memory.rest[key] = Rest()
        return rest

    def _affords(self, bid: Bid, plain: Plain) -> bool:
        """Catching up is free once for a source nobody has tried, and for one that has shown itself worth it."""
        ledger, count = self.memory.ledger, bid.n_rows + bid.passes
        if not ledger.won_steps and bid.by.hope < ledger.caution(count, bid.by.key.source):
            better = max((chance for key, chance in self._known.items() if key != bid.by.key), default=0.0)
            if better > bid.by.hope:
                return False  # the little that is left is for what is surer
        catch_up_s = bid.by.catch_up_s if self._pays_catch_up(bid, plain) else 0.0
        return ledger.affords((bid.at_risk_s + catch_up_s) / plain.token_s, count, bid.by.key.source)

    def _pays_catch_up(self, bid: Bid, plain: Plain) -> bool:
        return bid.by.is_proven and bid.rate * plain.token_s <= 1.0

    def _set_stop(self, context: DraftContext, bid: Bid, plain: Plain) -> None:
        """Let the chain end where the next token is not worth its step: survival * chance < rate * (draft + row).

        A draft's own probability is the chance of acceptance at T = 0 alone.
        """
        if bid.k < 2 or not bid.passes or context.sampler.params.temperature != 0.0:
            return
        step_s = (bid.at_risk_s - (plain.tokens - 1.0) * plain.token_s) / bid.k
        rate = max(bid.rate, 1.0 / plain.token_s)
        survival = min(rate * step_s / max(bid.next_chance, 1e-3), 0.9)
        self.min_survival = self.memory.calibration.setdefault(bid.by.key.source, Calibration()).limit(survival)

    # --- after a round ----------------------------------------------------------------------------------------------

    def update(self, record: RoundRecord) -> None:
        memory, bid = self.memory, self._bid
        memory.rounds += 1
        if not record.asked_k:
            memory.last_plain = memory.rounds
        if memory.rounds % FADE_EVERY == 0:
            memory.fade(FADE_ROUND**FADE_EVERY)
        if record.index > 0 and self._plain is not None and not self._sunk:
            memory.costs.learn_target(record.n_rows, self._n_tokens, record.target_s)
            memory.costs.learn_host(record.loop_s, record.verify_s, record.accepted + 1)
        elif record.index > 0 and not record.asked_k and record.n_rows == self._width(1):
            memory.costs.learn_target(record.n_rows, self._n_tokens, record.target_s)
        if bid is None or self._plain is None:
            memory.ledger.settle(record.emitted)
            if record.source == FILLER:
                memory.guess.learn(1, min(1, record.accepted))
            return
        self._settle(record, bid, self._plain)

    def _settle(self, record: RoundRecord, bid: Bid, plain: Plain) -> None:
        """Learn from a round that drafted, and book what it gained or lost."""
        memory, source = self.memory, bid.by.key.source
        is_own = record.source == source
        drafted, accepted = (record.drafted, record.accepted) if is_own else (0, 0)
        draft_s = max(record.draft_s, record.propose_s)  # a test's clock may be slower than the real one
        usual_s = memory.costs.draft_s(source, bid.k, None, plain.seconds)
        if bid.by.n_missed > self.k + 1:
            # nothing is ahead of one who sat out
            memory.costs.learn_catch_up(source, bid.by.n_missed, draft_s - usual_s)
            if not self._pays_catch_up(bid, plain):
                draft_s = min(draft_s, usual_s)
        elif not record.cut:
            memory.costs.learn_saved(source, 1.0 - draft_s / usual_s if record.hit and usual_s else 0.0)
            if not record.hit:  # what is drafted ahead says nothing of what drafting costs
                memory.costs.learn_draft(source, max(drafted, 1), draft_s)
        self._fed[source] = self._n_tokens
        if is_own and bid.by.judges_itself:
            memory.pending = bid.by.key, drafted, accepted
        elif is_own:
            memory.learn(bid.by.key, drafted, accepted)
        if is_own and record.scores and not record.cut:
            memory.calibration[source].learn(record.scores, accepted)
        if accepted and bid.rate * plain.token_s > 1.0:
            self._rest(bid.by.key).wait = FIRST_REST
        n_rows = record.n_rows - self._sunk
        call_s = memory.costs.target_s(n_rows, self._n_tokens, self._width(1)) or 0.0
        host_s = memory.costs.host_s + (record.emitted - 1) * memory.costs.token_s
        lasted_s = call_s + host_s + min(draft_s, MOST_OVERRUN * usual_s)
        count = n_rows - self._width(1) + bid.passes
        gained = record.emitted - lasted_s / plain.token_s
        memory.ledger.settle(record.emitted, gained if accepted else min(gained, 0.0), count, source)

    # --- what it says -------------------------------------------------------------------------------------------------

    def _none(self, kind: str, why: str | None = None) -> tuple[None, int]:
        """why: None for the reason that was given last."""
        entry = self._off.setdefault(
            kind, {"rounds": 0, "at_token": self._n_tokens, "why": "what did not pay sits out"}
        )
        entry["rounds"] += 1
        if why is not None:
            entry["why"] = why
        return None, 0

    def _why_no_bids(self, offers: Sequence[tuple[Drafter, Offer]], room: int) -> tuple[str, str]:
        if self._limit is not None and self._limit[0] < max(1, self.min_k):
            return "power", self._limit[1]
        if room < max(1, self.min_k):
            return "room", f"there is room for {room} drafted tokens"
        names = ", ".join(drafter.source for drafter, _ in offers)
        return "no proposal", f"nothing to propose ({names})"

    def _why_none(self, bids: Sequence[Bid], plain: Plain) -> tuple[str, str]:
        best = max(bids, key=lambda bid: bid.rate)
        gain, source = best.rate * plain.token_s, best.by.key.source
        if gain > 1.0 and not self._affords(best, plain):
            ledger = self.memory.ledger
            return "account", (
                f"{source} lost {ledger.lost_steps:.1f} plain steps and won {ledger.won_steps:.1f}: "
                "what it may lose is used up"
            )
        wanted = f", {LEAST_GAIN:g}x is wanted" if gain > 1.0 else ""
        return (
            "no gain",
            f"{source} with k = {best.k} would run at {gain:.2f}x of plain (acceptance {best.by.hope:.2f}){wanted}",
        )

    def summary(self) -> dict[str, Any]:
        """What was chosen how often, when and why nothing was, and the account; for the run report."""
        chosen: dict[str, dict[str, int]] = {}
        for (source, k), rounds in sorted(self._chosen.items()):
            chosen.setdefault(source, {})[str(k)] = rounds
        return {"name": self.name, "chosen": chosen, "off": self._off, "ledger": self.memory.ledger.to_dict()}

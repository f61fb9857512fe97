"""The nouns that every layer shares: models, sessions, proposals, verdicts and the requests of the round loop.

Nothing here computes. Drafters know tokens, backends know tensors, the verifier knows probabilities; these types are
all that passes between them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgespec.noise import Noise
    from edgespec.sampling import Sampler
    from edgespec.verify import Verifier

__all__ = [
    "FILLER",
    "AheadDrafter",
    "Candidates",
    "Committed",
    "DraftContext",
    "Drafter",
    "ExactRows",
    "Forward",
    "Model",
    "ModelInfo",
    "Offer",
    "Proposal",
    "Propose",
    "RoundRecord",
    "Rows",
    "Session",
    "StopRule",
    "StopSignal",
    "Verdict",
]

FILLER = "filler"  # source of the free guesses in rows that exact mode has to run anyway

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model is; sizes in bytes and tokens."""

    name: str
    n_vocab: int
    n_ctx: int
    eos_ids: tuple[int, ...] = ()
    tokenizer_hash: str | None = None
    device: str = "cpu"
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    max_rewind: int | None = None  # tokens that `keep` can take back; None = any number
    max_rows: int | None = None  # rows in one forward call; None = any number
    tree: bool = False  # forward(parents=...) works
    taps: tuple[str, ...] = ()
    placement: Mapping[str, int] = field(default_factory=dict)  # provider -> nodes; empty where unknown
    fallbacks: tuple[str, ...] = ()  # operators that the device left to the CPU
    synthetic: str | None = None  # what was done to the weights, where nobody trained them as they are


@dataclass(frozen=True)
class ExactRows:
    """Row counts of one forward call whose rows are bit-identical whatever the count.

    They are the multiples of `multiple` in `min_rows..max_rows`, both ends among them. Found by probing
    (`edgespec.engine.exact`); a call with another number of rows is padded up to the next one.
    """

    min_rows: int
    max_rows: int
    multiple: int = 1

    def width(self, n_rows: int) -> int:
        """Rows to run so that `n_rows` of them (at most `max_rows`) are exact."""
        return max(-(-n_rows // self.multiple) * self.multiple, self.min_rows)


@dataclass
class Rows:
    """Result of a forward call. Arrays are views that hold until the session's next call: copy to keep.

    logits: [n, n_vocab] float32; row i belongs to the i-th entry of `logits_rows`.
    hidden: tap name -> [n_tokens, d] float32, a row for every token of the call.
    run_s: seconds inside the runtime (session.run and the like); the rest of the call is host time.
    """

    logits: FloatArray
    hidden: Mapping[str, FloatArray] = field(default_factory=dict)
    run_s: float = 0.0


class Session(Protocol):
    """One sequence's KV cache on one model."""

    @property
    def n_past(self) -> int:
        """Tokens in the cache."""

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        """Run `tokens` on top of the cache and append them to it.

        parents: index within `tokens` of each token's parent (-1: the cached prefix); None for a chain.
        logits_rows: indices within `tokens` whose logits are wanted; None for all, empty for none.
        Raises ConfigError over the context, NumericsError on NaN logits (checked where it is cheap).
        """

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        """Forget all but the first `n_past` tokens.

        path: after a tree pass, the indices (within that pass) of the tokens to keep, root to leaf; they become the
        cache's last entries and `n_past` counts them. Raises CacheError where the cache cannot be rewound that far.
        """

    def close(self) -> None:
        """Free the cache."""


class Model(Protocol):
    """Loaded weights on one device."""

    @property
    def info(self) -> ModelInfo: ...

    def open_session(self) -> Session:
        """A new empty KV cache over the same weights."""

    def close(self) -> None: ...


class Candidates(NamedTuple):
    """Tokens that sampling may still choose after all processors, and their scores.

    ids: [m] int64, ascending. logits: [m] float, already divided by the temperature; softmax over them is the sampling
    distribution. T = 0 is a single candidate.
    """

    ids: IntArray
    logits: FloatArray

    def probs(self) -> FloatArray:
        """[m] probabilities in the dtype of `logits`, summing to 1."""
        weights = np.exp(self.logits - self.logits.max())
        result: FloatArray = weights / weights.sum()
        return result


@dataclass
class Proposal:
    """Drafted tokens. A chain unless `parents` is given (index of each token's parent, -1 = after the last committed).

    dists: for each token the distribution that it was really drawn from, or None for a point mass; None as a whole
    means all are point masses. Siblings are listed in the order in which they were drawn without replacement.
    runners_up: for each token the draft's second choice (None: it had none) and the chance of the first against it,
    where a schedule prepares for either. is_ahead: it was drafted, wholly or in part, before it was asked for.
    """

    tokens: list[int]
    source: str
    parents: list[int] | None = None
    dists: list[Candidates | None] | None = None
    scores: list[float] | None = None
    run_s: float = 0.0  # seconds inside the draft's runtime
    runners_up: list[tuple[int, float] | None] | None = None
    is_ahead: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


class Verdict(NamedTuple):
    """path: indices into the proposal of the accepted tokens, root to leaf; next_token: the target's own token."""

    path: tuple[int, ...]
    next_token: int
    kind: Literal["correction", "bonus"]


class DraftContext(NamedTuple):
    """What a drafter may look at: the committed tokens and the means to sample as the verifier expects."""

    tokens: list[int]  # committed, read-only; the last one is not yet in the target's cache
    sampler: Sampler
    noise: Noise
    verifier: Verifier
    round: int
    min_survival: float = 0.0  # a chain ends after the token whose joint confidence is below it; 0: never
    n_ahead: int = 0  # so many of the last tokens are guesses: the round that decides them is in flight


class JudgedOffer(NamedTuple):
    """An earlier offer: of its tokens whose places have been committed (`drafted`) the first `accepted` were right."""

    bucket: int
    drafted: int
    accepted: int


class Offer(NamedTuple):
    """What a drafter could do this round: at most `max_k` tokens; `acceptance` is its own guess or None.

    bucket: proposals of one bucket are alike (n-gram matches of about one length). passes: runs of a model that a
    proposal takes, however long it is; None: one for every token. judged: what became of the offer before, whoever got
    that round; None of drafters that do not know their proposal before they are asked for it.
    """

    max_k: int
    acceptance: float | None = None
    bucket: int = 0
    passes: int | None = None
    judged: JudgedOffer | None = None


class Drafter(Protocol):
    """Proposes tokens. Its own cache is always a prefix of the committed tokens when a proposal begins."""

    source: str
    taps: tuple[str, ...]  # target features it wants to observe; empty for most

    def reset(self) -> None:
        """A new request begins; what was cached may be reused only as far as the new tokens agree with it."""

    def offer(self, context: DraftContext) -> Offer: ...

    def propose(self, context: DraftContext, k: int) -> Proposal:
        """At most k tokens; may be fewer or none."""

    def observe(self, start: int, tokens: Sequence[int], hidden: Mapping[str, FloatArray]) -> None:
        """True target features of committed positions start..start+len(tokens), after prefill chunks and commits.

        hidden: views that hold until the session's next call.
        """

    def close(self) -> None: ...


@runtime_checkable
class AheadDrafter(Drafter, Protocol):
    """A drafter that can draft for tokens which are not committed yet, as it needs nothing of the round in flight."""

    def steps(self, context: DraftContext, k: int) -> Generator[None, None, Proposal]:
        """`propose`, pausing between the passes of its model; `context.n_ahead` tokens may turn out wrong.

        What they leave in its cache is reconciled later like anything else. A generator that was left halfway may be
        resumed as long as nothing else was drafted in between.
        """

    def adopt(self, context: DraftContext, proposal: Proposal) -> Proposal:
        """A proposal of `steps` becomes this round's, as if `propose` had returned it; `context` is all committed."""


class Forward(NamedTuple):
    """The round loop asks for a forward pass; the scheduler answers with Rows."""

    session: Session
    tokens: list[int]
    parents: list[int] | None = None
    logits_rows: Sequence[int] | None = None
    taps: tuple[str, ...] = ()


class Propose(NamedTuple):
    """The round loop asks for a proposal; the scheduler answers with a Proposal."""

    drafter: Drafter
    context: DraftContext
    k: int


@dataclass
class RoundRecord:
    """One round's counts and times. Identity: emitted == accepted + 1 - cut.

    draft_s, target_s: seconds inside the runtimes of draft and target; host_s: all the rest of the round. propose_s:
    the whole of drafting, its share of the host time included; verify_s: the verifier's share of the host time.
    Overlapped schedule: ahead, ahead_s: draft passes that ran beside this round's verification, and their seconds (no
    part of draft_s); late_s: how long the verdict waited for the last of them (no part of host_s); hit: whether this
    round's proposal was there, wholly or in part, when it was asked for, None where nothing had been prepared.
    """

    index: int
    source: str
    asked_k: int
    drafted: int
    accepted: int
    emitted: int
    cut: int  # 1 where a stop or limit cut the round's own token off
    n_rows: int
    kind: str
    draft_s: float = 0.0
    target_s: float = 0.0
    host_s: float = 0.0
    propose_s: float = 0.0
    verify_s: float = 0.0
    ahead: int = 0
    ahead_s: float = 0.0
    late_s: float = 0.0
    hit: bool | None = None
    logprobs: list[Any] | None = None
    scores: list[float] | None = None  # of the drafted tokens, where the controller asked for them

    @property
    def loop_s(self) -> float:
        """Host seconds outside of drafting."""
        return max(0.0, self.host_s - max(0.0, self.propose_s - self.draft_s))


class Committed(NamedTuple):
    """The round loop reports tokens that are now final."""

    tokens: tuple[int, ...]
    record: RoundRecord
    finish_reason: str | None = None


@dataclass(frozen=True)
class StopSignal:
    """Why generation ends at the token just pushed ("stop" or "length")."""

    reason: str


class StopRule(Protocol):
    """Sees every committed token once, in order; the loop knows no text."""

    def push(self, token: int) -> StopSignal | None: ...

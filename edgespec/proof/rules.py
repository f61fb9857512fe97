"""The proof that the shipped verifiers are lossless, short enough to run on a user's machine (`edgespec check`).

Random tables over three tokens stand for target and draft. The production rules judge drafts drawn by the production
`draw_siblings`, round after round until an EOS or a length limit; every outcome is enumerated and the joint
distribution of the emitted tokens is compared with the target's own. Broken rules (`edgespec.proof.faults`) must fail
the same test. It proves the algorithm; a real pair is examined by `edgespec.proof.goodness` and the check command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Noise, Purpose
from edgespec.proof.enumeration import emitted_distribution, total_variation
from edgespec.proof.goodness import Emission, RecordingVerifier, pit_pvalue
from edgespec.sampling import Sampler, SamplingParams
from edgespec.types import Candidates, Proposal
from edgespec.verify import Verifier, create_verifier

__all__ = [
    "Draft",
    "Emission",
    "RecordingVerifier",
    "RuleProof",
    "Toy",
    "coupled_mismatches",
    "enumerate_rules",
    "pit_pvalue",
    "play_round",
    "prove",
]

Tokens = tuple[int, ...]
LIMIT = 1e-12
_PROMPT = (1, 1)


@dataclass(frozen=True)
class RuleProof:
    """Result of one enumeration. passed: total_variation below 1e-12 and no noise key used for two decisions."""

    name: str
    shape: str
    total_variation: float
    n_reused_keys: int
    n_worlds: int

    @property
    def passed(self) -> bool:
        return self.total_variation < LIMIT and self.n_reused_keys == 0


@lru_cache(maxsize=4096)
def _table_row(seed: int, stream: int, n_vocab: int, tokens: Tokens) -> NDArray[np.float64]:
    return np.random.default_rng([seed, stream, *tokens]).standard_normal(n_vocab)


@lru_cache(maxsize=64)
def _draft_sampler(n_vocab: int, keep: int) -> Sampler:
    return Sampler(SamplingParams(top_k=keep), n_vocab=n_vocab, eos_ids=(0,), n_prompt=len(_PROMPT))


@dataclass(frozen=True)
class Toy:
    """A random target over `n_vocab` tokens whose logits depend on the whole prefix, and its sampling parameters.

    Token 0 is the EOS. n_tokens: length limit.
    """

    seed: int = 0
    n_vocab: int = 3
    n_tokens: int = 4
    params: SamplingParams = field(default_factory=SamplingParams)
    scale: float = 1.0

    def logits(self, tokens: Sequence[int], stream: int = 0) -> NDArray[np.float64]:
        """[n_vocab] logits after `tokens`; each stream is a model of its own."""
        return self.scale * _table_row(self.seed, stream, self.n_vocab, tuple(tokens))

    @cached_property
    def sampler(self) -> Sampler:
        """The target's, one for all rounds."""
        return Sampler(self.params, n_vocab=self.n_vocab, eos_ids=(0,), n_prompt=len(_PROMPT))

    def is_final(self, emitted: Tokens) -> bool:
        return len(emitted) == self.n_tokens or emitted[-1:] == (0,)

    def own_distribution(self) -> dict[Tokens, float]:
        """What plain sampling emits: the product of the target's probabilities."""
        sampler = self.sampler
        result: dict[Tokens, float] = {}
        states: dict[Tokens, float] = {(): 1.0}
        while states:
            following: dict[Tokens, float] = {}
            for emitted, chance in states.items():
                candidates = sampler.row(self.logits(_PROMPT + emitted), [*_PROMPT, *emitted])
                for token, p in zip(candidates.ids.tolist(), candidates.probs().tolist(), strict=True):
                    after = (*emitted, token)
                    (result if self.is_final(after) else following)[after] = chance * p
            states = following
        return result


@dataclass(frozen=True)
class Draft:
    """How a proposal is shaped and drawn.

    parents: of each token, -1 for the first ones; siblings stand together, in the order in which they are drawn.
    keep: the draft samples its best `keep` tokens only (0: all). points: tokens proposed as point masses, not sampled.
    """

    shape: str
    parents: tuple[int, ...]
    keep: int = 0
    points: tuple[int, ...] = ()

    @classmethod
    def chain(cls, k: int, keep: int = 0, points: tuple[int, ...] = ()) -> Draft:
        """A chain of k tokens."""
        extra = (f", top {keep}" if keep else "") + (f", {len(points)} point masses" if points else "")
        return cls(f"chain of {k}{extra}", tuple(range(-1, k - 1)), keep, points)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def candidates(self, toy: Toy, tokens: Sequence[int]) -> Candidates:
        """The draft model's distribution after `tokens`."""
        return _draft_sampler(toy.n_vocab, self.keep).row(toy.logits(tokens, stream=1), tokens)

    def propose(self, toy: Toy, rule: Verifier, noise: Noise, history: Sequence[int], round: int) -> Proposal:
        """Draw all nodes, siblings together and without replacement."""
        tokens: list[int] = []
        dists: list[Candidates | None] = []
        while (node := len(tokens)) < len(self.parents):
            parent = self.parents[node]
            n = self.parents.count(parent)
            before = [*history, *(tokens[i] for i in path_to(self.parents, parent))]
            candidates = self.candidates(toy, before)
            if node in self.points:
                best = candidates.ids[np.argsort(-candidates.logits, kind="stable")][:n].tolist()
                tokens += best + [best[0]] * (n - len(best))
                dists += [None] * n
            else:
                index = 0 if self.is_chain else parent + 1  # chains draw with index 0, as drafters do
                drawn = rule.draw_siblings(noise, candidates, n, len(before), round, index)
                tokens += drawn + [drawn[0]] * (n - len(drawn))
                dists += [candidates] * len(drawn) + [None] * (n - len(drawn))
        return Proposal(tokens, "table", None if self.is_chain else list(self.parents), dists)


DRAFTS = (
    Draft.chain(1),
    Draft.chain(2),
    Draft.chain(3),
    Draft.chain(2, keep=2),
    Draft.chain(2, points=(0, 1)),
    Draft.chain(3, points=(1,)),
)
TREES = (
    Draft("2 siblings", (-1, -1)),
    Draft("3 siblings, top 2", (-1, -1, -1), keep=2),
    Draft("2 point mass siblings", (-1, -1), points=(0,)),
    Draft("2 siblings, the first continued", (-1, -1, 0)),
    Draft("2 siblings, each with 2", (-1, -1, 0, 0, 1, 1), keep=2),
)
FILTERED = SamplingParams(temperature=1.3, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.3, min_tokens=1)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Indices from the root down to `node`; empty for -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


Propose = Callable[[Toy, Verifier, Noise, Sequence[int], int], Proposal]


def play_round(toy: Toy, rule: Verifier, propose: Propose, noise: Noise, emitted: Tokens, round: int) -> Tokens:
    """One round as the decoder plays it: the tokens committed, cut at the EOS or the length limit."""
    history = [*_PROMPT, *emitted]
    proposal = propose(toy, rule, noise, history, round)
    parents = range(-1, len(proposal) - 1) if proposal.parents is None else proposal.parents
    paths = [path_to(parents, node) for node in range(-1, len(proposal))]
    logits = np.stack([toy.logits([*history, *(proposal.tokens[i] for i in path)]) for path in paths])
    verdict = rule.verify(proposal, logits, toy.sampler, noise, history, round)
    after = emitted
    for token in (*(proposal.tokens[i] for i in verdict.path), verdict.next_token):
        after = (*after, token)
        if toy.is_final(after):
            break
    return after[len(emitted) :]


def prove(toy: Toy, rule: Verifier, draft: Draft, name: str | None = None) -> RuleProof:
    """Enumerate all rounds of one rule on one pair of tables."""
    worlds = emitted_distribution(
        lambda noise, emitted, round: play_round(toy, rule, draft.propose, noise, emitted, round), toy.is_final
    )
    distance = total_variation(worlds.outcomes, toy.own_distribution())
    return RuleProof(name or rule.name, draft.shape, distance, len(worlds.reused), worlds.n)


def enumerate_rules(seed: int = 0) -> list[RuleProof]:
    """Every lossless rule that redraws, on chains and trees, plain and filtered targets; seconds in all."""
    return list(_proofs(seed))


def _proofs(seed: int) -> Iterator[RuleProof]:
    toys = [Toy(seed), Toy(seed + 1, params=FILTERED)]
    for name in ("rejection", "block"):
        rule = create_verifier(name)
        for draft in (*DRAFTS, *(TREES if rule.supports_tree else ())):
            for toy in toys:
                suffix = "" if toy.params is not FILTERED else ", filtered target"
                yield prove(toy, rule, replace(draft, shape=draft.shape + suffix))


def coupled_mismatches(n_models: int = 1000, seed: int = 0) -> int:
    """How many of `n_models` random pairs emit under the coupled rule anything but plain sampling's tokens.

    Each pair has its own tables, vocabulary of 2 to 9, parameters, draft shape and seed; the noise is the real one.
    """
    rule = create_verifier("coupled")
    drafts = (*DRAFTS, *TREES)
    params = (SamplingParams(), SamplingParams(temperature=0.0), FILTERED, SamplingParams(top_k=3, frequency_penalty=1))
    n_wrong = 0
    for number in range(n_models):
        toy = Toy(seed + number, 2 + number % 8, 6, params[number // 8 % 4], scale=2.0)
        draft = drafts[number % len(drafts)]
        noise = Noise(number)
        emitted: Tokens = ()
        round = 0
        while not toy.is_final(emitted):
            emitted += play_round(toy, rule, draft.propose, noise, emitted, round)
            round += 1
        n_wrong += emitted != _plain(toy, noise)
    return n_wrong


def _plain(toy: Toy, noise: Noise) -> Tokens:
    """Plain sampling: one row, one draw, one token."""
    sampler = toy.sampler
    emitted: Tokens = ()
    while not toy.is_final(emitted):
        history = [*_PROMPT, *emitted]
        emitted = (*emitted, noise.draw(sampler.row(toy.logits(history), history), Purpose.TARGET, len(history)))
    return emitted

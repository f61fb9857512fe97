"""The exit of self-speculation: what turns the target's residual stream after a third of its layers into a guess.

A norm, a skip matrix and a SwiGLU adapter in front of the target's own head (Kangaroo, arXiv:2404.18911, without its
attention: nothing of the draft needs a cache of its own).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec_models.core import Batch, DraftCore, Facts, silu, soft_cross_entropy
from edgespec_models.eagle import survival_of
from edgespec_models.layers import ReducedHead, RmsNorm, linear

__all__ = ["ExitCore"]


class ExitCore(DraftCore):
    """Row p has the residual stream of position p and predicts the token at p + 1."""

    kind = "exit"

    def __init__(self, facts: Facts, taps: tuple[str, ...], n_ff: int = 1536) -> None:
        super().__init__(facts, taps)
        width, eps = facts.n_embd, facts.norm_eps
        self.n_ff_exit = n_ff
        self.in_norm = RmsNorm(width, eps)
        self.skip = linear(width, width)
        self.gate, self.up, self.down = linear(width, n_ff), linear(width, n_ff), linear(n_ff, width)
        self.norm = RmsNorm(width, eps)

    def options(self) -> dict[str, object]:
        return {"n_ff": self.n_ff_exit, "exit_layer": self.facts.exit_layer}

    def start_from_target(self) -> None:
        """The identity and the target's final norm."""
        self.copy(self.norm.weight, "norm.weight")
        with torch.no_grad():
            self.skip.weight.mul_(0.1).add_(torch.eye(self.facts.n_embd))

    def output(self, stream: Tensor) -> Tensor:
        """[..., n_embd] ready for the lm head."""
        x = self.drop(self.in_norm(stream))
        result: Tensor = self.norm(self.skip(x) + self.down(silu(self.gate(x)) * self.up(x)))
        return result

    def losses(self, batch: Batch, head: ReducedHead) -> dict[str, Tensor]:
        wanted = batch.assistant[:, 1:]
        probs = batch.target_probs(head, batch.features["final"][:, :-1][wanted])
        output = self.output(batch.features[self.taps[0]][:, :-1][wanted])
        return {"exit": soft_cross_entropy(head(output), probs)}

    def survival(self, batch: Batch, head: ReducedHead, depth: int) -> Tensor:
        """The lower layers of a drafted token see true tokens only while the draft is right, so depths are alike."""
        n = batch.tokens.shape[1]
        right = batch.is_token(head(self.output(batch.features[self.taps[0]][:, :-1])).argmax(-1), batch.tokens[:, 1:])
        matches = [right[:, d : n - depth + d] for d in range(depth)]
        wanted = batch.assistant[:, 1 : n - depth + 1] & batch.assistant[:, depth:]
        return survival_of(matches, wanted)

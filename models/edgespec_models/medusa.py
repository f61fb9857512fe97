"""Medusa heads: several tokens at once from the target's last true features (arXiv:2401.10774).

Head j predicts the token j + 1 places after the last committed one, from the taps of the position before it and that
token's embedding (Hydra's observation, arXiv:2402.05109: at T > 0 the feature alone does not tell which token was
drawn). The heads share the target's lm head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgespec_models.core import Batch, DraftCore, Facts, silu, soft_cross_entropy
from edgespec_models.eagle import survival_of
from edgespec_models.layers import ReducedHead, RmsNorm, linear

__all__ = ["MedusaCore"]

HEAD_DECAY = 0.8  # weight of each further head in the loss


class MedusaCore(DraftCore):
    """Row p has the features of position p and the token at p + 1; head j predicts the token at p + 2 + j."""

    kind = "medusa"

    def __init__(self, facts: Facts, taps: tuple[str, ...], n_medusa: int = 3) -> None:
        super().__init__(facts, taps)
        width, eps = facts.n_embd, facts.norm_eps
        self.n_medusa = n_medusa
        self.tap_norm = nn.ModuleList(RmsNorm(width, eps) for _ in taps)
        self.embed_norm = RmsNorm(width, eps)
        self.add_module("in", linear((len(taps) + 1) * width, width))  # the zoo's name for it
        self.heads = nn.ModuleList(linear(width, width) for _ in range(n_medusa))
        self.norm = RmsNorm(width, eps)

    def options(self) -> dict[str, object]:
        return {"n_medusa": self.n_medusa}

    def start_from_target(self) -> None:
        """Heads that begin as the target's own head."""
        self.copy(self.norm.weight, "norm.weight")
        with torch.no_grad():
            for head in self.heads:
                head.weight.mul_(0.1)

    def outputs(self, batch: Batch) -> list[Tensor]:
        """[batch, length - 1, n_embd] for each head, ready for the lm head."""
        taps = [norm(batch.features[tap][:, :-1]) for norm, tap in zip(self.tap_norm, self.taps, strict=True)]
        joined = torch.cat([*taps, self.embed_norm(batch.embeddings[:, 1:])], dim=-1)
        base = taps[-1] + silu(self.get_submodule("in")(self.drop(joined)))
        return [self.norm(base + silu(head(base))) for head in self.heads]

    def losses(self, batch: Batch, head: ReducedHead) -> dict[str, Tensor]:
        wanted = batch.assistant[:, 2:]
        probs = batch.target_probs(head, batch.features["final"][:, 1:-1][wanted])
        places = torch.full(wanted.shape, -1, device=wanted.device)
        places[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
        parts = {}
        for j, output in enumerate(self.outputs(batch)):
            # head j of row p is judged by what the target says at position p + 1 + j
            rows = wanted[:, j:]
            loss = soft_cross_entropy(head(output[:, : rows.shape[1]][rows]), probs[places[:, j:][rows]])
            parts[f"head{j + 1}"] = loss * HEAD_DECAY**j
        return parts

    def survival(self, batch: Batch, head: ReducedHead, depth: int) -> Tensor:
        matches, n = [], batch.tokens.shape[1]
        for j, output in enumerate(self.outputs(batch)[:depth]):
            chosen = head(output[:, : n - 1 - depth]).argmax(-1)
            matches.append(batch.is_token(chosen, batch.tokens[:, 2 + j : n + 1 - depth + j]))
        wanted = batch.assistant[:, 2 : n + 1 - depth] & batch.assistant[:, 1 + depth :]
        return survival_of(matches, wanted)

"""TinyDraft: a few wide layers of a standard Llama model on the target's own (frozen, tied) embedding table.

Distilled on the target's distribution over the reduced vocabulary (arXiv:2310.08461). Because the table is the
target's, only the layers are trained and shipped; put together they load in any Llama runtime.
"""

from __future__ import annotations

from torch import Tensor, nn

from edgespec_models.core import Batch, DraftCore, Facts, soft_cross_entropy
from edgespec_models.eagle import survival_of
from edgespec_models.layers import LlamaLayer, ReducedHead, RmsNorm

__all__ = ["TinyDraftCore"]


class TinyDraftCore(DraftCore):
    """Row p has seen the tokens up to p and predicts the token at p + 1."""

    kind = "tinydraft"

    def __init__(self, facts: Facts, taps: tuple[str, ...] = (), layers: tuple[int, ...] | None = None) -> None:
        super().__init__(facts, ())
        self.from_layers = layers or (0, facts.n_layers // 2, facts.n_layers - 1)
        self.layers = nn.ModuleList(LlamaLayer(facts) for _ in self.from_layers)
        self.norm = RmsNorm(facts.n_embd, facts.norm_eps)

    def options(self) -> dict[str, object]:
        return {"n_layers": len(self.layers), "from_layers": list(self.from_layers)}

    def start_from_target(self) -> None:
        """Some of the target's own layers."""
        for layer, index in zip(self.layers, self.from_layers, strict=True):
            self.copy_layer(layer, index)
        self.copy(self.norm.weight, "norm.weight")

    def output(self, batch: Batch) -> Tensor:
        """[batch, length, n_embd] ready for the lm head."""
        x = self.drop(batch.embeddings)
        cos, sin = self.tables(x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.norm(x)
        return result

    def losses(self, batch: Batch, head: ReducedHead) -> dict[str, Tensor]:
        wanted = batch.assistant[:, 1:]
        probs = batch.target_probs(head, batch.features["final"][:, :-1][wanted])
        return {"next": soft_cross_entropy(head(self.output(batch)[:, :-1][wanted]), probs)}

    def survival(self, batch: Batch, head: ReducedHead, depth: int) -> Tensor:
        n = batch.tokens.shape[1]
        right = batch.is_token(head(self.output(batch)[:, :-1]).argmax(-1), batch.tokens[:, 1:])
        matches = [right[:, d : n - depth + d] for d in range(depth)]
        wanted = batch.assistant[:, 1 : n - depth + 1] & batch.assistant[:, depth:]
        return survival_of(matches, wanted)

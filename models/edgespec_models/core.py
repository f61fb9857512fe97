"""What the four kinds of trained drafts share: the facts of a target, a batch of its features, and the base class.

A core is a torch module whose parameters carry the names of the zoo format. It sees features that the production
runtime wrote and never runs the target. Knows no files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from edgespec_export.config import ModelConfig
from edgespec_export.rope import tables
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from edgespec_models.layers import LlamaLayer, ReducedHead

__all__ = ["Batch", "DraftCore", "Facts", "soft_cross_entropy"]

Weights = Callable[[str], NDArray[np.float32]]


@dataclass(frozen=True)
class Facts:
    """The target as a draft sees it: its shape, and its tensors under Hugging Face's names without `model.`."""

    config: ModelConfig
    tensor: Weights
    tokenizer_hash: str | None = None
    exit_layer: int | None = None

    @property
    def n_embd(self) -> int:
        return self.config.n_embd

    @property
    def n_ff(self) -> int:
        return self.config.n_ff

    @property
    def n_heads(self) -> int:
        return self.config.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.config.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def norm_eps(self) -> float:
        return self.config.norm_eps

    @property
    def n_layers(self) -> int:
        return self.config.n_layers

    @property
    def head_name(self) -> str:
        return "embed_tokens.weight" if self.config.is_tied else "lm_head.weight"


@dataclass
class Batch:
    """Rows of the corpus with the target's features.

    tokens: [batch, length] int64. assistant: the same shape, True where the loss counts. embeddings: [batch, length,
    n_embd] of the tokens. features: tap -> [batch, length, n_embd]; `final` is always there. places: [n_vocab] index
    of each token in the reduced vocabulary, -1 elsewhere.
    """

    tokens: Tensor
    assistant: Tensor
    embeddings: Tensor
    features: dict[str, Tensor]
    places: Tensor = field(repr=False)

    def target_probs(self, head: ReducedHead, final: Tensor) -> Tensor:
        """[n, n_vocab_draft] the target's distribution over the reduced vocabulary, from final features [n, n_embd]."""
        with torch.no_grad():
            return torch.softmax(head(final.to(torch.bfloat16)).float(), dim=-1)

    def is_token(self, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Whether reduced ids `chosen` stand for `tokens`."""
        return chosen == self.places[tokens]


class DraftCore(nn.Module, ABC):
    """A draft in training."""

    kind: str

    def __init__(self, facts: Facts, taps: tuple[str, ...]) -> None:
        super().__init__()
        self.facts = facts
        self.taps = taps
        self.dropout = 0.0

    @abstractmethod
    def start_from_target(self) -> None:
        """Begin from the target's own weights."""

    @abstractmethod
    def losses(self, batch: Batch, head: ReducedHead) -> dict[str, Tensor]:
        """Named parts of the loss; their sum is minimised."""

    @abstractmethod
    def survival(self, batch: Batch, head: ReducedHead, depth: int) -> Tensor:
        """[depth] share of positions whose first 1..depth drafted tokens are all the text's own (greedy rows)."""

    def options(self) -> dict[str, object]:
        """What config.json says beyond the target's shape."""
        return {}

    def drop(self, x: Tensor) -> Tensor:
        """Some of what the draft is given left out, in training: a small corpus is seen several times."""
        return functional.dropout(x, self.dropout, self.training)

    def copy(self, parameter: Tensor, name: str) -> None:
        """Overwrite a parameter with a tensor of the target."""
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(self.facts.tensor(name))))

    def copy_layer(self, layer: LlamaLayer, index: int) -> None:
        """Overwrite a layer with one of the target's."""
        for name, parameter in layer.named_parameters():
            self.copy(parameter, f"layers.{index}.{name}")

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_dim / 2] of the target's rotary embedding."""
        cos, sin = tables(self.facts.config.rope, self.facts.head_dim, max(length, 2))
        device = next(self.parameters()).device
        return torch.from_numpy(cos[:length]).to(device), torch.from_numpy(sin[:length]).to(device)


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean cross-entropy of [n, m] logits against distributions [n, m]; 0 for no rows."""
    if not len(probs):
        return logits.sum() * 0.0
    loss: Tensor = _SoftCrossEntropy.apply(logits, probs)
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """Written out, so that the large [n, m] arrays are passed over as seldom as possible (a fifth of a step)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        values = logits.float()
        values -= values.amax(-1, keepdim=True)
        agreement = torch.einsum("nm,nm->n", values, probs)
        values.exp_()
        total = values.sum(-1, keepdim=True)
        loss = (total.squeeze(-1).log() - agreement).mean()
        values /= total
        values -= probs
        ctx.save_for_backward(values)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return (difference * (gradient / len(difference))).to(ctx.dtype), None


def silu(x: Tensor) -> Tensor:
    return functional.silu(x)

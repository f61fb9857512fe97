"""The EAGLE head: a decoder layer (or a few) over (target feature, next token's embedding), trained on its rollouts.

arXiv:2401.15077 (features and tokens), 2408.15766 and 2503.01840 (several of its own steps in training, several taps
fused). Step s of a rollout replaces the true feature by the head's own output of the row before, and its attention sees
true rows up to s - 1 places back and its own rows after them: exactly what happens while drafting.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgespec_models.core import Batch, DraftCore, Facts, soft_cross_entropy
from edgespec_models.layers import LlamaLayer, ReducedHead, RmsNorm, linear

__all__ = ["EagleCore"]

STREAM_SCALE = 8.0  # the residual stream's size at the last layer, which that layer's weights are made for
STEP_DECAY = 0.8  # weight of each further rollout step in the loss


class EagleCore(DraftCore):
    """Row p pairs the feature of position p with the token at p + 1 and predicts the token at p + 2."""

    kind = "eagle"

    def __init__(self, facts: Facts, taps: tuple[str, ...], n_steps: int = 3, n_layers: int = 1) -> None:
        super().__init__(facts, taps)
        width, eps = facts.n_embd, facts.norm_eps
        self.n_steps = n_steps
        self.fuse_norm = nn.ModuleList(RmsNorm(width, eps) for _ in taps)
        self.fuse = linear(len(taps) * width, width)
        self.embed_norm = RmsNorm(width, eps)
        self.feature_norm = RmsNorm(width, eps)
        self.fc = linear(2 * width, width)
        self.layers = nn.ModuleList(LlamaLayer(facts) for _ in range(n_layers))
        self.norm = RmsNorm(width, eps)

    def options(self) -> dict[str, object]:
        return {"n_layers": len(self.layers)}

    def start_from_target(self) -> None:
        """The target's last layers and norm; fusions that pass the last tap and the token on."""
        first = max(0, self.facts.n_layers - len(self.layers))
        for index, layer in enumerate(self.layers):
            self.copy_layer(layer, min(first + index, self.facts.n_layers - 1))
        self.copy(self.norm.weight, "norm.weight")
        width = self.facts.n_embd
        with torch.no_grad():
            self.fuse_norm[-1].weight.copy_(1 / self.norm.weight)  # back to the direction of the residual stream
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, -width:] += torch.eye(width)
            self.fc.weight[:, :width] += 0.3 * STREAM_SCALE * torch.eye(width)
            self.fc.weight[:, width:] += STREAM_SCALE * torch.eye(width)

    def fused(self, batch: Batch) -> Tensor:
        """[batch, length, n_embd] true features g."""
        parts = [norm(batch.features[tap]) for norm, tap in zip(self.fuse_norm, self.taps, strict=True)]
        output: Tensor = self.fuse(self.drop(torch.cat(parts, dim=-1)))
        return output

    def rollout(self, batch: Batch, n_steps: int) -> list[Tensor]:
        """For each step the normed outputs [batch, length - 1, n_embd]; row p of step s predicts the token at p + 2."""
        tokens = batch.embeddings[:, 1:]
        cos, sin = self.tables(tokens.shape[1])
        feature = self.fused(batch)[:, :-1]
        embedded = self.embed_norm(tokens)
        keys: list[list[Tensor]] = [[] for _ in self.layers]
        values: list[list[Tensor]] = [[] for _ in self.layers]
        outputs = []
        for _ in range(n_steps):
            x = self.fc(self.drop(torch.cat([embedded, self.feature_norm(feature)], dim=-1)))
            for index, layer in enumerate(self.layers):
                query, key, value = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
                keys[index].append(key)
                values[index].append(value)
                x = layer.finish(x, rolled_attention(query, keys[index], values[index]))
            outputs.append(self.norm(x))
            feature = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return outputs

    def losses(self, batch: Batch, head: ReducedHead) -> dict[str, Tensor]:
        wanted = batch.assistant[:, 2:]
        probs = batch.target_probs(head, batch.features["final"][:, 1:-1][wanted])
        parts = {}
        for step, output in enumerate(self.rollout(batch, self.n_steps)):
            # row p of step s rests on s rows of its own, so the first s rows have none to rest on
            usable = wanted.clone()
            usable[:, :step] = False
            rows = usable[wanted]
            loss = soft_cross_entropy(head(output[:, :-1][usable]), probs[rows])
            parts[f"step{step + 1}"] = loss * STEP_DECAY**step
        return parts

    def survival(self, batch: Batch, head: ReducedHead, depth: int) -> Tensor:
        """[depth] share of positions whose first 1..depth drafted tokens are all the text's own."""
        matches = []
        n = batch.tokens.shape[1]
        for step, output in enumerate(self.rollout(batch, depth)):
            right = batch.is_token(head(output[:, :-1]).argmax(-1), batch.tokens[:, 2:])
            matches.append(right[:, step : n - 1 - depth + step])
        wanted = batch.assistant[:, 2 : n + 1 - depth] & batch.assistant[:, 1 + depth :]
        return survival_of(matches, wanted)


def rolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the newest step: keys of step 0 up to s places back, then one row of each later step.

    query: [batch, heads, length, dim] of step s = len(keys) - 1; keys[j]: those of step j. Row p sees rows 0..p - s of
    step 0 and row p - s + j of step j (1 <= j <= s).
    """
    length, scale, step = query.shape[-2], query.shape[-1] ** -0.5, len(keys) - 1
    if step == 0:
        return nn.functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    places = torch.arange(length, device=query.device)
    hidden = places[None, :] > places[:, None] - step
    scores = ((query @ keys[0].transpose(-1, -2)) * scale).float().masked_fill(hidden, -1e9)
    shifted = [(_delayed(keys[j], step - j), _delayed(values[j], step - j)) for j in range(1, step + 1)]
    own = torch.stack([(query * key).sum(-1).float() * scale for key, _ in shifted], dim=-1)
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1).to(query.dtype)
    output = weights[..., :length] @ values[0]
    for index, (_, value) in enumerate(shifted):
        output = output + weights[..., length + index, None] * value
    return output


def _delayed(x: Tensor, n: int) -> Tensor:
    """x moved n rows down along the length axis."""
    return x if n == 0 else torch.cat([x[..., :n, :], x[..., :-n, :]], dim=-2)


def survival_of(matches: list[Tensor], wanted: Tensor) -> Tensor:
    """[depth] mean over `wanted` of the running product of `matches`, each [batch, n]."""
    alive = torch.stack(matches).to(torch.float32).cumprod(0)
    return alive[:, wanted].mean(-1)

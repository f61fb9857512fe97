"""The graphs of trained drafts: a reduced lm head on a small model, an EAGLE layer, Medusa heads or an exit.

Owns their mathematics and the names of their inputs and outputs. Weights come from a zoo folder and from the target's
tables; `DraftMatrices` knows which. The formulas are those that `edgespec_models` trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from edgespec.zoo_config import ZooConfig
from edgespec_export.config import ModelConfig
from edgespec_export.layers import LayerGraph, Shape
from edgespec_export.matrices import Matrices, StoredMatrix, StoredTable, TensorStore, Weights
from edgespec_export.options import ExportOptions
from edgespec_export.target_tables import TableRows, TargetTables

__all__ = ["N_EXTRA", "DraftGraph", "DraftMatrices", "EagleGraph", "ExitGraph", "FuseGraph", "MedusaGraph",
           "TinyDraftGraph"]  # fmt: skip

N_EXTRA = 64  # tokens of the context outside of the reduced vocabulary that a call can have


class DraftMatrices(Matrices):
    """The zoo's matrices, and the target's tables as they are; the head is the target's on the reduced vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        options: ExportOptions,
        weights: Weights,
        store: TensorStore,
        tables: TargetTables,
        vocabulary: NDArray[np.int64],
    ) -> None:
        super().__init__(config, options, weights, store)
        self.tables, self.vocabulary = tables, vocabulary

    def head(self) -> StoredMatrix:
        if "lm_head" not in self._matrices:
            # the embedding is rounded less than a head of its own, so a tied head comes from there
            source = self.tables.embedding if self.tables.is_tied else self.tables.head
            bits, block = self.options.head
            self._matrices["lm_head"] = self.head_rows("lm_head", source.rows(self.vocabulary), bits, block)
        return self._matrices["lm_head"]

    def embedding(self) -> StoredTable:
        return self._target_table("embed_tokens", self.tables.embedding)

    def head_table(self) -> StoredTable:
        """Rows of the whole head, for tokens outside of the reduced vocabulary."""
        return self.embedding() if self.tables.is_tied else self._target_table("lm_head_rows", self.tables.head)

    def _target_table(self, name: str, table: TableRows) -> StoredTable:
        if name not in self._tables:
            self._tables[name] = self._stored_table(name, table)
        return self._tables[name]

    def _stored_table(self, name: str, table: TableRows) -> StoredTable:
        if table.quantized is not None:
            return self.store_table(name, table.quantized)
        assert table.floats is not None
        if self.options.bits == 32:
            self.store.add(f"{name}.weight", table.floats)
            return StoredTable((f"{name}.weight",), {})
        return self.store_table(name, self._quantized(name, table.floats, 8, self.options.block_size))


class DraftGraph(LayerGraph, ABC):
    """What all drafts share: logits over the reduced vocabulary and over `extra_ids`."""

    matrices: DraftMatrices

    def __init__(
        self,
        zoo: ZooConfig,
        config: ModelConfig,
        options: ExportOptions,
        matrices: DraftMatrices,
        *,
        has_tree: bool = False,
    ) -> None:
        super().__init__(config, options, matrices, has_tree=has_tree)
        self.zoo = zoo

    @abstractmethod
    def build(self) -> None:
        """Emit the whole graph."""

    def reduced_head(self, rows: str, shape: Shape) -> None:
        """Declares `extra_ids` and `logits`; rows: [n, n_embd]."""
        extra_ids = self.take("extra_ids", "INT64", [N_EXTRA])
        known = self.head(rows, "logits/known")
        extra = self.lookup(self.matrices.head_table(), extra_ids, "extra/rows")
        turned = self.node("Transpose", [extra], ["extra/columns"], perm=[1, 0])
        others = self.node("MatMul", [rows, turned], ["logits/extra"])
        n_logits = len(self.matrices.vocabulary) + N_EXTRA
        self.node("Concat", [known, others], [self.give("logits", [*shape, n_logits])], axis=-1)

    def wanted_rows(self, rows: str) -> str:
        """Declares `logits_rows` and picks those of the flat `rows`."""
        wanted = self.take("logits_rows", "INT64", ["n_logits"])
        return self.node("Gather", [rows, wanted], ["logits_rows/out"], axis=0)

    def taps(self, norms: str, source: str) -> list[str]:
        """Cuts `source` [n, n_taps * n_embd] and norms each part by its own weights."""
        count, d = len(self.zoo.taps), self.config.n_embd
        pieces = [f"taps/{index}" for index in range(count)]
        self.split(source, pieces, [d] * count)
        return [self.norm(f"{norms}.{index}", piece)[0] for index, piece in enumerate(pieces)]

    def features(self, rows: int | str, count: int = 1) -> str:
        return self.take("features", "FLOAT", [rows, count * self.config.n_embd])


class TinyDraftGraph(DraftGraph):
    """A decoder of the Llama family with a reduced head."""

    def build(self) -> None:
        ids = self.take("input_ids", "INT64", ["batch", "sequence_length"])
        self.declare_layers(0, self.config.n_layers)
        residual, delta = self.lookup(self.matrices.embedding(), ids, "embed_tokens/out"), ""
        for index in range(self.config.n_layers):
            residual, delta = self.layer(index, residual, delta)
        normed, _ = self.norm("norm", residual, delta)
        self.reduced_head(self.wanted_rows(self.flat(normed, "norm/flat")), ["n_logits"])


class EagleGraph(DraftGraph):
    """A layer or a few over the features of a position and the token after it (arXiv:2401.15077, 2503.01840).

    x = fc([norm(emb(t)), norm(g)]); own = layers(x), the feature that a drafted row hands to the next; logits =
    head(norm(own)).
    """

    def build(self) -> None:
        d = self.config.n_embd
        ids = self.take("input_ids", "INT64", [1, "sequence_length"])
        features = self.reshape(self.features("sequence_length"), "features/rows", [1, -1, d])
        self.declare_layers(0, self.config.n_layers, batch=1)
        embedded, _ = self.norm("embed_norm", self.lookup(self.matrices.embedding(), ids, "embed_tokens/out"))
        normed, _ = self.norm("feature_norm", features)
        both = self.node("Concat", [embedded, normed], ["fc/in"], axis=-1)
        residual, delta = self.linear("fc", both), ""
        for index in range(self.config.n_layers):
            residual, delta = self.layer(index, residual, delta)
        normed, own = self.norm("norm", residual, delta)
        self.flat(own, self.give("hidden.own", ["sequence_length", d]))
        self.reduced_head(self.wanted_rows(self.flat(normed, "norm/flat")), ["n_logits"])


class FuseGraph(DraftGraph):
    """The features of several layers as one: a matrix on the normed taps (arXiv:2503.01840)."""

    def build(self) -> None:
        features = self.features("sequence_length", len(self.zoo.taps))
        joined = self.node("Concat", self.taps("fuse_norm", features), ["fuse/in"], axis=-1)
        self.linear("fuse", joined, output=self.give("hidden.fused", ["sequence_length", self.config.n_embd]))


class MedusaGraph(DraftGraph):
    """Residual heads on the target's features and the last token (arXiv:2401.10774, 2402.05109).

    base = f + silu(in([norm(tap_i)..., norm(emb(t))])) with f the normed final tap; r_j = base + silu(head_j(base));
    logits_j = head(norm(r_j)).
    """

    def build(self) -> None:
        n_heads, d = self.zoo.n_medusa, self.config.n_embd
        ids = self.take("input_ids", "INT64", [1, 1])
        taps = self.taps("tap_norm", self.features(1, len(self.zoo.taps)))
        row = self.flat(self.lookup(self.matrices.embedding(), ids, "embed_tokens/out"), "embed_tokens/flat")
        joined = self.node("Concat", [*taps, self.norm("embed_norm", row)[0]], ["in/in"], axis=-1)
        base = self.node("Add", [taps[-1], self.silu(self.linear("in", joined), "in")], ["base"])
        stacked = self.linear("heads", base, [f"heads.{index}" for index in range(n_heads)])
        heads = self.reshape(self.silu(stacked, "heads"), "heads/rows", [n_heads, d])
        normed, _ = self.norm("norm", self.node("Add", [heads, base], ["heads/sum"]))
        self.reduced_head(normed, [n_heads])


class ExitGraph(DraftGraph):
    """A guess from the residual stream of the lower layers (arXiv:2404.18911).

    x = norm(h); y = skip(x) + down(silu(gate(x)) * up(x)); logits = head(norm(y)).
    """

    def build(self) -> None:
        normed, _ = self.norm("in_norm", self.features("sequence_length"))
        skipped = self.linear("skip", normed)
        final, _ = self.norm("norm", self.node("Add", [skipped, self.gated("exit", normed, "{}")], ["exit/sum"]))
        self.reduced_head(final, ["sequence_length"])

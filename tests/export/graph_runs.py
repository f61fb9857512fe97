"""Runs exported graphs with onnxruntime alone, as a host would: caches bound once, everything else fed by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

CAPACITY = 64


class Graph:
    """One .onnx file; graphs that are given the same `cache` share it."""

    def __init__(self, path: Path, cache: dict[str, Any] | None = None) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {port.name: port.shape for port in self.session.get_inputs()}
        self.outputs = [port.name for port in self.session.get_outputs() if not port.name.startswith("present.")]
        self.cache = {} if cache is None else cache
        for name, shape in self.inputs.items():
            if name.startswith("past_key_values."):
                zeros = np.zeros((1, shape[1], CAPACITY, shape[3]), np.float32)
                self.cache.setdefault(name, ort.OrtValue.ortvalue_from_numpy(zeros))

    def run(self, past: int = 0, n: int = 0, **feeds: Any) -> dict[str, np.ndarray]:
        """past, n: tokens in the cache and in this call, for graphs with a cache."""
        binding = self.session.io_binding()
        feeds["seqlens_k"] = np.array([past + n - 1], np.int32)
        feeds["total_sequence_length"] = np.array(past + n, np.int32)
        feeds.setdefault("logits_rows", np.arange(n, dtype=np.int64))
        for name in self.inputs:
            if name in self.cache:
                binding.bind_ortvalue_input(name, self.cache[name])
                binding.bind_ortvalue_output(name.replace("past_key_values", "present"), self.cache[name])
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        fetched = binding.get_outputs()[-len(self.outputs) :]
        return {name: value.numpy() for name, value in zip(self.outputs, fetched, strict=True)}


def tree_inputs(parents: Sequence[int], past: int) -> dict[str, np.ndarray]:
    """position_ids and attention_bias of rows with `parents` (-1: the last cached token)."""
    n = len(parents)
    bias = np.full((1, 1, n, past + n), -np.inf, np.float32)
    bias[..., :past] = 0
    depths = np.zeros((1, n), np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            bias[0, 0, row] = bias[0, 0, parent]
            depths[0, row] = depths[0, parent] + 1
        bias[0, 0, row, past + row] = 0
    return {"position_ids": depths + past, "attention_bias": bias}


def branches(parents: Sequence[int]) -> list[list[int]]:
    """Rows from the root to each leaf."""
    found = []
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found

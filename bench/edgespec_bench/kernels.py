"""Where the time of a round's target call goes: by part of the graph and number of rows.

Two sessions take turns on the same calls: one as production opens it, whose time counts, and one that writes down every
node. Writing costs a few microseconds a node, which a Reshape shows, since it does nothing else; that much is taken off
each node, and what the nodes do not explain is "between nodes" (dispatch, threads that wait for each other).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends import load_model
from edgespec.backends.onnx.devices import create_runtime
from edgespec.backends.onnx.model import OnnxModel
from edgespec.backends.onnx.probe import open_session
from edgespec.errors import ConfigError
from edgespec.pairs import ensure
from edgespec.types import Session

__all__ = ["BETWEEN", "DEFAULT_ROWS", "part_of", "profile_round", "split_events", "table", "weight_bytes"]

DEFAULT_ROWS = (1, 2, 4, 5, 6, 8)
BETWEEN, TOTAL = "between nodes", "total"
_PAST, _REPEATS = 100, 24
_TICK_MS = 1e-3  # of the profiler's clock: shorter nodes take no time on it
_MATRICES = {"qkv_proj": "qkv", "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_up": "gate_up",
             "gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down", "logits": "head"}  # fmt: skip
_OPERATORS = {"GroupQueryAttention": "attention", "RowsAttention": "attention",
              "SkipSimplifiedLayerNormalization": "norms",
              "SimplifiedLayerNormalization": "norms"}  # fmt: skip
_PRODUCTS = ("MatMulNBits", "RowsProduct", "MatMul", "Gemm", "MatMulIntegerToFloat", "MatMulInteger", "FusedMatMul")


def profile_round(
    model: str | Path,
    rows: Sequence[int] = DEFAULT_ROWS,
    threads: int = 2,
    repeats: int = _REPEATS,
    past: int = _PAST,
    device_options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The parts of calls of so many rows on `past` cached tokens: one dictionary for each part and row count.

    model: a known pair, or a bundle's folder. device_options: such as kernels=native. Keys: rows, part, ms (median),
    share (of the call), nodes; of products also shape ([n, k]; None where a part has several), weight_mb, gb_s (weights
    read a second) and gops. The parts "between nodes" and "total" (the call as production runs it) close each row
    count. Raises ConfigError for rows < 1 or a model that takes fewer.
    """
    loaded = load_model(ensure(str(model)), threads=threads, device_options=device_options)
    try:
        if not isinstance(loaded, OnnxModel):
            raise ConfigError(f"{model} has graphs of fixed shapes: only bundles for the CPU can be profiled by node")
        _check_rows(rows, loaded.info.max_rows, loaded.info.n_ctx - past)
        return _profile(loaded, sorted(set(rows)), repeats, past)
    finally:
        loaded.close()


def _check_rows(rows: Sequence[int], most: int | None, room: int) -> None:
    limit = min(room, most or room)
    wrong = [n for n in rows if not 1 <= n <= limit]
    if wrong or not rows:
        raise ConfigError(f"rows {wrong or 'are missing'}: calls of this model have 1 to {limit} rows")


def _profile(loaded: OnnxModel, rows: Sequence[int], repeats: int, past: int) -> list[dict[str, Any]]:
    place, real = loaded.place, defaultdict[int, list[float]](list)
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as folder:
        file = Path(folder) / "nodes"
        runtime = create_runtime(loaded.folder.graph, place.device, place.threads, options=place.options, profile=file)
        watched = open_session(runtime, loaded.signature, loaded.info, loaded.capabilities)
        plain = loaded.open_session()
        calls: list[int] = []
        try:
            tokens = _fill(plain, loaded.info.n_vocab, past, max(rows))
            _fill(watched, loaded.info.n_vocab, past, max(rows))
            for _turn in range(repeats):
                for n in rows:
                    _call(plain, tokens, n)  # other row counts have emptied the caches: the first call does not count
                    real[n].append(_call(plain, tokens, n))
                    _call(watched, tokens, n)
                    _call(watched, tokens, n)
                    calls += [0, n]
        finally:
            plain.close()
            watched.close()
        events = json.loads(Path(runtime.end_profiling()).read_text(encoding="utf-8"))
    parts = split_events(events, [0, *calls], weight_bytes(loaded.folder.graph))
    return [row for n in rows for row in _rows(n, 1e3 * float(np.median(real[n])), parts[n])]


def _fill(session: Session, n_vocab: int, past: int, most: int) -> list[int]:
    """Cache `past` tokens; returns those that calls bring."""
    tokens: list[int] = np.random.default_rng(0).integers(0, n_vocab, past + most).tolist()
    session.forward(tokens[:past], logits_rows=[past - 1])
    return tokens[past:]


def _call(session: Session, tokens: Sequence[int], n: int) -> float:
    """Seconds of one call of n rows; the cache is as before."""
    past = session.n_past
    seconds = session.forward(tokens[:n], logits_rows=list(range(n))).run_s
    session.keep(past)
    return seconds


class Part:
    """Times of one part in every call: us[call]; what a call's nodes are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.us: list[float] = []
        self.nodes = 0
        self.shapes: Counter[tuple[int, int]] = Counter()
        self.weight_bytes = 0


def split_events(
    events: Sequence[Mapping[str, Any]], calls: Sequence[int], weight_bytes: Mapping[str, int]
) -> dict[int, dict[str, Part]]:
    """rows -> part -> times, from a profile's events. calls: row count of each call in order, 0: not wanted.

    weight_bytes: of each node by name; the profile does not list weights that the runtime packed.
    """
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: e["ts"])
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    if len(runs) != len(calls):
        raise ConfigError(f"the profile has {len(runs)} calls and {len(calls)} were made: was another one running?")
    nodes.sort(key=lambda e: e["ts"])
    starts = np.array([e["ts"] for e in nodes])
    idle = [e["dur"] for e in nodes if e["args"]["op_name"] == "Reshape"] or [min(e["dur"] for e in nodes)]
    cost = float(np.median(idle))
    found: dict[int, dict[str, Part]] = {n: {} for n in calls if n}
    for run, n in zip(runs, calls, strict=True):
        if n:
            first, last = np.searchsorted(starts, [run["ts"], run["ts"] + run["dur"]])
            _add_call(found[n], nodes[first:last], cost, weight_bytes)
    return found


def weight_bytes(graph: Path) -> dict[str, int]:
    """Bytes of the stored weights that each node of an .onnx file takes, by the node's name."""
    import onnx

    proto = onnx.load(graph, load_external_data=False).graph
    sizes = {item.name: _BITS.get(item.data_type, 0) * int(np.prod(item.dims)) // 8 for item in proto.initializer}
    return {node.name: sum(sizes.get(name, 0) for name in node.input) for node in proto.node}


_BITS = {1: 32, 2: 8, 3: 8, 10: 16, 21: 4, 22: 4}  # TensorProto's float, uint8, int8, float16, uint4, int4


def _add_call(
    parts: dict[str, Part], nodes: Sequence[Mapping[str, Any]], cost: float, weight_bytes: Mapping[str, int]
) -> None:
    us = defaultdict[str, float](float)
    grouped = defaultdict[str, list[Mapping[str, Any]]](list)
    for node in nodes:
        name = part_of(_plain(node["name"]), node["args"]["op_name"])
        us[name] += node["dur"] - cost
        grouped[name].append(node)
    for name, members in grouped.items():
        part = parts.setdefault(name, Part(name))
        if not part.us:
            part.nodes = len(members)
            _measure_weights(part, members, weight_bytes)
        part.us.append(max(us[name], 0.0))


def _measure_weights(part: Part, nodes: Sequence[Mapping[str, Any]], weight_bytes: Mapping[str, int]) -> None:
    """Shapes and bytes of the weights of a part's products; the profile lists the shapes of what goes in and out."""
    for node in nodes:
        ports = [node["args"].get(f"{side}_type_shape") for side in ("input", "output")]
        if node["args"]["op_name"] in _PRODUCTS and all(ports):
            source, result = (next(iter(port[0].values())) for port in ports)
            takes_gate = node["args"]["op_name"] == "RowsProduct" and part.name == "down"  # rows of gate and up
            part.shapes[result[-1], source[-1] // (2 if takes_gate else 1)] += 1
            part.weight_bytes += weight_bytes.get(_plain(node["name"]), 0)


def _plain(event: str) -> str:
    """The node's name in an event's."""
    return event.removesuffix("_kernel_time")


def part_of(node: str, operator: str) -> str:
    """What a node of one of our graphs belongs to, by its name; nodes of others' graphs go by operator."""
    if operator in _PRODUCTS:
        return next((part for text, part in _MATRICES.items() if text in node), "other products")
    return _OPERATORS.get(operator, "others")


def _rows(n: int, total_ms: float, parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    listed = sorted(parts.items(), key=lambda item: -float(np.median(item[1].us)))
    rows = [_row(n, name, float(np.median(part.us)) / 1e3, total_ms, part) for name, part in listed]
    explained = sum(row["ms"] for row in rows)
    n_nodes = sum(part.nodes for part in parts.values())
    between = {"rows": n, "part": BETWEEN, "ms": total_ms - explained, "nodes": n_nodes}
    total = {"rows": n, "part": TOTAL, "ms": total_ms, "nodes": n_nodes}
    for row in (between, total):
        rows.append({**row, "ms": round(row["ms"], 4), "share": round(row["ms"] / total_ms, 4)})
    return rows


def _row(n: int, name: str, ms: float, total_ms: float, part: Part) -> dict[str, Any]:
    row: dict[str, Any] = {"rows": n, "part": name, "ms": round(ms, 4), "share": round(ms / total_ms, 4),
                           "nodes": part.nodes}  # fmt: skip
    if part.weight_bytes:
        ms = max(ms, _TICK_MS)
        operations = 2 * n * sum(count * shape[0] * shape[1] for shape, count in part.shapes.items())
        row["shape"] = list(next(iter(part.shapes))) if len(part.shapes) == 1 else None
        row["weight_mb"] = round(part.weight_bytes / 1e6, 2)
        row["gb_s"] = round(part.weight_bytes / ms / 1e6, 1)
        row["gops"] = round(operations / ms / 1e6, 1)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds by part and rows, as lines of text."""
    counts = sorted({row["rows"] for row in rows})
    parts = list(dict.fromkeys(row["part"] for row in rows if row["part"] not in (BETWEEN, TOTAL)))
    lines = [f"{'ms by rows':24}" + "".join(f"{n:>8}" for n in counts)]
    for part in (*parts, BETWEEN, TOTAL):
        cells = {row["rows"]: row for row in rows if row["part"] == part}
        shape = next((row["shape"] for row in cells.values() if row.get("shape")), None)
        label = part if shape is None else f"{part} {shape[0]}x{shape[1]}"
        lines.append(f"{label:24}" + "".join(f"{cells[n]['ms']:8.2f}" if n in cells else f"{'':8}" for n in counts))
    return "\n".join(lines)

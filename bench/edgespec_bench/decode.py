"""The `decode` measurement: plain speed beside a peer, host time a round, fidelity of both, peak memory.

Sides take turns on the same prompt (A B A B ...), so that a slow minute of the machine hits both; ratios are of
neighbours. Owns the order of the work and the result's keys.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec_bench.fidelity import Passage, fidelity, float_bundle, model_logits, write_passages
from edgespec_bench.machine_card import commit, machine_card, versions
from edgespec_bench.memory import peak_memory
from edgespec_bench.prompts import load_prompts
from edgespec_bench.sides import SideProcess, decode_tok_s, find_side
from edgespec_bench.spread import paired_ratio, spread

if TYPE_CHECKING:
    from edgespec import LLM, SamplingParams
    from edgespec.stats import RunStats
    from edgespec.types import RoundRecord

__all__ = ["DecodeOptions", "full_rounds", "measure"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class DecodeOptions:
    """n_tokens: new tokens of a run. repeats: turns of each side on each prompt. k: drafted tokens of a round."""

    model: str = "smollm2-135m"
    threads: int = 2
    n_tokens: int = 96
    repeats: int = 3
    n_prompts: int = 8
    n_fidelity_tokens: int = 48
    k: int = 4


@dataclass
class Speeds:
    """Tokens a second, entries of the two lists measured right after each other."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"edgespec_tok_s": spread(self.ours).to_dict()}
        if self.peer:
            parts["peer_tok_s"] = spread(self.peer).to_dict()
            parts["ratio"] = paired_ratio(self.ours, self.peer).to_dict()
        return parts


def measure(options: DecodeOptions, say: Say) -> dict[str, Any]:
    """Everything, as the dictionary that is printed. Peer figures are None where it is not set up."""
    from edgespec import LLM
    from edgespec.pairs import ensure

    result: dict[str, Any] = {"machine": machine_card(), "versions": versions(), "commit": commit()}
    folder = ensure(options.model)
    peer = _start_peer(options, say)
    try:
        with LLM(folder, draft="none", exact=False, threads=options.threads) as llm:
            prompts = [llm.encode_chat(p.messages) for p in load_prompts("chat")[: options.n_prompts]]
            speeds = plain_speeds(llm, peer, prompts, options, say)
            hosts = {name: host_times(llm, options, params, say) for name, params in _host_settings(options).items()}
            fidelities = both_fidelities(llm, peer, prompts, options, say)
            info = llm.target.info
    finally:
        if peer is not None:
            peer.close()
    say("peak memory of `edgespec run`")
    kv_bytes = info.kv_bytes_per_token * (max(len(p) for p in prompts) + options.n_tokens)
    memory = peak_memory(folder, info.weight_bytes, kv_bytes, options.n_tokens)
    return {**_headline(speeds, hosts, memory), **result, **_details(options, peer, speeds, hosts, fidelities, memory)}


def _start_peer(options: DecodeOptions, say: Say) -> SideProcess | None:
    side = find_side("onnxruntime-genai/plain")
    missing = side.missing(options.model)
    if missing:
        say(f"{missing}, so its fields stay empty: `python -m edgespec_bench peers --setup` changes that")
        return None
    return side.start(options.model, options.threads)


def _headline(speeds: Speeds, hosts: dict[str, Any], memory: Any) -> dict[str, Any]:
    return {
        "plain_tok_s": round(spread(speeds.ours).median, 1),
        "plain_vs_onnxruntime_genai": round(paired_ratio(speeds.ours, speeds.peer).median, 3) if speeds.peer else None,
        "host_ms_per_round_t0": hosts["t0"]["all_rounds_ms"]["median"],
        "host_ms_per_round_t08": hosts["t08"]["all_rounds_ms"]["median"],
        "host_ms_per_full_round_t0": hosts["t0"]["full_rounds_ms"]["median"],
        "host_ms_per_full_round_t08": hosts["t08"]["full_rounds_ms"]["median"],
        "peak_rss_mb": memory.to_dict()["peak_mb"] if memory else None,
    }


def _details(
    options: DecodeOptions, peer: SideProcess | None, speeds: Speeds, hosts: Any, fidelities: Any, memory: Any
) -> dict[str, Any]:
    return {
        "model": options.model,
        "threads": options.threads,
        "n_tokens": options.n_tokens,
        "repeats": options.repeats,
        "peer": None if peer is None else {"name": peer.side.engine, "version": peer.version},
        "speed": speeds.to_dict(),
        "host": hosts,
        "fidelity": fidelities,
        "memory": memory.to_dict() if memory else None,
    }


def plain_speeds(
    llm: LLM, peer: SideProcess | None, prompts: Sequence[list[int]], options: DecodeOptions, say: Say
) -> Speeds:
    """Native plain decoding at T = 0 on both sides, in turns; the first turn of each is a warm-up."""
    speeds = Speeds()
    for turn in range(-1, options.repeats):
        for prompt in prompts if turn >= 0 else prompts[:1]:
            ours = _our_speed(llm, prompt, options.n_tokens)
            theirs = _peer_speed(peer, prompt, options.n_tokens) if peer else None
            if turn >= 0:
                speeds.ours.append(ours)
                if theirs is not None:
                    speeds.peer.append(theirs)
        if turn >= 0:
            beside = f", {peer.side.engine} {spread(speeds.peer).median:.0f}" if peer else ""
            say(f"plain decoding, turn {turn + 1} of {options.repeats}: {spread(speeds.ours).median:.0f} tok/s{beside}")
    return speeds


def _our_speed(llm: LLM, prompt: list[int], n_tokens: int) -> float:
    from edgespec import SamplingParams

    llm.forget()
    first = last = 0.0
    count = 0
    for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)):
        last = time.perf_counter()
        first = first or last
        count += len(delta.token_ids)
    return (count - 1) / (last - first)


def _peer_speed(peer: SideProcess, prompt: list[int], n_tokens: int) -> float:
    return decode_tok_s(peer.decode(prompt, n_tokens))


def _host_settings(options: DecodeOptions) -> dict[str, SamplingParams]:
    from edgespec import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=options.n_tokens, ignore_eos=True)
    return {"t0": greedy, "t08": dataclasses.replace(greedy, temperature=0.8, top_p=0.95, seed=7)}


def host_times(llm: LLM, options: DecodeOptions, params: SamplingParams, say: Say) -> dict[str, Any]:
    """Milliseconds a round outside the runtime, n-gram drafts of up to k, on prompts whose answers repeat them."""
    say(f"host time a round at T = {params.temperature:g}")
    speculative = llm.variant(draft="ngram", num_speculative_tokens=options.k, exact=True)
    records: list[RoundRecord] = []
    for prompt in [p for kind in ("edit", "summarise") for p in load_prompts(kind)]:
        ids = llm.encode_chat(prompt.messages)
        stats: RunStats = speculative.generate([ids], params)[0].stats
        records += stats.records[1:]
    speculative.forget()
    full = full_rounds(records, options.k)
    return {
        "full_rounds_ms": spread([1e3 * r.host_s for r in full or records]).to_dict(),
        "all_rounds_ms": spread([1e3 * r.host_s for r in records]).to_dict(),
    }


def full_rounds(records: Sequence[RoundRecord], k: int) -> list[RoundRecord]:
    """The rounds that really drafted k tokens: fewer rows cost less and would flatter the figure."""
    return [record for record in records if record.drafted >= k]


def both_fidelities(
    llm: LLM, peer: SideProcess | None, prompts: Sequence[list[int]], options: DecodeOptions, say: Say
) -> dict[str, Any] | None:
    """KLD and top-1 agreement of both sides; None for a model whose float weights are not at hand."""
    from edgespec.errors import EdgeSpecError
    from edgespec.pairs import source_path

    if options.n_fidelity_tokens < 1:
        return None
    say("fidelity: float model as reference")
    try:
        bundle = float_bundle(source_path(options.model), options.model)
    except EdgeSpecError as error:
        say(f"no fidelity figures: {error}")
        return None
    passages = write_passages(bundle, prompts, options.n_fidelity_tokens, options.threads)
    ours = [model_logits(llm.target, p.prompt, p.continuation) for p in passages]
    theirs = _peer_logits(peer, passages) if peer else None
    return {
        "edgespec": fidelity(passages, ours).to_dict(),
        "peer": fidelity(passages, theirs).to_dict() if theirs else None,
    }


def _peer_logits(peer: SideProcess, passages: Sequence[Passage]) -> list[Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "logits.npy")
        for p in passages:
            peer.ask(do="logits", prompt=p.prompt, continuation=p.continuation, path=path)
            rows.append(np.load(path))
    return rows

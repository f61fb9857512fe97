"""What a user should know about a run before it starts: limits of context and threads, devices, why nothing is drafted.

One sentence each; they end up in the run's statistics. Changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cpu import allowed_cpus
from edgespec.device_report import device_notes, use_of
from edgespec.engine.decoder import off_note

if TYPE_CHECKING:
    from edgespec.llm import LLM

__all__ = ["run_notes"]


def run_notes(llm: LLM, n_prompt: int, max_tokens: int) -> list[str]:
    """The notes for a request of `n_prompt` tokens that asks for `max_tokens`."""
    info, options = llm.target.info, llm.options
    notes = [*_synthetic(llm), *device_notes(use_of(info), llm.draft_uses), *_emulated(llm)]
    if max_tokens > (room := info.n_ctx - n_prompt):
        notes.append(
            f"max_tokens is {max_tokens:,}, but the context of {info.n_ctx:,} tokens has room for {room:,} after "
            "this prompt: the text ends there at the latest"
        )
    if options.threads is not None and options.threads > (allowed := len(allowed_cpus())):
        notes.append(f"threads: {options.threads} on the {allowed} CPUs of this process slow each other down")
    for kind, model in {"model": llm.draft_model, **llm.loaded.heads}.items():
        draft = getattr(model, "info", None)  # a head without a cache has no context
        if kind in options.drafts and draft is not None and n_prompt > draft.n_ctx:
            notes.append(f"no draft from the {kind}: the prompt has {n_prompt} tokens, its context holds {draft.n_ctx}")
    if options.exact and llm.exact is None:
        notes.append("exact rows: the probe found none on this model and device; rows may differ with their number")
    if options.drafts and info.max_rewind == 0:
        notes.append("speculation off: the target's cache cannot be rewound")
    elif options.drafts and info.max_rows == 1:
        notes.append("speculation off: the target gives logits for one row a call")
    elif options.drafts and info.max_rows is not None and options.most_drafted >= info.max_rows:
        notes.append(
            f"at most {info.max_rows - 1} drafted tokens a round and not {options.most_drafted}, as the target takes "
            f"{info.max_rows} rows a call"
        )
    failed = {kind: reason for kind, reason in llm.loaded.failed.items() if kind in options.drafts}
    for kind, reason in failed.items():
        notes.append(off_note(kind, reason, is_last=not llm.working_drafts and kind == [*failed][-1]))
    return notes


def _synthetic(llm: LLM) -> list[str]:
    """Nobody should take the words of weights that were made up for those of a trained model."""
    infos = [model.info for model in (llm.target, llm.draft_model) if model is not None]
    return [f"{info.name} is synthetic: {info.synthetic}" for info in infos if info.synthetic is not None]


def _emulated(llm: LLM) -> list[str]:
    """Times of emulated hardware mislead, so a run on it says so."""
    names = {llm.target.info.device, *(use.device for use in llm.draft_uses.values())} - {"cpu"}
    if not names:
        return []
    from edgespec.backends.onnx.providers import is_emulated

    emulated = sorted(name for name in names if is_emulated(name))
    return [f"{name} is emulated here: its times say nothing about the real one" for name in emulated]

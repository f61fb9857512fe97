"""The Python API: `LLM(model, draft=...)`, `.generate()`, `.stream()`, `.chat()`.

Puts together what the layers below know separately: models from backends, drafters, the round loop, text. Owns the
loaded models; `slots` keeps the KV caches between requests, reused as far as the next prompt agrees
with them. Knows no tensors and no probabilities.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgespec.auto import open_models
from edgespec.device_report import DeviceUse, devices_json, use_of
from edgespec.downloads import Progress
from edgespec.draft.base import DRAFT_DRAFTS
from edgespec.engine.decoder import Job, decode
from edgespec.engine.exact import ProbeReport, exact_rows
from edgespec.engine.stops import TokenStop
from edgespec.errors import ConfigError
from edgespec.loading import NO_DRAFT_MODEL, Loaded, refuse_unused, resolve_options
from edgespec.noise import Noise
from edgespec.options import AUTO, BUNDLED_DRAFTS
from edgespec.outputs import CompletionOutput, Delta, RequestOutput
from edgespec.request import Run, token_ids
from edgespec.run_notes import run_notes
from edgespec.sampling import Sampler, SamplingParams
from edgespec.slots import SlotPool
from edgespec.stats import RunStats
from edgespec.steering import Steering
from edgespec.types import ExactRows, Model
from edgespec.verify import Verifier, create_verifier

if TYPE_CHECKING:
    from edgespec.text import TextStream, Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A target model with its drafters, ready to generate.

    model, draft_model: a known pair's name, a bundle or model folder, a .gguf file, or a loaded `Model`; draft_model
    also trained draft weights, or a bundle of these.
    draft: comma-separated draft kinds in order of priority (`ngram`, `table`, `model`, `tinydraft`, `eagle`,
    `medusa`, `early-exit`), `none`, or `auto` (the plan's); by default that of `draft_model`, else `ngram`. Trained
    kinds come from the zoo unless given. progress: called with (stage, done, total). Others are EngineOptions'
    fields.
    Raises ConfigError for what cannot be honoured, before anything is generated.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        draft: str | None = None,
        draft_model: str | Path | Model | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.options = resolve_options(draft, draft_model, options, model)
        if not isinstance(model, (str, Path)):
            refuse_unused(self.options, ("n_ctx", "device", "device_options", "threads"), "the model is loaded already")
        if draft_model is not None and not isinstance(draft_model, (str, Path)):
            how = ("draft_n_ctx", "draft_device", "draft_device_options")
            refuse_unused(self.options, how, "the draft model is loaded already")
        self.options, loaded = open_models(model, draft_model, self.options, tokenizer, progress)
        self._use(loaded)
        self._prepare()

    def _use(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.target, self.tokenizer = loaded.target, loaded.tokenizer
        self.draft_model: Model | None = loaded.draft_model

    def _prepare(self) -> None:
        """Everything that depends on the options and not on loading."""
        self.verifier_factory: Callable[[], Verifier] = partial(
            create_verifier, self.options.verifier, lossy=self.options.lossy
        )
        self.probe: ProbeReport | None = exact_rows(self.target) if self.options.exact else None
        self._settle_length()
        if self.options.drafts:
            self._check_length(self.options.most_drafted)
        self.slots = SlotPool(self.loaded, self.options, self.exact)
        self.steering = Steering(self.options, self.loaded)

    def _settle_length(self) -> None:
        """Put in the length that nobody set; a variant begins without one again."""
        least, most = self.options.min_speculative_tokens, max(1, self.most_k)
        self._has_length = self.options.num_speculative_tokens is not None
        if self._has_length or self.options.tree:
            return
        if least > most and self.options.drafts:
            raise ConfigError(f"min_speculative_tokens={least}: a round here holds up to {most} drafted tokens")
        k = max(least, min(self.options.depth, most))
        self.options = dataclasses.replace(self.options, num_speculative_tokens=k)

    def _check_length(self, k: int) -> None:
        """Raises ConfigError where a round cannot draft `k` tokens here."""
        n_ctx = self.target.info.n_ctx
        if k >= n_ctx:
            name = "tree_rows" if self.options.tree else "num_speculative_tokens"
            raise ConfigError(f"{name}={k}: the context holds {n_ctx} tokens, so use 1 to {n_ctx - 1}")
        if self.exact is not None and k >= self.exact.max_rows:
            most = self.exact.max_rows - 1
            way = "use fewer, or exact=False (--fast)"
            if self.target.info.max_rows == 1:
                way = "use draft='none' (--draft none), or a target that takes several rows a call"
            raise ConfigError(f"num_speculative_tokens={k}: exact rows hold up to {most} drafted tokens, so {way}")

    @property
    def most_k(self) -> int:
        """Tokens that a round can draft in this context and in exact rows."""
        return min(self.target.info.n_ctx, self.exact.max_rows if self.exact else self.target.info.n_ctx) - 1

    @property
    def working_drafts(self) -> tuple[str, ...]:
        """The kinds of draft that are asked for and have not failed."""
        return self.loaded.working(self.options.drafts)

    @property
    def draft_uses(self) -> dict[str, DeviceUse]:
        """Where each loaded draft runs."""
        return {kind: use for kind, use in self.loaded.draft_uses.items() if kind in self.working_drafts}

    @property
    def exact(self) -> ExactRows | None:
        """Row counts that exact mode uses; None in fast mode or where the probe found none."""
        exact, rewind = self.probe.exact if self.probe else None, self.target.info.max_rewind
        if exact is None or (rewind is not None and rewind < exact.width(1) - 1):
            return None  # the rows that fill up a call could not be taken back
        return exact

    def variant(self, **changes: Any) -> LLM:
        """The same loaded models under other options, for instance `variant(draft="none")` for the plain baseline."""
        other = object.__new__(LLM)
        if changes.get("draft") == "none":
            changes = {"tree": False, "schedule": "serial", **changes}
        if not self._has_length:
            changes = {"num_speculative_tokens": None, **changes}
        if not set(DRAFT_DRAFTS[self.options.draft_draft]) & set(changes.get("draft", self.options.draft).split(",")):
            changes = {"draft_draft": "none", **changes}
        other.options = dataclasses.replace(self.options, **changes)
        other._use(self.loaded)
        if other.options.draft == AUTO:
            raise ConfigError("draft='auto' loads what it chooses: give it when the LLM is made")
        for kind in self.loaded.working(other.options.loaded_drafts):
            if kind == "model" and self.draft_model is None:
                raise ConfigError(NO_DRAFT_MODEL)
            is_missing = kind in BUNDLED_DRAFTS and kind not in self.loaded.heads
            if is_missing or (kind == "table" and self.loaded.table is None):
                raise ConfigError(f"draft={kind!r} was not loaded: name it in `draft` when the LLM is made")
        other._prepare()
        return other

    @contextmanager
    def native_plain(self) -> Iterator[LLM]:
        """Plain decoding one row a step on the graph that is fastest without speculation, for as long as it lasts.

        A target that was loaded for trees or in two halves is slower there; its model.onnx is then loaded beside it.
        """
        folder, options = self.loaded.folder, self.options
        if folder is None or not self.loaded.has_other_plain:
            plain = self.variant(draft="none", exact=False)
            try:
                yield plain
            finally:
                plain.forget()
            return
        with LLM(folder, draft="none", exact=False, tokenizer=self.tokenizer, **options.target_place) as plain:
            yield plain

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """One RequestOutput a prompt. A prompt is text, or a list of token ids."""
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params is a {type(params).__name__}: give one SamplingParams")
        if not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is a {type(prompts).__name__}: give text, token ids, or a list of these")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        outputs = []
        for prompt in [prompts] if single else prompts:
            ids = self.encode(prompt)  # type: ignore[arg-type]
            seed = _seed(params)
            samples = [self._finish(ids, params, seed, i) for i in range(params.n)]
            outputs.append(RequestOutput(prompt if isinstance(prompt, str) else None, ids, samples))
        return outputs

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation of {"role", "content"} messages through the model's chat template."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """One Delta a round, as tokens are committed; the last one carries the output. Closing it cancels."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"stream() gives one sample, n={params.n} were asked for: use generate()")
        ids = self.encode(prompt)
        return self._stream(ids, params, self._sampler(params, len(ids)), self._stop_rule(params), _seed(params), 0)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (ids pass through after a range check)."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this model has no tokenizer: give the prompt as a list of token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = token_ids(prompt)
            n_vocab = self.target.info.n_vocab
            bad = next((token for token in ids if not 0 <= token < n_vocab), None)
            if bad is not None:
                raise ConfigError(f"prompt holds token id {bad}: ids go from 0 to {n_vocab - 1}")
        if not ids:
            raise ConfigError("the prompt is empty: give at least one token")
        if len(ids) >= self.target.info.n_ctx:
            is_fixed = hasattr(self.target, "fixed_width")
            more = "export it for a longer context (--context)" if is_fixed else "raise n_ctx (-c)"
            what = f"the prompt has {len(ids)} tokens, the context holds {self.target.info.n_ctx}"
            raise ConfigError(f"{what}: shorten it or {more}")
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, with the opening of the assistant's turn."""
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer, so it has no chat template: use generate() with token ids")
        return self.encode(self.tokenizer.encode_chat(messages))

    def _finish(self, ids: list[int], params: SamplingParams, seed: int, sample: int) -> CompletionOutput:
        output = None
        sampler, stop = self._sampler(params, len(ids)), self._stop_rule(params)
        for delta in self._stream(ids, params, sampler, stop, seed, sample):
            output = delta.output
        assert output is not None
        return output

    def _sampler(self, params: SamplingParams, n_prompt: int) -> Sampler:
        info = self.target.info
        if params.logprobs is not None and params.logprobs > info.n_vocab:
            raise ConfigError(
                f"logprobs is {params.logprobs}, but the vocabulary has {info.n_vocab} tokens: ask for less"
            )
        return Sampler(params, n_vocab=info.n_vocab, eos_ids=info.eos_ids, n_prompt=n_prompt)

    def _stream(
        self,
        ids: list[int],
        params: SamplingParams,
        sampler: Sampler,
        stop: TokenStop | TextStream,
        seed: int,
        sample: int,
    ) -> Iterator[Delta]:
        info, started = self.target.info, time.perf_counter()
        job = Job(ids, sampler, self.verifier_factory(), Noise(seed, sample), stop, params.max_tokens, params.logprobs)
        job.strict = self.options.strict_device
        slot = self.slots.take(ids)
        stats = RunStats(
            seed, len(ids), slot.session.n_past, self.exact is not None, self.options.tree, notes=job.notes
        )
        stats.devices = devices_json(use_of(info), self.draft_uses)
        job.notes += run_notes(self, len(ids), params.max_tokens)
        controller = self.steering.controller(slot.drafters, self.exact)
        loop = decode(job, slot.session, info, slot.drafters, controller, self.exact)
        events = self.steering.run(loop, slot.drafters)
        run = Run(self.tokenizer, job, stop, stats, started, sample)
        healthy = False
        try:
            for committed in events:
                if committed.finish_reason:
                    stats.controller = self.steering.summary(controller)
                yield run.delta(committed)
            healthy = True
        except GeneratorExit:
            healthy = True
            raise
        finally:
            events.close()  # type: ignore[attr-defined]
            self.loaded.failed.update(job.failed)
            self.slots.give_back(slot, ids + run.token_ids, healthy=healthy)

    def _stop_rule(self, params: SamplingParams) -> TokenStop | TextStream:
        from edgespec.text.tokenizer_files import check_text

        for stop in params.stop:
            check_text(stop, "stop")
        if self.tokenizer is None:
            if params.stop:
                raise ConfigError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
            eos = () if params.ignore_eos else self.target.info.eos_ids
            return TokenStop({*eos, *params.stop_token_ids}, params.min_tokens)
        from edgespec.text import TextStream

        return TextStream(
            self.tokenizer,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            eos_ids=self.target.info.eos_ids,
            ignore_eos=params.ignore_eos,
            skip_special=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def forget(self) -> None:
        """Free the caches of finished requests, so that the next one starts from nothing."""
        self.slots.forget()

    def close(self) -> None:
        """Free the caches and the models."""
        self.forget()
        self.loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seed(params: SamplingParams) -> int:
    return params.seed if params.seed is not None else secrets.randbits(63)

"""The Python API: `LLM(model, draft=...)`, `.generate()`, `.stream()`, `.chat()`.

Puts together what the layers below know separately: models from backends, drafters, the round loop, text. Owns the
loaded models and the KV caches between requests (a finished request's cache is reused as far as the next prompt agrees
with it). Knows no tensors and no probabilities.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgespec.cpu import allowed_cpus
from edgespec.draft import DraftSetup, create_drafter
from edgespec.engine.controller import create_controller
from edgespec.engine.decoder import Job, decode
from edgespec.engine.exact import ProbeReport, exact_rows
from edgespec.engine.scheduler import run_serial
from edgespec.engine.stops import TokenStop
from edgespec.errors import CacheError, ConfigError, IncompatibleError
from edgespec.noise import Noise
from edgespec.options import EngineOptions
from edgespec.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from edgespec.sampling import Sampler, SamplingParams
from edgespec.stats import RunStats
from edgespec.types import Committed, Drafter, ExactRows, Model, Session
from edgespec.verify import Verifier, create_verifier

if TYPE_CHECKING:
    from edgespec.engine.logprobs import TokenLogprobs
    from edgespec.text import TextStream, Tokenizer

__all__ = ["LLM", "resolve_options"]

NO_DRAFT_MODEL = "draft='model' needs a draft model: pass draft_model (--draft-model), or use draft='ngram'"

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class _Slot:
    """The caches of one sequence between requests. `tokens` is what the target's cache holds."""

    session: Session
    drafters: list[Drafter]
    tokens: list[int] = dataclasses.field(default_factory=list)

    def shared(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that are already cached; its last one always runs again, for its logits."""
        n = 0
        for ours, theirs in zip(self.tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            n += 1
        return n

    def close(self) -> None:
        self.session.close()
        for drafter in self.drafters:
            drafter.close()


class LLM:
    """A target model with its drafters, ready to generate.

    model, draft_model: a known pair's name, a bundle or model folder, a .gguf file, or a loaded `Model`.
    draft: comma-separated draft kinds in order of priority (`ngram`, `model`), or `none`; by default `model` where
    `draft_model` is given, else `ngram`. Other keywords are the fields of `edgespec.options.EngineOptions`.
    Raises ConfigError for settings that cannot be honoured, before anything is generated.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        draft: str | None = None,
        draft_model: str | Path | Model | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        self.options = resolve_options(draft, draft_model, options)
        if not isinstance(model, (str, Path)):
            _refuse_unused(self.options, ("n_ctx", "device", "threads"), "the model is loaded already")
        self.target, found = _load(model, self.options.device, self.options.n_ctx, self.options.threads)
        self.tokenizer = tokenizer or found
        self.draft_model: Model | None = None
        if draft_model is not None:
            self.draft_model, draft_tokenizer = _load(
                draft_model, self.options.draft_device, self.options.draft_n_ctx, self.options.threads
            )
            _check_same_vocabulary(self.target, self.tokenizer, self.draft_model, draft_tokenizer)
        self._prepare()

    def _prepare(self) -> None:
        """Everything that depends on the options and not on loading."""
        n_ctx, k = self.target.info.n_ctx, self.options.num_speculative_tokens
        if self.options.drafts and k >= n_ctx:
            raise ConfigError(f"num_speculative_tokens={k}: the context holds {n_ctx} tokens, so use 1 to {n_ctx - 1}")
        self.verifier_factory: Callable[[], Verifier] = partial(
            create_verifier, self.options.verifier, lossy=self.options.lossy
        )
        self.probe: ProbeReport | None = exact_rows(self.target) if self.options.exact else None
        if self.options.drafts and self.exact is not None and k >= self.exact.max_rows:
            raise ConfigError(
                f"num_speculative_tokens={k}: exact rows hold up to {self.exact.max_rows - 1} drafted tokens, "
                "so use fewer, or exact=False (--fast)"
            )
        self._idle: list[_Slot] = []

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
        other.options = dataclasses.replace(self.options, **changes)
        other.target, other.tokenizer, other.draft_model = self.target, self.tokenizer, self.draft_model
        if "model" in other.options.drafts and self.draft_model is None:
            raise ConfigError(NO_DRAFT_MODEL)
        other._prepare()
        return other

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
            ids = _token_ids(prompt)
            n_vocab = self.target.info.n_vocab
            bad = next((token for token in ids if not 0 <= token < n_vocab), None)
            if bad is not None:
                raise ConfigError(f"prompt holds token id {bad}: ids go from 0 to {n_vocab - 1}")
        if not ids:
            raise ConfigError("the prompt is empty: give at least one token")
        if len(ids) >= self.target.info.n_ctx:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, the context holds {self.target.info.n_ctx}: "
                "shorten it or raise n_ctx (-c)"
            )
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
        slot = self._take_slot(ids)
        stats = RunStats(seed, len(ids), slot.session.n_past, self.exact is not None, notes=job.notes)
        job.notes += self._limits(len(ids))
        controller = create_controller(
            self.options.controller, self.options.num_speculative_tokens, self.options.min_speculative_tokens
        )
        if not slot.drafters:
            controller.max_k = 0
        events = run_serial(decode(job, slot.session, info, slot.drafters, controller, self.exact))
        run = _Run(self.tokenizer, job, stop, stats, started, sample)
        healthy = False
        try:
            for committed in events:
                yield run.delta(committed)
            healthy = True
        except GeneratorExit:
            healthy = True
            raise
        finally:
            events.close()  # type: ignore[attr-defined]
            self._give_back(slot, ids + run.token_ids, healthy)

    def _stop_rule(self, params: SamplingParams) -> TokenStop | TextStream:
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

    def _limits(self, n_prompt: int) -> list[str]:
        """What the user should know about these options on this machine."""
        info, notes = self.target.info, []
        allowed = len(allowed_cpus())
        if self.options.threads is not None and self.options.threads > allowed:
            notes.append(f"threads: {self.options.threads} on the {allowed} CPUs of this process slow each other down")
        if self.draft_model is not None and n_prompt > (n_ctx := self.draft_model.info.n_ctx):
            notes.append(f"no draft from the model: the prompt has {n_prompt} tokens, its context holds {n_ctx}")
        if self.options.exact and self.exact is None:
            notes.append("exact rows: the probe found none on this model and device; rows may differ with their number")
        if self.options.drafts and info.max_rewind == 0:
            notes.append("speculation off: the target's cache cannot be rewound")
        elif self.options.drafts and info.max_rows == 1:
            notes.append("speculation off: the target returns logits for one row a call")
        return notes

    def _take_slot(self, ids: list[int]) -> _Slot:
        """The idle cache that shares most with the prompt, rewound to what they share; else a new one."""
        best = max(self._idle, key=lambda slot: slot.shared(ids), default=None)
        if best is None:
            return self._new_slot()
        self._idle.remove(best)
        try:
            best.session.keep(best.shared(ids))
        except CacheError:  # it cannot go back that far, but to nothing it always can
            best.session.keep(0)
        for drafter in best.drafters:
            drafter.reset()
        return best

    def _new_slot(self) -> _Slot:
        setup = DraftSetup(self.target.info.n_vocab, self.options.prompt_lookup_min, self.draft_model)
        return _Slot(self.target.open_session(), [create_drafter(kind, setup) for kind in self.options.drafts])

    def _give_back(self, slot: _Slot, tokens: list[int], healthy: bool) -> None:
        if not healthy:
            slot.close()
            return
        slot.tokens = tokens[: slot.session.n_past]
        self._idle.append(slot)

    def forget(self) -> None:
        """Free the caches of finished requests, so that the next one starts from nothing."""
        for slot in self._idle:
            slot.close()
        self._idle.clear()

    def close(self) -> None:
        """Free the caches and the models."""
        self.forget()
        for model in (self.target, self.draft_model):
            if model is not None:
                model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """Turns the loop's commits into deltas and, at the end, the output."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        job: Job,
        stop: TokenStop | TextStream,
        stats: RunStats,
        started: float,
        sample: int,
    ) -> None:
        self.tokenizer, self.job, self.stop, self.stats = tokenizer, job, stop, stats
        self.started, self.sample = started, sample
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []

    def delta(self, committed: Committed) -> Delta:
        self.token_ids += committed.tokens
        self.logprobs += [self._logprob(entry) for entry in committed.record.logprobs or ()]
        self.stats.add(committed.record)
        self.stats.exact = self.job.is_exact
        self.stats.total_s = time.perf_counter() - self.started
        if self.stats.rounds == 1:
            self.stats.ttft_s = self.stats.total_s
        text = "" if isinstance(self.stop, TokenStop) else self.stop.take()
        output = None
        if committed.finish_reason:
            text += "" if isinstance(self.stop, TokenStop) else self.stop.finish()
            output = self._output(committed)
        return Delta(text, committed.tokens, committed.record, output)

    def _output(self, committed: Committed) -> CompletionOutput:
        return CompletionOutput(
            index=self.sample,
            text="" if isinstance(self.stop, TokenStop) else self.stop.text,
            token_ids=self.token_ids,
            finish_reason=committed.finish_reason,
            stop_reason=self.stop.stop_reason,
            logprobs=self.logprobs if committed.record.logprobs is not None else None,
            stats=self.stats,
        )

    def _logprob(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        own = (entry.token, entry.logprob, entry.rank)
        rows = {t: Logprob(p, i + 1, self._string(t)) for i, (t, p) in enumerate(entry.top)}
        rows[own[0]] = Logprob(own[1], own[2], self._string(own[0]))
        return rows

    def _string(self, token: int) -> str:
        return self.tokenizer.token_string(token) if self.tokenizer else str(token)


def resolve_options(draft: str | None, draft_model: object, options: Mapping[str, Any]) -> EngineOptions:
    """The EngineOptions that LLM's arguments mean; raises ConfigError where they contradict each other."""
    unknown = sorted(set(options) - set(EngineOptions.names()))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(EngineOptions.names())}")
    kind = draft if draft is not None else "model" if draft_model is not None else "ngram"
    resolved = EngineOptions(draft=kind, **options)
    if draft_model is not None and "model" not in resolved.drafts:
        raise ConfigError(f"a draft model was given but draft={kind!r} does not use it: use draft='model'")
    if draft_model is None and "model" in resolved.drafts:
        raise ConfigError(NO_DRAFT_MODEL)
    if draft_model is None:
        _refuse_unused(resolved, ("draft_n_ctx", "draft_device"), "there is no draft model")
    create_verifier(resolved.verifier, lossy=resolved.lossy)
    return resolved


def _refuse_unused(options: EngineOptions, names: Sequence[str], why: str) -> None:
    defaults = EngineOptions()
    for name in names:
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(f"{name}={getattr(options, name)!r} would have no effect, as {why}")


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Plain ints; raises ConfigError for anything that is no whole number, rather than rounding it."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise ConfigError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ConfigError(f"prompt holds {token!r}, which is no token id: ids are whole numbers")
    return [int(token) for token in prompt]


def _seed(params: SamplingParams) -> int:
    return params.seed if params.seed is not None else secrets.randbits(63)


def _load(
    model: str | Path | Model, device: str, n_ctx: int | None, threads: int | None
) -> tuple[Model, Tokenizer | None]:
    """A loaded model and its tokenizer (None for a Model given as an object)."""
    if not isinstance(model, (str, Path)):
        return model, None
    from edgespec.backends import load_model
    from edgespec.pairs import resolve
    from edgespec.text import Tokenizer

    folder = resolve(model)
    return load_model(folder, device=device, n_ctx=n_ctx, threads=threads), Tokenizer.load(folder)


def _check_same_vocabulary(
    target: Model, tokenizer: Tokenizer | None, draft: Model, draft_tokenizer: Tokenizer | None
) -> None:
    """Raises IncompatibleError naming the first token that differs; padded vocabularies pass."""
    if tokenizer is not None and draft_tokenizer is not None:
        difference = tokenizer.first_difference(draft_tokenizer)
        if difference:
            raise IncompatibleError(
                f"target and draft have different tokenizers: {difference}. Use a draft with the target's tokenizer, "
                "or draft='ngram' (--draft ngram)"
            )
    elif target.info.n_vocab != draft.info.n_vocab:
        raise IncompatibleError(
            f"target has {target.info.n_vocab:,} tokens, draft has {draft.info.n_vocab:,}: use a draft with the same "
            "tokenizer, or draft='ngram' (--draft ngram)"
        )

"""A GGUF file loaded by llama.cpp: `LlamaModel`, its sessions, and passes over several of them at once.

Reads the file with edgespec's own strict reader first, so that a damaged one is one clear error and never llama.cpp's
abort. Trees are refused: a branch would need a sequence of its own and its rows would not be those of a chain.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edgespec.backends.base import (
    check_context,
    check_finite,
    check_forward,
    check_keep,
    check_parents,
    check_path,
    is_chain,
)
from edgespec.backends.llamacpp.context import MOST_ROWS, Context, Weights, Work
from edgespec.backends.llamacpp.library import clear_log, library, uninterrupted, version, why
from edgespec.backends.llamacpp.settings import FLASH, KV_TYPES, Settings, check_length, find_devices, read_settings
from edgespec.backends.llamacpp.vocabulary import check_tokenizer
from edgespec.cpu import default_threads
from edgespec.devices import Device
from edgespec.errors import BackendError, CacheError, ConfigError
from edgespec.gguf import GGUFFile
from edgespec.text import Tokenizer
from edgespec.types import FloatArray, Forward, ModelInfo, Rows

__all__ = ["DEFAULT_CONTEXT", "LlamaModel", "LlamaSession", "load"]

# llama.cpp allocates a context's whole cache when it is opened, and models of today name contexts of 128k and more.
DEFAULT_CONTEXT = 8192


class LlamaModel:
    """A loaded GGUF. `tokenizer` is edgespec's, found equal to llama.cpp's; `settings` what it was loaded with.

    Sessions are sequences of llama.cpp contexts, which hold `settings.sequences` each and are opened as needed.
    """

    def __init__(
        self, weights: Weights, info: ModelInfo, tokenizer: Tokenizer, settings: Settings, threads: int, file_key: str
    ) -> None:
        self._weights: Weights | None = weights
        self._info, self.tokenizer, self.settings, self.threads = info, tokenizer, settings, threads
        self._file_key = file_key
        self._window = int(weights.llama.llama_model_n_swa(weights.pointer))
        self._contexts: list[Context] = []

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def content_key(self) -> str:
        """Names the tensors' types and shapes, llama.cpp's build and the settings: what decides on kernels."""
        llama = library()
        build = hashlib.sha256(llama.llama_print_system_info()).hexdigest()[:16]
        return (
            f"gguf {self._file_key} llama_cpp={version()} build={build} device={self._info.device} "
            f"threads={self.threads} {self.settings}"
        )

    def open_session(self) -> LlamaSession:
        """A new empty cache; raises BackendError once the model is closed, or where memory does not suffice."""
        if self._weights is None:
            raise BackendError(f"{self._info.name}: the model is closed; load it again.")
        for context in list(self._contexts):
            sequence = context.take()
            if sequence is not None:
                return LlamaSession(self, context, sequence)
        context = self._open_context(self._weights)
        sequence = context.take()
        assert sequence is not None  # nobody else knows this context yet
        self._contexts.append(context)
        return LlamaSession(self, context, sequence)

    def forward_batch(self, requests: Sequence[Forward]) -> list[Rows]:
        """Several sequences' tokens, in one pass where they share a context (the setting `sequences`).

        Each request is of another session of this model. The rows of one sequence share kernels with the others', so
        they are right to rounding, not bit for bit those of `Session.forward`. Changes nothing where one is refused
        or fails.
        """
        sessions: list[LlamaSession] = []
        for request in requests:
            session = request.session
            if not isinstance(session, LlamaSession) or session.model is not self:
                raise ConfigError(f"{self._info.name}: forward_batch takes sessions of this model only.")
            if session in sessions:
                raise ConfigError(f"{self._info.name}: forward_batch takes each session once.")
            sessions.append(session)
        calls = [
            session._check(request.tokens, request.parents, request.logits_rows, request.taps)
            for session, request in zip(sessions, requests, strict=True)
        ]
        return _run(calls)

    def close(self) -> None:
        """Drop the weights; they are freed when the last open session is closed too."""
        self._weights = None
        self._drop_idle()

    def _drop_idle(self) -> None:
        for context in [item for item in self._contexts if item.is_idle]:
            context.close()
            self._contexts.remove(context)

    def _release(self, context: Context, sequence: int) -> None:
        """A session is over; of a closed model nothing stays."""
        context.give_back(sequence)
        if self._weights is None:
            self._drop_idle()

    def _open_context(self, weights: Weights) -> Context:
        llama, settings = weights.llama, self.settings
        params = llama.llama_context_default_params()
        params.n_ctx = self._info.n_ctx * settings.sequences
        params.n_seq_max = settings.sequences
        params.n_batch = params.n_ubatch = MOST_ROWS
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k, params.type_v = KV_TYPES[settings.type_k].id, KV_TYPES[settings.type_v].id
        params.flash_attn_type = FLASH[settings.flash_attn]
        params.swa_full = settings.swa_full
        params.kv_unified = False
        params.offload_kqv = params.op_offload = not self._info.device.startswith("llamacpp:cpu")
        params.no_perf = True
        return Context(weights, params, name=self._info.name, n_vocab=self._info.n_vocab, window=self._window)


class _Call:
    """One checked forward call and the arrays that it fills."""

    def __init__(self, session: LlamaSession, tokens: Sequence[int], rows: list[int], out: FloatArray) -> None:
        self.session, self.rows = session, rows
        self._wanted = sorted(set(rows))
        self.work = Work(session.sequence, session.n_past, list(tokens), self._wanted, out[: len(self._wanted)])

    def judge(self) -> FloatArray:
        """The logits in the order asked for; raises NumericsError where they are no numbers."""
        logits, session = self.work.out, self.session
        if self.rows != self._wanted:
            logits = logits[[self._wanted.index(row) for row in self.rows]]
        check_finite(session.model.info.name, logits, session.n_past, self.rows)
        return logits


def _run(calls: Sequence[_Call]) -> list[Rows]:
    """Run checked calls, context by context; no session changes where one of them fails or is interrupted."""
    seconds: dict[Context, float] = {}
    try:
        for context in dict.fromkeys(call.session.context for call in calls):
            seconds[context] = context.run([call.work for call in calls if call.session.context is context])
        logits = [call.judge() for call in calls]
    except BaseException:  # Ctrl-C too: tokens that are not counted may not stay
        for call in calls:
            call.session._undo(call.work)
        raise
    for call in calls:
        call.session._grow(len(call.work.tokens))
    return [Rows(out, run_s=seconds[call.session.context]) for out, call in zip(logits, calls, strict=True)]


class LlamaSession:
    """One sequence of a context. Not for several threads at once; different sessions may run on different ones."""

    def __init__(self, model: LlamaModel, context: Context, sequence: int) -> None:
        self.model, self.context, self.sequence = model, context, sequence
        self._n_past = self._n_last = 0
        self._lost: CacheError | None = None  # why the cache is unusable until it is emptied
        self._buffer: FloatArray = np.empty((0, model.info.n_vocab), np.float32)
        self._release = weakref.finalize(self, model._release, context, self.sequence)

    @property
    def n_past(self) -> int:
        return self._n_past

    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        logits_rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> Rows:
        """Run `tokens` on top of the cache; see `edgespec.types.Session`."""
        return _run([self._check(tokens, parents, logits_rows, taps)])[0]

    def keep(self, n_past: int, path: Sequence[int] | None = None) -> None:
        """Forget all but the first `n_past` tokens; see `edgespec.types.Session`.

        After a CacheError the cache may have lost tokens that it should have kept: then only keep(0) goes on.
        """
        self._check_open()
        check_keep(self.model.info, self._n_past, n_past)
        if path is not None:
            self._check_path(n_past, path)
        if self._lost is not None and n_past > 0:
            raise self._lost
        try:
            self.context.remove(self.sequence, self._n_past, n_past)
        except CacheError as error:
            self._lost = error
            raise
        self._lost, self._n_past, self._n_last = None, n_past, 0

    def close(self) -> None:
        self._release()
        self._n_past = self._n_last = 0

    def _undo(self, work: Work) -> None:
        try:
            self.context.undo(work)
        except CacheError as error:  # a recurrent state has no way back; the failure is what the caller hears of
            self._lost = error

    def _grow(self, n_tokens: int) -> None:
        self._n_past += n_tokens
        self._n_last = n_tokens

    def _check(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        logits_rows: Sequence[int] | None,
        taps: Sequence[str],
    ) -> _Call:
        self._check_open()
        info = self.model.info
        rows = check_forward(info, self._n_past, tokens, logits_rows, taps)
        if parents is not None:
            check_parents(info, len(tokens), parents)
            if not is_chain(parents):
                raise ConfigError(
                    f"{info.name}: llama.cpp runs chains only here: drop the tree, or run the model on ONNX."
                )
        if self._lost is not None:
            raise self._lost
        if len(self._buffer) < len(rows):
            self._buffer = np.empty((max(len(rows), 8), info.n_vocab), np.float32)
        return _Call(self, tokens, rows, self._buffer)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise CacheError(f"{self.model.info.name}: this session is closed; open another one.")

    def _check_path(self, n_past: int, path: Sequence[int]) -> None:
        base = self._n_past - self._n_last
        check_path(None, self._n_last, path)
        if n_past != base + len(path):
            raise CacheError(
                f"{self.model.info.name}: keep({n_past}) after a path of {len(path)} tokens on {base} cached ones."
            )


def load(
    path: Path,
    *,
    kind: str,
    device: str = "llamacpp:cpu",
    n_ctx: int | None = None,
    threads: int | None = None,
    name: str | None = None,
    tree: bool = False,
    split: bool = False,
    device_options: Mapping[str, str] | None = None,
    strict_device: bool = False,
) -> LlamaModel:
    """Load the GGUF file `path`; see `edgespec.backends.load_model`.

    Raises FormatError for a file that is not valid and whole, IncompatibleError where llama.cpp tokenizes otherwise
    than edgespec, BackendError where llama.cpp cannot load the model.
    """
    place = Device.parse(device)
    if place.runtime != "llamacpp":
        raise ConfigError(
            f"{path} is a GGUF file, which runs in llama.cpp and not on device {device!r}: use llamacpp:cpu, or "
            "convert it for that device (`edgespec export`)"
        )
    if tree or split:
        what = "trees" if tree else "a target in halves"
        raise ConfigError(f"{path}: {what} run on ONNX bundles only, not in llama.cpp.")
    settings = read_settings(device_options or {}, place)
    file = GGUFFile.open(path)
    check_length(path, file)
    llama = library()
    tokenizer = Tokenizer.load(path)
    weights = _load_weights(path, place, settings, strict_device)
    label = name or str(file.metadata.get("general.name") or path.stem)
    check_tokenizer(llama, weights.vocab, tokenizer, label)
    info = _info(weights, file, place, settings, tokenizer, label, n_ctx)
    return LlamaModel(weights, info, tokenizer, settings, threads or default_threads(), _file_key(file))


def _load_weights(path: Path, place: Device, settings: Settings, strict: bool) -> Weights:
    llama = library()
    params = llama.llama_model_default_params()
    chosen = find_devices(place)
    handles = (ctypes.c_void_p * (len(chosen) + 1))(*(item.handle for item in chosen), None)
    params.devices = ctypes.cast(handles, ctypes.c_void_p)
    params.n_gpu_layers = 0 if not chosen else -1 if settings.n_gpu_layers is None else settings.n_gpu_layers
    params.load_mode = 1 if settings.mmap else 0
    params.use_extra_bufts = settings.repack
    clear_log()
    with uninterrupted():
        pointer = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise BackendError(f"llama.cpp ({version()}) cannot load {path}: {why()}.")
        weights = Weights(llama, pointer)
    n_layers = int(llama.llama_model_n_layer(pointer)) + 1
    if chosen and strict and settings.n_gpu_layers is not None and settings.n_gpu_layers < n_layers:
        raise BackendError(
            f"{path}: n_gpu_layers={settings.n_gpu_layers} leaves {n_layers - settings.n_gpu_layers} of {n_layers} "
            "layers on the CPU: drop the option, or strict_device (--strict-device)"
        )
    return weights


def _info(
    weights: Weights,
    file: GGUFFile,
    place: Device,
    settings: Settings,
    tokenizer: Tokenizer,
    name: str,
    n_ctx: int | None,
) -> ModelInfo:
    llama, pointer = weights.llama, weights.pointer
    limit = int(llama.llama_model_n_ctx_train(pointer))
    context = min(limit, DEFAULT_CONTEXT) if n_ctx is None else check_context(name, n_ctx, limit)
    max_rewind: int | None = None
    if llama.llama_model_is_recurrent(pointer) or llama.llama_model_is_hybrid(pointer):
        max_rewind = 0
    elif llama.llama_model_n_swa(pointer) and not settings.swa_full:
        max_rewind = MOST_ROWS  # at least the last pass; `keep` looks at what is really there
    return ModelInfo(
        name=name,
        n_vocab=int(llama.llama_vocab_n_tokens(weights.vocab)),
        n_ctx=context,
        eos_ids=tokenizer.eos_ids,  # llama.cpp makes one up where the file names none
        tokenizer_hash=tokenizer.hash,
        device=place.name,
        weight_bytes=int(llama.llama_model_size(pointer)),
        kv_bytes_per_token=_kv_bytes(file, settings),
        max_rewind=max_rewind,
        placement=_placement(weights, place, settings),
    )


def _placement(weights: Weights, place: Device, settings: Settings) -> dict[str, int]:
    """Layers, the head counted as one, by llama.cpp's device: whole layers are what it places."""
    n_layers = int(weights.llama.llama_model_n_layer(weights.pointer)) + 1
    chosen = find_devices(place)
    if not chosen:
        return {"llama.cpp CPU": n_layers}
    n_there = n_layers if settings.n_gpu_layers is None else min(n_layers, settings.n_gpu_layers)
    counts = {f"llama.cpp {chosen[0].name}": n_there, "llama.cpp CPU": n_layers - n_there}
    return {name: n for name, n in counts.items() if n}


def _kv_bytes(file: GGUFFile, settings: Settings) -> int:
    """Bytes that the caches of all layers take a token, 0 where the file does not say."""
    meta, arch = file.metadata, file.metadata.get("general.architecture")
    heads, layers = meta.get(f"{arch}.attention.head_count_kv"), meta.get(f"{arch}.block_count")
    n_embd, n_heads = meta.get(f"{arch}.embedding_length"), meta.get(f"{arch}.attention.head_count")
    if not isinstance(layers, int) or not isinstance(n_embd, int) or not isinstance(n_heads, int) or not n_heads:
        return 0
    heads = n_heads if heads is None else heads
    n_kv_heads = sum(heads) if isinstance(heads, list) else heads * layers
    total = 0.0
    for part, kind in (("key", settings.type_k), ("value", settings.type_v)):
        width = meta.get(f"{arch}.attention.{part}_length") or n_embd // n_heads
        total += n_kv_heads * width * KV_TYPES[kind].n_bytes / KV_TYPES[kind].block
    return int(total)


def _file_key(file: GGUFFile) -> str:
    """A hash over settings and tensor table: equal files have equal keys, whatever they are called."""
    digest = hashlib.sha256()
    for key, value in sorted(file.metadata.items()):
        if not isinstance(value, list):
            digest.update(f"{key}={value!r}\n".encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.type}\n".encode())
    return digest.hexdigest()[:32]

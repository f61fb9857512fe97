"""Finds out by running it what a graph really does: its cache, its logits rows, its rewinds, several rows on a device.

A few calls of one to three tokens on throw-away sessions. Knows nothing of folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgespec.backends.onnx.devices import import_onnxruntime, short_message
from edgespec.backends.onnx.growing import GrowingCacheSession
from edgespec.backends.onnx.session import Capabilities, OnnxSession, SharedCacheSession
from edgespec.backends.onnx.signature import Signature
from edgespec.backends.onnx.vocabulary import ReducedVocabulary
from edgespec.errors import BackendError, EdgeSpecError
from edgespec.types import FloatArray, ModelInfo

__all__ = ["open_session", "probe_capabilities", "rows_agree"]

PROBE_LENGTH = 4
# A wrong mask or position moves logits by far more than the kernels of different row counts do, so rows count as the
# same when they are nearer than this share of their own spread (root mean square over the vocabulary; an int4 model on
# the CPU: up to 0.37 between a single row and several).
SAME_ROW = 0.5
# The call that is held against single rows on a device. A software GPU (SwiftShader) got the rows of a call wrong that
# see more than 4 keys, by 0.08 to 0.33 of the spread; others' kernels work on 16 keys at a time.
ROWS = 20
FEW_KEYS = 4  # rows whose differences show how much the device's rounding makes
ROUNDING, MOST_ROUNDING = 0.05, 4.0  # of the spread; how many times that of the first rows others may have
SAME_CHANGE = 0.25  # of what another context changes in a row; measured: rounding up to 0.18, wrong attention 0.35


def open_session(
    runtime: Any,
    signature: Signature,
    info: ModelInfo,
    capabilities: Capabilities,
    vocabulary: ReducedVocabulary | None = None,
) -> OnnxSession:
    """A session of the kind that the graph needs."""
    if capabilities.is_shared:
        return SharedCacheSession(runtime, signature, info, capabilities, vocabulary)
    return GrowingCacheSession(runtime, signature, info, capabilities)


def probe_capabilities(runtime: Any, signature: Signature, info: ModelInfo) -> Capabilities:
    """What the graph can do; raises BackendError where it cannot even decode token by token."""
    is_shared = signature.seqlens is not None or _is_shared(runtime, signature)
    one_row = Capabilities(last_row_only=True, rows_on_past=False, is_shared=is_shared)
    tokens = [1 % info.n_vocab, 2 % info.n_vocab, 3 % info.n_vocab]
    try:
        truth = _last_row(runtime, signature, info, one_row, [[token] for token in tokens])
    except EdgeSpecError as error:
        raise BackendError(f"{info.name}: the graph does not run token by token: {error}") from error
    last_row_only = _returns_last_row(signature)
    several = Capabilities(last_row_only=last_row_only, is_shared=is_shared)

    def agrees(capabilities: Capabilities, calls: Sequence[Sequence[int]], keep: int | None = None) -> bool:
        try:
            row = _last_row(runtime, signature, info, capabilities, calls, keep)
        except EdgeSpecError:
            return False
        return _is_same(row, truth)

    rows_on_past = agrees(several, [tokens[:1], tokens[1:]])
    other = (tokens[0] + 5) % info.n_vocab
    rewinds = agrees(one_row, [tokens[:1], [other], [other], *([token] for token in tokens[1:])], keep=1)
    return Capabilities(last_row_only, rows_on_past, rewinds, is_shared)


def rows_agree(open_one: Callable[[], OnnxSession], info: ModelInfo, n_ids: int, n_features: int = 0) -> bool:
    """Whether several rows of one call are those of single calls, on an empty cache and on a past.

    Drivers were seen whose attention is wrong beyond the first few keys. Rounding of other kernels looks alike in the
    rows, so rows that are farther off than the first ones are also judged by what the last one makes of two other
    tokens before it. open_one: makes a session. n_ids: token ids go up to it. n_features: channels of the feature that
    the graph takes beside each token. Raises BackendError where not even single rows run.
    """
    n = min(ROWS, info.n_ctx)
    text = [(7 * i + 1) % n_ids for i in range(n)]
    changed = [*text[:-3], *((token + 5) % n_ids for token in text[-3:-1]), *text[-1:]]
    features = np.random.default_rng(0).normal(size=(n, n_features)).astype(np.float32) if n_features else None

    def feed(session: OnnxSession, tokens: Sequence[int], sizes: Sequence[int]) -> FloatArray:
        """The rows of the calls up to the end of `tokens`, as copies; columns of -inf (no token's) are 0."""
        found = []
        for size in sizes:
            part = slice(session.n_past, session.n_past + size)
            own = None if features is None else features[part]
            found.append(session.forward(tokens[part], features=own).logits.copy())
        rows = np.concatenate(found)
        return np.where(np.isneginf(rows), np.float32(0), rows)

    session = open_one()
    try:
        rows = feed(session, text, [1] * n)
        session.keep(max(0, n - 3))
        change = rows[-1] - feed(session, changed, [1] * min(3, n))[-1]
    except EdgeSpecError as error:
        raise BackendError(f"{info.name} does not run on device {info.device!r}: {error}") from error
    try:
        for sizes in ([n], [min(2, n - 1), n - min(2, n - 1)]):
            session.keep(0)
            found = feed(session, text, sizes)
            session.keep(0)
            difference = found[-1] - feed(session, changed, sizes)[-1] - change
            is_same_change = np.linalg.norm(difference) <= SAME_CHANGE * np.linalg.norm(change)
            if not _are_near(found, rows, is_same_change=bool(is_same_change)):
                return False
    except EdgeSpecError:
        return False
    finally:
        session.close()
    return True


def _are_near(found: FloatArray, rows: FloatArray, *, is_same_change: bool) -> bool:
    """Whether all rows are those wanted, or differ by rounding alone."""
    distances = np.sqrt(((found - rows) ** 2).mean(axis=1)) / (rows.std(axis=1) + 1e-6)
    rounding = max(ROUNDING, MOST_ROUNDING * float(distances[:FEW_KEYS].max()))
    return bool(distances.max() <= (SAME_ROW if is_same_change else min(SAME_ROW, rounding)))


def _is_shared(runtime: Any, signature: Signature) -> bool:
    """Hands in a cache of PROBE_LENGTH tokens of which none is used: in-place graphs return one of the same length."""
    ort = import_onnxruntime()
    assert signature.ids is not None
    feeds: dict[str, Any] = {signature.ids.name: np.ones((1, 1), signature.ids.dtype)}
    if signature.mask is not None:
        feeds[signature.mask.name] = np.ones((1, 1), signature.mask.dtype)
    if signature.positions is not None:
        feeds[signature.positions.name] = np.zeros((1, 1), signature.positions.dtype)
    for port in signature.past:
        feeds[port.name] = np.zeros(signature.kv_shape(port, PROBE_LENGTH), port.dtype)
    options = ort.RunOptions()
    options.log_severity_level = 4
    try:
        (present,) = runtime.run([signature.present[0].name], feeds, options)
    except Exception as error:
        short_message(error)
        return False
    return bool(present.shape[2] == PROBE_LENGTH)


def _returns_last_row(signature: Signature) -> bool:
    assert signature.logits is not None
    return signature.rows is None and len(signature.logits.shape) == 3 and signature.logits.shape[1] == 1


def _last_row(
    runtime: Any,
    signature: Signature,
    info: ModelInfo,
    capabilities: Capabilities,
    calls: Sequence[Sequence[int]],
    keep: int | None = None,
) -> FloatArray:
    """[n_vocab] logits after `calls`; with `keep`, the cache is cut to it after the third call."""
    session = open_session(runtime, signature, info, capabilities)
    for index, tokens in enumerate(calls):
        rows = session.forward(tokens, logits_rows=[len(tokens) - 1])
        if keep is not None and index == 2:
            session.keep(keep)
    row: FloatArray = rows.logits[-1].copy()
    session.close()
    return row


def _is_same(row: FloatArray, truth: FloatArray) -> bool:
    return bool(np.abs(row - truth).max() <= SAME_ROW * (truth.std() + 1e-6))

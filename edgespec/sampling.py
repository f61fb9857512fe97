"""From a row of logits to the candidates that sampling may still choose.

Owns the sampling parameters and the one order in which they act, for plain decoding, drafting and verification alike:
logit bias, bad words, processors (grammar), minimum length -> repetition, frequency, presence penalties -> temperature
-> top-k -> top-p -> min-p. A pure function of (history, row): rejected tokens leave nothing to undo. It draws nothing:
choosing among the candidates is the verifier's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, IncompatibleError, NumericsError
from edgespec.sampling_params import SamplingParams
from edgespec.types import Candidates

__all__ = ["Processor", "Sampler", "SamplingParams"]

FloatArray = NDArray[np.floating[Any]]
Processor = Callable[[Sequence[int], FloatArray], None]
"""processor(history, logits): changes `logits` [n_vocab], a private copy, in place; -inf forbids a token."""

_TOP_P_GUESSES = (2.0**-10, 2.0**-13, 2.0**-16)  # probability thresholds tried first; a nucleus is rarely wider
_TOP_K_GAPS = (4.0, 12.0)  # distances from the best logit within which k tokens are looked for first
_MAX_PEAKS = 8  # best tokens found one by one; more are cheaper to partition
_MAX_POPS = 32  # rejected tokens undone one by one before the penalty counts are rebuilt


class Sampler:
    """The parameters of one request, checked against the model's vocabulary.

    n_vocab: entries of a logits row. eos_ids: tokens held back until `min_tokens`. n_prompt: length of the prompt,
    which separates prompt from output in a history. processors: further constraints, applied in order.
    Raises ConfigError where a token id of the parameters lies outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_vocab: int,
        eos_ids: Iterable[int],
        n_prompt: int,
        processors: Sequence[Processor] = (),
    ) -> None:
        self.params = params
        self.n_vocab = n_vocab
        self.eos_ids = tuple(eos_ids)
        self.n_prompt = n_prompt
        self._processors = tuple(processors)
        _check_ids("logit_bias", params.logit_bias, n_vocab)
        _check_ids("bad_words_ids", [token for word in params.bad_words_ids for token in word], n_vocab)
        _check_ids("stop_token_ids", params.stop_token_ids, n_vocab)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._bad_tokens = np.array([word[0] for word in params.bad_words_ids if len(word) == 1], dtype=np.int64)
        self._bad_words = [word for word in params.bad_words_ids if len(word) > 1]
        self._held_back = np.array(sorted({*self.eos_ids, *params.stop_token_ids}), dtype=np.int64)
        self._seen = _Seen(n_vocab, n_prompt) if params.has_penalties else None
        self._is_plain = self._seen is None and not (
            params.logit_bias or params.bad_words_ids or processors or params.min_tokens
        )
        self._all_ids = np.arange(n_vocab, dtype=np.int64)
        self._all_ids.flags.writeable = False  # handed out with every unfiltered row

    def row(self, logits: FloatArray, history: Sequence[int], ids: NDArray[np.int64] | None = None) -> Candidates:
        """Candidates of one row of logits [n_vocab], which is only read.

        history: prompt + committed + drafted before this row. The candidates' logits are shifted so that the largest
        is 0, in the dtype of the row. Raises NumericsError for a row with NaN, +inf, or no token left.
        ids: ascending token ids [m] that `logits` [m] is over, for drafts with a reduced vocabulary; all others have
        probability 0. Such a row may leave no token: its candidates are then empty.
        """
        is_reduced = ids is not None
        logits, ids = self._processed(logits, history, ids)
        names = self._all_ids if ids is None else ids
        if self.params.temperature == 0.0:
            best = int(logits.argmax())
            if is_reduced and logits[best] == -np.inf:
                return Candidates(names[:0], logits[:0])
            _check_peak(logits[best], logits, self._is_plain)
            return Candidates(names[best : best + 1], np.zeros(1, dtype=logits.dtype))
        peak = logits.max()
        if is_reduced and peak == -np.inf:
            return Candidates(names[:0], logits[:0])
        _check_peak(peak, logits, self._is_plain)
        with np.errstate(over="ignore"):  # masks near the dtype's minimum may become -inf
            scaled = (logits - peak) / logits.dtype.type(self.params.temperature)
        return self._filter(scaled, names)

    def best(
        self, logits: FloatArray, history: Sequence[int], n: int, ids: NDArray[np.int64] | None = None
    ) -> tuple[list[int], list[float]]:
        """At most `n` most likely tokens after all processors, best first, and their softmax at temperature 1.

        Temperature and filters play no part: these are the runners-up that a greedy row does not name. Arguments and
        errors as for `row`.
        """
        logits, ids = self._processed(logits, history, ids)
        peak = logits.max()
        if peak == -np.inf:
            return [], []
        _check_peak(peak, logits, self._is_plain)
        places = _best_places(logits, n)
        probs = np.exp(logits[places] - peak) / np.exp(logits - peak).sum()
        tokens = places if ids is None else ids[places]
        return tokens.tolist(), probs.tolist()

    def _processed(
        self, logits: FloatArray, history: Sequence[int], ids: NDArray[np.int64] | None
    ) -> tuple[FloatArray, NDArray[np.int64] | None]:
        """Logits before the temperature and the ids that they are over, None for the whole vocabulary."""
        wanted = self.n_vocab if ids is None else len(ids)
        if logits.shape != (wanted,):
            raise IncompatibleError(
                f"A row of logits has shape {logits.shape}, the sampler expects ({wanted},): "
                "model and sampler must share one vocabulary."
            )
        if self._is_plain:
            return logits, ids
        if ids is None:
            return self._process(logits.copy(), history), None
        full = np.full(self.n_vocab, -np.inf, dtype=logits.dtype)
        full[ids] = logits
        return self._process(full, history), None

    def _process(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Everything before the temperature, in place."""
        params = self.params
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias.astype(logits.dtype)
        logits[self._bad_tokens] = -np.inf
        for word in self._bad_words:
            n = len(word) - 1
            if tuple(history[-n:]) == word[:-1]:
                logits[word[-1]] = -np.inf
        for processor in self._processors:
            processor(history, logits)
        if params.min_tokens and len(history) - self.n_prompt < params.min_tokens:
            logits[self._held_back] = -np.inf
        if self._seen is not None:
            self._seen.update(history)
            with np.errstate(over="ignore"):
                self._seen.penalise(logits, params)
        return logits

    def _filter(self, scaled: FloatArray, names: NDArray[np.int64]) -> Candidates:
        """Top-k, top-p and min-p on logits whose maximum is 0; `names` are their token ids."""
        params = self.params
        places: NDArray[np.int64] | None = None
        if 0 < params.top_k < len(scaled):
            places = _top_k(scaled, params.top_k)
            scaled = scaled[places]
        if params.top_p < 1.0:
            chosen = _top_p(np.exp(scaled), params.top_p)
            places = chosen if places is None else places[chosen]
            scaled = scaled[chosen]
        if params.min_p > 0.0:
            chosen = np.flatnonzero(scaled >= np.log(params.min_p))
        elif places is None and self._is_plain and scaled.min() > -np.inf:
            return Candidates(names, scaled)
        else:
            chosen = np.flatnonzero(scaled > -np.inf)
        return Candidates(names[chosen if places is None else places[chosen]], scaled[chosen])


def _best_places(logits: FloatArray, n: int) -> NDArray[np.int64]:
    """Places of the `n` largest entries above -inf, best first, lowest place first among equals."""
    if n > _MAX_PEAKS:
        n = min(n, len(logits))
        near = np.flatnonzero(logits >= np.partition(logits, len(logits) - n)[len(logits) - n])
        near = near[np.lexsort((near, -logits[near]))][:n]
        return near[logits[near] > -np.inf]
    rest, found = logits.copy(), []
    for _ in range(n):
        best = int(rest.argmax())
        if rest[best] == -np.inf:
            break
        found.append(best)
        rest[best] = -np.inf
    return np.array(found, dtype=np.int64)


def _check_ids(field: str, ids: Iterable[int], n_vocab: int) -> None:
    for token in ids:
        if not 0 <= token < n_vocab:
            raise ConfigError(
                f"{field} names token {token}, but the model's vocabulary is 0..{n_vocab - 1}: use an id in that range."
            )


def _check_peak(peak: Any, logits: FloatArray, is_plain: bool) -> None:
    """The largest logit is finite unless the row is unusable: NaN and +inf both surface in a maximum."""
    if math.isfinite(peak):
        return
    if peak == -np.inf:
        cause = "the model gave -inf everywhere" if is_plain else "bias, bad words or a grammar forbid every token"
        raise NumericsError(f"A row of {len(logits)} logits leaves no token to choose: {cause}.")
    n_bad = int(np.count_nonzero(~(logits < np.inf)))
    raise NumericsError(
        f"{n_bad} of {len(logits)} logits are NaN or +inf: the model cannot run in this precision or on this device."
    )


def _keep_best(values: FloatArray, n: int, cut: Any) -> NDArray[np.int64]:
    """Ascending indices of the `n` largest values, the n-th of which is `cut`; lowest index first among equals."""
    keep = values > cut
    n_ties = n - int(np.count_nonzero(keep))
    keep[np.flatnonzero(values == cut)[:n_ties]] = True
    return np.flatnonzero(keep)


def _top_k(scaled: FloatArray, k: int) -> NDArray[np.int64]:
    """Ascending indices of the k largest entries; `scaled` [n] has maximum 0."""
    for gap in _TOP_K_GAPS:
        near = np.flatnonzero(scaled >= -gap)
        if len(near) >= k:
            break
    else:
        near = np.arange(len(scaled))
    values = scaled[near]
    return near[_keep_best(values, k, np.partition(values, -k)[-k])]


def _top_p(weights: FloatArray, p: float) -> NDArray[np.int64]:
    """Ascending indices of the smallest set of largest weights that holds a share `p` of their sum.

    Only entries above a threshold are sorted. What lies below the last threshold, (1 - p) * sum / n, adds up to less
    than the share left out, so the set that it selects always suffices.
    """
    total = weights.sum()
    wanted = p * float(total)
    for share in _TOP_P_GUESSES:
        near = np.flatnonzero(weights >= total * share)
        values = weights[near]
        if values.sum(dtype=np.float64) >= wanted:
            break
    else:
        near = np.flatnonzero(weights >= total * ((1.0 - p) / len(weights)))
        values = weights[near]
    falling = np.sort(values)[::-1]
    n = min(int(np.searchsorted(falling.cumsum(dtype=np.float64), wanted)) + 1, len(values))
    return near[_keep_best(values, n, falling[n - 1])]


class _Seen:
    """Counts of the tokens of one history, moved along as it grows or loses its tail.

    Only a memo: `update` compares the whole history with the one counted, so the result depends on nothing else.
    """

    def __init__(self, n_vocab: int, n_prompt: int) -> None:
        self._n_prompt = n_prompt
        self._tokens: list[int] = []
        self._in_prompt = np.zeros(n_vocab, dtype=bool)
        self._in_output = np.zeros(n_vocab, dtype=np.int64)

    def update(self, history: Sequence[int]) -> None:
        """Count exactly the tokens of `history`."""
        history = history if isinstance(history, list) else list(history)
        tokens = self._tokens
        for _ in range(_MAX_POPS):
            if tokens == history[: len(tokens)]:
                break
            if len(tokens) <= self._n_prompt:
                self._reset()
                break
            self._in_output[tokens.pop()] -= 1
        else:
            self._reset()
        for token in history[len(self._tokens) :]:
            if len(self._tokens) < self._n_prompt:
                self._in_prompt[token] = True
            else:
                self._in_output[token] += 1
            self._tokens.append(token)

    def _reset(self) -> None:
        self._tokens = []
        self._in_prompt[:] = False
        self._in_output[:] = 0

    def penalise(self, logits: FloatArray, params: SamplingParams) -> None:
        """Repetition penalty over prompt and output, then frequency and presence over the output, in place."""
        output = np.flatnonzero(self._in_output)
        kind = logits.dtype.type
        if params.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._in_prompt | (self._in_output > 0))
            values = logits[seen]
            penalty = kind(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            counts = self._in_output[output].astype(logits.dtype)
            logits[output] -= kind(params.frequency_penalty) * counts + kind(params.presence_penalty)

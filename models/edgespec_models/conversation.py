"""The target writes its own training corpus: conversations with itself, many at once, aligned.

Every row begins at the chat template's header. At each step a row either has a token that the template forces or
samples one, so rows whose turns end at different places still share every position and nothing is padded. Owns the
script (what a template forces) and the state of a row; files are in `corpus`, tensors in the batch session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.noise import Noise, Purpose
from edgespec.sampling import Sampler, SamplingParams
from edgespec.text import Tokenizer
from edgespec.types import Rows
from edgespec_models.corpus import FORMAT, Corpus, Parts, check_name, token_dtype
from edgespec_models.tasks import read_prompts, task

__all__ = ["BatchForward", "DataSettings", "Row", "Script", "read_script", "write_corpus", "write_rows"]

NGRAM = 8  # of the repetition measure: shorter ones also repeat in good prose
MOST_TRIES = 4  # rows written for one kept before the filters count as too strict
HEAD_GAP = 12.0  # below the best logit; fifty tokens of a real row lie within it
OPENING = 16  # tokens of a raw row that are always sampled at the user's temperature, so that greedy rows differ

Progress = Callable[[str, float, float | None], None]


class BatchForward(Protocol):
    """A batch of aligned sequences over one KV cache."""

    def forward(self, tokens: NDArray[np.int64]) -> Rows:
        """Append tokens [batch, n]; `.logits` [batch, n_vocab] are those after the last of them."""


@dataclass(frozen=True)
class DataSettings:
    """What decides a corpus. temp_assistant: one entry for each row in turn. max_user: tokens after which a user's turn
    is ended by force. min_assistant: tokens that a row must hold of the assistant's, None for a quarter of its length.
    max_repetition: largest share of 8-grams that the row held before. prompts: where first user turns come from, tasks
    for the built-in ones, a .jsonl file, or None: the model's own. Raises ConfigError for values out of range.
    """

    rows: int = 2000
    length: int = 448
    seed: int = 0
    batch: int = 24
    temp_user: float = 1.0
    temp_assistant: tuple[float, ...] = (0.0, 0.7)
    top_k: int = 50
    system: str | None = None
    is_raw: bool = False
    max_user: int = 128
    min_assistant: int | None = None
    max_repetition: float = 0.6
    prompts: str | None = None

    def __post_init__(self) -> None:
        lowest = {"rows": 2, "length": 16, "batch": 1, "max_user": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}, but it must be at least {low}")
        if not self.temp_assistant:
            raise ConfigError("temp_assistant is empty: give one temperature or several, such as 0,0.7")
        if not 0.0 < self.max_repetition <= 1.0:
            raise ConfigError(f"max_repetition is {self.max_repetition}, but it must be above 0 and at most 1")
        if not 0 <= self.fewest_assistant <= self.length:
            raise ConfigError(
                f"min_assistant is {self.min_assistant}, but a row has {self.length} tokens: give 0 to {self.length}"
            )
        for temperature in (self.temp_user, *self.temp_assistant):
            SamplingParams(temperature=temperature, top_k=self.top_k)

    @property
    def fewest_assistant(self) -> int:
        return self.length // 4 if self.min_assistant is None else self.min_assistant


@dataclass(frozen=True)
class Script:
    """The tokens that a chat template forces: head (up to the first user's text), reply (from the user's text to the
    assistant's), back (from the assistant's to the next user's). stop_ids: sampled tokens that end a turn.

    is_raw: no template; nothing is forced, and everything counts as the assistant's.
    """

    head: tuple[int, ...]
    reply: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    is_raw: bool = False


def read_script(tokenizer: Tokenizer, system: str | None = None, *, is_raw: bool = False) -> Script:
    """The script of a model's chat template, found by rendering marked messages and cutting at the marks.

    Raises ConfigError where the template writes a turn differently depending on where it stands.
    """
    if is_raw or tokenizer.chat_template is None:
        if system is not None:
            raise ConfigError("a system message needs a chat template: leave it out for raw text")
        start = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), 0)
        return Script(head=(start,), stop_ids=tuple(sorted(tokenizer.eos_ids)), is_raw=True)
    first = _pieces(tokenizer, system, ["user"])
    pieces = _pieces(tokenizer, system, ["user", "assistant", "user", "assistant", "user"])
    replies, backs = {tuple(p) for p in (first[1], *pieces[1::2])}, {tuple(p) for p in pieces[2:-1:2]}
    if len(replies) > 1 or len(backs) > 1 or first[0] != pieces[0]:
        raise ConfigError(
            "the chat template writes a turn differently depending on where in the conversation it stands, so rows "
            "cannot be written turn by turn: use raw text (--raw)"
        )
    reply, back = replies.pop(), backs.pop()
    if not reply or not back:
        raise ConfigError("the chat template puts nothing between two turns: use raw text (--raw)")
    ends = {piece[0] for piece in (reply, back) if piece[0] in tokenizer.special_ids}
    return Script(tuple(pieces[0]), reply, back, tuple(sorted({*ends, *tokenizer.eos_ids})))


def _pieces(tokenizer: Tokenizer, system: str | None, roles: Sequence[str]) -> list[list[int]]:
    """The tokens before, between and after the texts of `roles`: len(roles) + 1 lists.

    A token that holds a bit of a text belongs to the text: "[INST] " leaves the space to the word that follows.
    """
    marks = [f"hzx{'abcdefgh'[i]}jkv" for i in range(len(roles))]
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    ids = tokenizer.encode_chat(messages)
    spelled = [tokenizer.token_bytes(token) for token in ids]
    text, ends = b"".join(spelled), np.cumsum([len(piece) for piece in spelled])
    pieces, place = [], 0
    for mark in marks:
        start = text.find(mark.encode())
        if start < 0 or text.count(mark.encode()) != 1:
            raise ConfigError(
                "the chat template drops or repeats a message's text, so rows cannot be written turn by turn: use raw "
                "text (--raw)"
            )
        first = int(np.searchsorted(ends, start, side="right"))
        pieces.append(ids[place:first])
        place = int(np.searchsorted(ends, start + len(mark) - 1, side="right")) + 1
    return [*pieces, ids[place:]]


class Row:
    """One conversation in the making: its tokens, who wrote them, and what comes next."""

    def __init__(self, script: Script, max_user: int, opening: Sequence[int] = ()) -> None:
        self.script = script
        self.max_user = OPENING if script.is_raw else max_user
        self.tokens = list(script.head)
        self.assistant = [script.is_raw] * len(self.tokens)
        self.is_user = True  # whose turn it is
        self.n_turn = 0  # tokens of the present turn
        self._forced: deque[int] = deque(opening)
        if opening:  # the first user's text is given
            self._force(script.reply)

    @property
    def needs_sample(self) -> bool:
        """Whether the next token is the model's own."""
        return not self._forced

    def push(self, sampled: int | None) -> int:
        """Take the next step; `sampled` is ignored where a token is forced. Returns the token that was appended."""
        if self._forced:
            return self._append(self._forced.popleft(), False)
        assert sampled is not None
        is_assistant = not self.is_user
        if sampled in self.script.stop_ids:
            return self._append(self._end_turn(sampled), is_assistant and (sampled,) == self.script.back[:1])
        self.n_turn += 1
        if self.is_user and self.n_turn == self.max_user:
            self._force(self.script.reply)
        return self._append(sampled, is_assistant)

    def _end_turn(self, sampled: int) -> int:
        """The template's own first token after the turn takes the place of whatever ended it."""
        if self.script.is_raw:
            self.is_user, self.n_turn = True, 0
            return sampled
        first, *rest = self.script.reply if self.is_user else self.script.back
        self._force(rest)
        return first

    def _force(self, tokens: Sequence[int]) -> None:
        self._forced.extend(tokens)
        self.is_user, self.n_turn = not self.is_user, 0

    def _append(self, token: int, is_assistant: bool) -> int:
        self.tokens.append(token)
        self.assistant.append(is_assistant or self.script.is_raw)
        return token


class _Voices:
    """Samplers by temperature, and the noise of each row: a row depends on the seed and its number alone."""

    def __init__(self, settings: DataSettings, script: Script, n_vocab: int, indices: Sequence[int]) -> None:
        def sampler(temperature: float) -> Sampler:
            params = SamplingParams(temperature=temperature, top_k=settings.top_k)
            return Sampler(params, n_vocab=n_vocab, eos_ids=(), n_prompt=0)

        self._samplers = {t: sampler(t) for t in {settings.temp_user, *settings.temp_assistant}}
        self._user = settings.temp_user
        self._assistant = [settings.temp_assistant[i % len(settings.temp_assistant)] for i in indices]
        self._noise = [Noise(settings.seed, index) for index in indices]
        self._stop_ids = list(script.stop_ids)
        self._top_k = settings.top_k if 0 < settings.top_k < n_vocab else 0

    def sample(self, place: int, row: Row, logits: NDArray[np.floating[Any]]) -> int:
        """A token for `row`, the batch's entry `place`, given its logits [n_vocab]; a turn is never empty."""
        if row.n_turn == 0:
            logits = logits.copy()
            logits[self._stop_ids] = -np.inf
        temperature = self._user if row.is_user else self._assistant[place]
        ids = _head(logits, self._top_k) if temperature else None
        candidates = self._samplers[temperature].row(logits if ids is None else logits[ids], (), ids)
        return self._noise[place].draw(candidates, Purpose.TARGET, len(row.tokens))


def _head(logits: NDArray[np.floating[Any]], top_k: int) -> NDArray[np.int64] | None:
    """Ids that surely hold the `top_k` best of a row, so that the sampler need not sort the rest; None for all."""
    if not top_k:
        return None
    near = np.flatnonzero(logits >= logits.max() - HEAD_GAP)
    return near if len(near) >= top_k else None


def write_rows(
    session: BatchForward,
    script: Script,
    settings: DataSettings,
    indices: Sequence[int],
    progress: Callable[[int], None] | None = None,
    opening: Callable[[int], Sequence[int]] = lambda index: (),
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows with the given numbers from an empty session: tokens and assistant mask, each [len(indices), length].

    opening: the tokens of a row's first user turn; none where the model writes it.
    """
    rows = [Row(script, settings.max_user, opening(index)) for index in indices]
    voices: _Voices | None = None
    step = np.tile(np.array(script.head, np.int64), (len(rows), 1))
    for position in range(len(script.head), settings.length):
        logits = session.forward(step).logits
        voices = voices or _Voices(settings, script, logits.shape[-1], indices)
        for place, row in enumerate(rows):
            sampled = voices.sample(place, row, logits[place]) if row.needs_sample else None
            step[place, 0] = row.push(sampled)
        step = step[:, :1]
        if progress is not None:
            progress(position + 1)
    return np.array([row.tokens for row in rows]), np.array([row.assistant for row in rows], bool)


def write_corpus(
    open_batch: Callable[[int], Any],
    tokenizer: Tokenizer,
    out: Path,
    settings: DataSettings,
    facts: dict[str, Any],
    progress: Progress | None = None,
) -> Corpus:
    """Write the corpus `out`, going on from the parts that an interrupted run left beside it.

    open_batch(n): a new `BatchForward` of n sequences, with close(). facts: of the target, for the recipe; among them
    n_vocab and n_ctx. Raises ConfigError for settings that do not fit, or where the filters let too little through.
    """
    check_name(out)
    script = read_script(tokenizer, settings.system, is_raw=settings.is_raw)
    _check_length(settings, script, facts["n_ctx"])
    opening = openings(settings, tokenizer)
    recipe = {"format": FORMAT, "version": 1, **facts, "settings": asdict(settings), "script": asdict(script)}
    parts = Parts(out)
    recipe = parts.begin(recipe, free=("script",))  # templates may hold today's date
    script = Script(**{k: tuple(v) if isinstance(v, list) else v for k, v in recipe["script"].items()})  # type: ignore[arg-type]
    kept: list[Any] = []
    n_kept, counts = 0, np.zeros(3, np.int64)
    for index in range(-(-MOST_TRIES * settings.rows // settings.batch) + 1):
        part = parts.read(index)
        if part is None:
            part = _write_part(
                open_batch, script, settings, index, facts["n_vocab"], _reporter(progress, n_kept, settings), opening
            )
            parts.write(index, part)
        kept.append(part)
        n_kept += len(part["tokens"])
        counts += part["counts"]
        if n_kept >= settings.rows:
            break
    else:
        parts.remove()  # other settings could not go on with them
        raise ConfigError(
            f"only {n_kept} of {settings.rows} rows passed the filters ({_say(counts)}): loosen --max-repetition or "
            "--min-assistant"
        )
    arrays = {name: np.concatenate([part[name] for part in kept])[: settings.rows] for name in ("tokens", "assistant")}
    recipe["filters"] = {"written": int(counts[0]), "repetitive": int(counts[1]), "short": int(counts[2])}
    corpus = Corpus(arrays["tokens"], arrays["assistant"].astype(bool), recipe, out)
    corpus.save(out)
    parts.remove()
    return corpus


def _write_part(
    open_batch: Callable[[int], Any],
    script: Script,
    settings: DataSettings,
    index: int,
    n_vocab: int,
    report: Callable[[float], None],
    opening: Callable[[int], Sequence[int]],
) -> dict[str, NDArray[Any]]:
    """Write and filter one batch: tokens, assistant, and counts [written, repetitive, short]."""
    indices = range(index * settings.batch, (index + 1) * settings.batch)
    session = open_batch(settings.batch)
    try:
        tokens, assistant = write_rows(
            session, script, settings, indices, lambda n: report(settings.batch * n / settings.length), opening
        )
    finally:
        session.close()
    is_repetitive = np.array([repetition(row[len(script.head) :]) > settings.max_repetition for row in tokens])
    is_short = (assistant.sum(1) < settings.fewest_assistant) & ~is_repetitive
    keep = ~(is_repetitive | is_short)
    return {
        "tokens": tokens[keep].astype(token_dtype(n_vocab)),
        "assistant": assistant[keep].astype(np.uint8),
        "counts": np.array([len(tokens), is_repetitive.sum(), is_short.sum()], np.int64),
    }


def openings(settings: DataSettings, tokenizer: Tokenizer) -> Callable[[int], Sequence[int]]:
    """Row number -> the tokens of its first user turn, at most half a row of them."""
    if settings.prompts is None:
        return lambda index: ()
    if settings.is_raw or tokenizer.chat_template is None:
        raise ConfigError("prompts are the first turns of a conversation, and raw text has none: leave one of them out")
    given = read_prompts(settings.prompts)

    def opening(index: int) -> Sequence[int]:
        text = task(index) if given is None else given[index % len(given)]
        return tokenizer.encode(text, add_special=False)[: settings.length // 2]

    return opening


def repetition(tokens: NDArray[Any], n: int = NGRAM) -> float:
    """Share of the n-grams of a row that came before in it; 0 for a row without any."""
    if len(tokens) <= n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len({gram.tobytes() for gram in np.ascontiguousarray(grams)}) / len(grams)


def _check_length(settings: DataSettings, script: Script, n_ctx: int) -> None:
    if settings.length > n_ctx:
        raise ConfigError(f"length is {settings.length}, the target's context holds {n_ctx}: use shorter rows")
    if settings.length < 2 * len(script.head):
        raise ConfigError(
            f"length is {settings.length} and the template's header alone takes {len(script.head)} tokens: use longer "
            "rows"
        )


def _reporter(progress: Progress | None, n_kept: int, settings: DataSettings) -> Callable[[float], None]:
    def report(n: float) -> None:
        if progress is not None:
            progress("writing conversations", min(n_kept + n, settings.rows), settings.rows)

    return report


def _say(counts: NDArray[np.int64]) -> str:
    return f"{counts[0]} written, {counts[1]} repetitive, {counts[2]} with too little of the assistant"

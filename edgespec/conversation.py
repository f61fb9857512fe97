"""A chat: the messages so far, and answers added to them as far as they came.

Owns the order of messages; templates, caches and speed are below (`edgespec.llm`). What of a conversation is in the
target's cache from the turn before is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgespec.errors import ConfigError
from edgespec.outputs import CompletionOutput, Delta
from edgespec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from edgespec.llm import LLM

__all__ = ["Conversation"]

Message = dict[str, str]


class Conversation:
    """One conversation with a model that has a chat template. turns: the messages after the system's.

    answer: the last answer, as far as it came. last: its output, None where it was cut short. Raises ConfigError where
    the model has no chat template, or its template refuses a system message.
    """

    def __init__(self, llm: LLM, params: SamplingParams | None = None, system: str | None = None) -> None:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ConfigError("this model has no chat template, so it cannot chat: give it a prompt (`edgespec run`)")
        self.llm, self.params = llm, params or SamplingParams()
        self.turns: list[Message] = []
        self.answer = ""
        self.last: CompletionOutput | None = None
        self.system: str | None = None
        if system is not None:
            self.begin(system)

    @property
    def messages(self) -> list[Message]:
        """The system message, if there is one, and the turns."""
        return [*_system(self.system), *self.turns]

    def begin(self, system: str | None) -> None:
        """Forget all turns and start again under another system message; None for none.

        Raises ConfigError, and changes nothing, where the template has no place for one.
        """
        self.llm.encode_chat([*_system(system), {"role": "user", "content": "?"}])
        self.system, self.turns, self.answer, self.last = system, [], "", None

    def ask(self, text: str) -> Iterator[Delta]:
        """The answer to the next message, a Delta a round. Closing the iterator ends it, and keeps what came.

        Raises ConfigError, and changes nothing, where the conversation no longer fits into the context.
        """
        return self._ask([*self.turns, {"role": "user", "content": text}])

    def again(self) -> Iterator[Delta]:
        """Another answer to the last message, in the place of its own. Raises ConfigError where there is none."""
        asked = list(self.turns)
        while asked and asked[-1]["role"] != "user":
            asked.pop()
        if not asked:
            raise ConfigError("nothing has been asked yet")
        return self._ask(asked)

    def _ask(self, asked: list[Message]) -> Iterator[Delta]:
        ids = self.llm.encode_chat([*_system(self.system), *asked])
        return self._answer(asked, self.llm.stream(ids, self.params))

    def _answer(self, asked: list[Message], deltas: Iterator[Delta]) -> Iterator[Delta]:
        before, self.answer, self.last = self.turns, "", None
        try:
            for delta in deltas:
                self.answer += delta.text
                self.last = delta.output
                yield delta
        finally:
            deltas.close()  # type: ignore[attr-defined]
            has_come = self.answer or self.last is not None
            self.turns = [*asked, {"role": "assistant", "content": self.answer}] if has_come else before


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": text}]

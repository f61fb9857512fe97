"""`edgespec chat`: a conversation in the terminal, or one message a line on standard input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import DEFAULT_MODEL, engine_options, json_option, sampling_options, sampling_params
from edgespec.cli.run import load_llm, print_pieces, print_stats, to_json
from edgespec.errors import ConfigError

if TYPE_CHECKING:
    from edgespec.conversation import Conversation
    from edgespec.outputs import Delta

__all__ = ["command"]

QUOTES = '"""'
COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system TEXT": "forget the conversation and set the system message; none without TEXT",
    "/regen": "answer the last message again",
    "/stats": "figures of the last answer",
    "/bye": "end (also /exit, /quit, Ctrl-D)",
}
ENDS = ("/bye", "/exit", "/quit")


@click.command("chat")
@click.option(
    "-m", "--model", default=DEFAULT_MODEL, show_default=True, help="A pair's name, a folder or a .gguf file."
)
@click.option("--system", help="System message.")
@click.option("-v", "--verbose", is_flag=True, help="Colour accepted draft tokens and print each answer's figures.")
@engine_options
@sampling_options
@json_option
def command(**values: Any) -> None:
    """Chat with a model. What is in the cache from earlier turns is not run again.

    Messages are lines, or several between lines of three double quotes; /help lists the commands. On standard input
    that is no terminal each line is a message. Ctrl-C ends an answer and keeps what came of it.
    """
    from edgespec.conversation import Conversation

    params = sampling_params(values, stop=tuple(values["stop"]))
    with load_llm(values, may_plan=True) as llm:
        Chat(Conversation(llm, params, values["system"]), values).run()


class Chat:
    """One session: what is typed goes to the conversation or is a command."""

    def __init__(self, conversation: Conversation, values: dict[str, Any]) -> None:
        self.conversation, self.values = conversation, values
        self.is_typed = sys.stdin is not None and sys.stdin.isatty()
        self.noted: set[str] = set()

    def run(self) -> None:
        """Until the input or a command ends it. Raises ConfigError for a mistake where nobody is there to mend it."""
        if self.is_typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # input() edits lines with it
            if not self.values["as_json"]:
                console.say(f"{self.values['model']}: /help lists the commands, /bye ends")
        for text in _messages(self.is_typed):
            if text.strip() in ENDS:
                return
            try:
                self._take(text)
            except ConfigError as error:
                if not self.is_typed:
                    raise
                console.say(f"Error: {error}")

    def _take(self, text: str) -> None:
        name, _, rest = text.strip().partition(" ")
        if not name.startswith("/"):
            self._show(self.conversation.ask(text))
        elif name == "/regen":
            self._show(self.conversation.again())
        elif name in ("/help", "/?"):
            for usage, meaning in COMMANDS.items():
                console.say(f"{usage:14} {meaning}")
        elif name == "/stats":
            self._print_stats()
        elif name == "/clear":
            self.conversation.begin(self.conversation.system)
        elif name == "/system":
            self.conversation.begin(rest.strip() or None)
        else:
            raise ConfigError(f"there is no command {name}: /help lists them; begin a message with a space to send it")

    def _show(self, deltas: Iterator[Delta]) -> None:
        """Print an answer as it comes; Ctrl-C ends it, where there is somebody to go on."""
        conversation, is_json = self.conversation, self.values["as_json"]
        try:
            if is_json:
                for _ in deltas:
                    pass
            else:
                print_pieces(conversation.llm, deltas, colour=self.values["verbose"])
        except KeyboardInterrupt:
            if not self.is_typed:
                raise
            console.say("(stopped)")
        finally:
            deltas.close()  # type: ignore[attr-defined]
        if conversation.last is None:
            if is_json:
                console.print_json({"text": conversation.answer, "finish_reason": "cancelled"})
            return
        if is_json:
            console.print_json({"model": str(self.values["model"]), **to_json(conversation.last)})
            return
        if conversation.last.finish_reason == "length":
            console.say("(cut: the answer reached --max-tokens or the end of the context)")
        self._note()
        if self.values["verbose"]:
            self._print_stats()

    def _note(self) -> None:
        """What a user should know about the run, once a session."""
        assert self.conversation.last is not None
        for note in self.conversation.last.stats.notes:
            if note not in self.noted:
                self.noted.add(note)
                console.say(f"note: {note}")

    def _print_stats(self) -> None:
        last = self.conversation.last
        if last is None:
            raise ConfigError("there is no answer that came to its end yet")
        stats = last.stats
        console.say(f"{stats.prompt_tokens} tokens of conversation, {stats.cached_tokens} of them in the cache already")
        print_stats(last)


def _messages(is_typed: bool) -> Iterator[str]:
    """Messages as typed, or the lines of standard input; lines between QUOTES are one. None are empty."""
    lines: list[str] | None = None
    for line in _typed() if is_typed else _piped():
        if line.strip() == QUOTES:
            if lines is not None and "".join(lines).strip():
                yield "\n".join(lines)
            lines = [] if lines is None else None
        elif lines is not None:
            lines.append(line)
        elif line.strip():
            yield line
    if lines is not None:
        raise ConfigError(f"a message that begins with {QUOTES} has no end: close it with a line of {QUOTES}")


def _typed() -> Iterator[str]:
    while True:
        try:
            if sys.stdout.isatty():
                yield input(">>> ")
            else:  # the prompt must not get among the answers
                click.echo(">>> ", nl=False, err=True)
                yield input()
        except EOFError:
            click.echo(err=True)
            return


def _piped() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"line {number} is not UTF-8 text (byte {error.start}): convert it first") from error

"""`edgespec chat`: a conversation in the terminal, or one message a line on standard input."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import console
from edgespec.cli.options import engine_options, json_option, model_option, sampling_options, sampling_params
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
NAMES = {*(usage.split()[0] for usage in COMMANDS), "/?", *ENDS}


@click.command("chat")
@model_option
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
        for text, may_command in _messages(self.is_typed, wants_prompt_apart=self.values["as_json"]):
            try:
                if may_command and text.startswith("/"):
                    if self._obey(text):
                        return
                else:
                    self._show(self.conversation.ask(text))
            except ConfigError as error:
                if not self.is_typed:
                    raise
                console.say(f"Error: {error}")

    def _obey(self, text: str) -> bool:
        """Do what a command says; whether it ends the chat."""
        name, _, rest = text.strip().partition(" ")
        if name not in NAMES:
            raise ConfigError(f"there is no command {name}: /help lists them; begin a message with a space to send it")
        if rest and name != "/system":
            raise ConfigError(f"{name} takes nothing: begin a message with a space to send it")
        if name in ENDS:
            return True
        if name == "/regen":
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
        return False

    def _show(self, deltas: Iterator[Delta]) -> None:
        """Print an answer as it comes; Ctrl-C ends it, where there is somebody to go on."""
        conversation, is_json = self.conversation, self.values["as_json"]
        with _interruptible(deltas, self.is_typed) as shown:
            if is_json:
                for _ in shown:
                    pass
            else:
                print_pieces(conversation.llm, shown, colour=self.values["verbose"])
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


@contextlib.contextmanager
def _interruptible(deltas: Iterator[Delta], is_typed: bool) -> Iterator[Iterator[Delta]]:
    """The answer, which Ctrl-C ends between two rounds, so that what is in the cache stays there; twice: at once.

    Where nobody types, Ctrl-C ends the program.
    """
    stopped: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(signum)

    def shown() -> Iterator[Delta]:
        for delta in deltas:
            yield delta
            if stopped:
                return

    before = signal.signal(signal.SIGINT, stop) if is_typed else None
    try:
        yield shown()
    except KeyboardInterrupt:
        if not is_typed:
            raise
    finally:
        deltas.close()  # type: ignore[attr-defined]
        if is_typed:
            signal.signal(signal.SIGINT, before)
    if stopped:
        console.say("(stopped)")


def _messages(is_typed: bool, *, wants_prompt_apart: bool) -> Iterator[tuple[str, bool]]:
    """What is typed, or the lines of standard input, and whether it may be a command; lines between QUOTES are one
    message, and no command. None are empty."""
    lines: list[str] | None = None
    for line in _typed(wants_prompt_apart) if is_typed else _piped():
        if line.strip() == QUOTES:
            if lines is not None and "".join(lines).strip():
                yield "\n".join(lines), False
            lines = [] if lines is None else None
        elif lines is not None:
            lines.append(line)
        elif line.strip():
            yield line, True
    if lines is not None:
        raise ConfigError(f"a message that begins with {QUOTES} has no end: close it with a line of {QUOTES}")


def _typed(wants_prompt_apart: bool) -> Iterator[str]:
    """wants_prompt_apart: from the answers on standard output, also where that is the terminal."""
    is_apart = wants_prompt_apart or not sys.stdout.isatty()
    while True:
        try:
            if is_apart:
                click.echo(">>> ", nl=False, err=True)
            yield input() if is_apart else input(">>> ")
        except UnicodeDecodeError:
            console.say("Error: that is not text in the terminal's encoding")
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

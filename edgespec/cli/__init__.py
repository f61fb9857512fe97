"""The `edgespec` command: a group whose commands are imported only when they are used.

Each command is a file `edgespec/cli/NAME.py` holding a click command called `command`. This module turns errors into
one line and an exit status (0 done, 1 failed, 2 bad input, 130 interrupted) and feeds the configuration file to click;
it knows nothing about what the commands do.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from edgespec import __version__, config
from edgespec.errors import ConfigError, EdgeSpecError

__all__ = ["COMMANDS", "LazyGroup", "main"]

COMMANDS: Mapping[str, str] = {
    "run": "Generate text from a prompt, with speculation.",
    "chat": "Chat with a model, with speculation.",
    "serve": "Serve a model over HTTP, as OpenAI does.",
    "pull": "Fetch a known model and convert it for this machine.",
    "list": "List the known models and which are here.",
    "info": "Say what a model that is here is made of.",
    "export": "Convert weights into a bundle.",
    "train": "Train a draft for a target, on text that the target wrote.",
    "profile": "Measure what a model and its drafts cost on this machine.",
    "plan": "Choose draft, length and devices from what was measured.",
    "bench": "Measure how fast a model decodes here, with and without speculation.",
    "check": "Check that a target and a draft are lossless together.",
    "simulate": "Say what speculation would bring on given devices.",
    "doctor": "Say what this machine has and what is missing.",
}

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass
class _State:
    """What one invocation of the group remembers for the error report."""

    debug: bool = False


def _set_debug(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(_State).debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_debug,
        help="Show tracebacks of errors.",
    )


class LazyGroup(click.Group):
    """Imports `edgespec.cli.NAME` when the command NAME is asked for; `--help` needs no import at all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer meets them."""
        return [*COMMANDS]  # not list(...): importing edgespec.cli.list puts that module over the builtin here

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object, with `--debug` added so that it may stand after the command's name as well."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"edgespec.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        if not any("--debug" in parameter.opts for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, but an unknown command is answered with the nearest one."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = config.nearest(name, COMMANDS)
            ctx.fail(f'there is no command "{name}"{hint or "; commands are: " + ", ".join(COMMANDS)}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, from the summaries here."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, report errors in one line on stderr, and exit with the status that belongs to them."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        state = extra.setdefault("obj", _State())
        _prepare_process()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except Exception as error:
            code = _report(error, debug=state.debug)
        sys.exit(code if isinstance(code, int) else 0)


def _prepare_process() -> None:
    """Streams that somebody closed go nowhere, odd encodings replace what they lack, and SIGTERM lets clean-up run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # lives as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _report(error: Exception, *, debug: bool) -> int:
    """Print what the user should know about `error`; the exit status."""
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return 1
    _flush_stdout()
    if isinstance(error, click.exceptions.Abort):
        return INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if debug:
        traceback.print_exception(error)
    if isinstance(error, EdgeSpecError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, MemoryError):
        return _fail("out of memory: use a smaller model or context", 1)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror}{where}", 1)
    hint = "" if debug else " (run with --debug to see where)"
    return _fail(f"internal error: {type(error).__name__}: {error}{hint}", 1)


def _fail(message: str, code: int) -> int:
    click.echo("Error: " + " ".join(message.split()), err=True)
    return code


def _flush_stdout() -> None:
    """Keep what was printed so far in front of the error line."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()


def _silence_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's own flush at exit go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _spellings(command: click.Command) -> dict[str, str]:
    """Every name under which a configuration file may set an option of `command` -> the parameter's name."""
    names: dict[str, str] = {}
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or not parameter.expose_value or parameter.name is None:
            continue
        names[parameter.name] = parameter.name
        for option in parameter.opts:
            if option.startswith("--"):
                names[option[2:].replace("-", "_")] = parameter.name
    return names


def _load_config(context: click.Context, path: Path) -> None:
    group = context.command
    assert isinstance(group, LazyGroup)
    known = {}
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        known[name] = _spellings(command)
    defaults = config.read_config(path, known)
    for name, values in defaults.items():
        command = group.get_command(context, name)
        assert command is not None
        parameters = {parameter.name: parameter for parameter in command.params}
        for key, value in values.items():
            _check_setting(path, key, value, parameters[key])
    context.default_map = defaults


def _check_setting(path: Path, key: str, value: Any, parameter: click.Parameter) -> None:
    """Raise ConfigError where a value of the file is of another type than the option: TOML has types, so they count."""
    kinds: tuple[type, ...]
    if getattr(parameter, "is_flag", False):
        kinds, wanted = (bool,), "true or false"
    elif getattr(parameter, "multiple", False):
        kinds, wanted = (builtins.list,), "a list"  # the command `list` lies over the name here
    elif isinstance(parameter.type, click.types.IntParamType):
        kinds, wanted = (int,), "a whole number"
    elif isinstance(parameter.type, click.types.FloatParamType):
        kinds, wanted = (int, float), "a number"
    elif isinstance(parameter.type, click.Choice):
        kinds, wanted = (str, int), "one of " + ", ".join(map(str, parameter.type.choices))
    else:
        kinds, wanted = (str,), "text"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{path}: {key} is {value!r}, but it must be {wanted}")


def _fail_without_command(context: click.Context) -> NoReturn:
    click.echo(context.get_help(), err=True)
    context.exit(2)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="edgespec")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with defaults for the options; ~/.config/edgespec/config.toml is read otherwise.",
)
@click.pass_context
def main(context: click.Context, config_file: Path | None) -> None:
    """Run language models faster on small hardware, without changing what they say."""
    if context.invoked_subcommand is None:
        _fail_without_command(context)
    path = config_file or config.config_path()
    if config_file or path.is_file():
        _load_config(context, path)

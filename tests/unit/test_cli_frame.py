"""The frame around the commands: lazy imports, errors as one line with an exit status, signals, configuration file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from edgespec import __version__, cli, config
from edgespec.cli import COMMANDS, console, main
from edgespec.errors import ConfigError, PullError

ROOT = Path(__file__).resolve().parents[2]

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the developer's cache nor their configuration decides what these tests see."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make `edgespec boom` run a function."""

    def add(function: Callable[..., Any], *params: click.Parameter) -> None:
        module = types.ModuleType("edgespec.cli.boom")
        module.command = click.Command("boom", callback=function, params=list(params))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "edgespec.cli.boom", module)
        monkeypatch.setattr(cli, "COMMANDS", {**COMMANDS, "boom": "For tests."})

    return add


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="edgespec")


def python(code: str, **kwargs: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "export"), str(ROOT / "bench")])}
    return subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **kwargs)


def raiser(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        click.echo("printed before")
        raise error

    return function


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert __version__ in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0, result.stderr
    assert "--debug" in result.stdout


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from edgespec.cli import main, COMMANDS\n"
        "main(['--help'], standalone_mode=False)\n"
        "loaded = [name for name in COMMANDS if f'edgespec.cli.{name}' in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    process = python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert all(name in stdout for name in COMMANDS)


def test_no_command_shows_help_and_fails() -> None:
    """It failed once `edgespec list` had been imported, whose module hides the builtin `list` in the package."""
    invoke("list", "--help")
    result = invoke()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_unknown_command_names_the_nearest() -> None:
    result = invoke("pul")
    assert result.exit_code == 2
    assert 'did you mean "pull"?' in result.stderr


@pytest.mark.parametrize(("error", "code"), [(ConfigError("k is 0:\nuse 1"), 2), (PullError("k is 0:\nuse 1"), 1)])
def test_own_errors_are_one_line_and_their_exit_code(
    add_command: Callable[..., None], error: Exception, code: int
) -> None:
    add_command(raiser(error))
    result = invoke("boom")
    assert result.exit_code == code
    assert result.stderr == "Error: k is 0: use 1\n"
    assert result.stdout == "printed before\n"


def test_foreign_errors_are_called_internal(add_command: Callable[..., None]) -> None:
    add_command(raiser(KeyError("x")))
    result = invoke("boom")
    assert result.exit_code == 1
    assert result.stderr == "Error: internal error: KeyError: 'x' (run with --debug to see where)\n"


@pytest.mark.parametrize("args", [("--debug", "boom"), ("boom", "--debug")])
def test_debug_shows_the_traceback(add_command: Callable[..., None], args: tuple[str, ...]) -> None:
    add_command(raiser(ConfigError("bad")))
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("Error: bad\n")


def test_system_errors_name_the_file(add_command: Callable[..., None]) -> None:
    add_command(raiser(FileNotFoundError(2, "No such file or directory", "model.onnx")))
    result = invoke("boom")
    assert result.exit_code == 1
    assert result.stderr == "Error: No such file or directory: model.onnx\n"


def test_usage_errors_exit_2() -> None:
    result = invoke("list", "--nonsense")
    assert result.exit_code == 2
    assert "--nonsense" in result.stderr


def test_interrupt_keeps_what_was_printed(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time, types, click\n"
        "from edgespec import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore Ctrl-C
        "def wait():\n"
        "    print('partial', end=''); print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
        "module = types.ModuleType('edgespec.cli.boom'); module.command = click.Command('boom', callback=wait)\n"
        "sys.modules['edgespec.cli.boom'] = module; cli.COMMANDS = {'boom': ''}\n"
        "cli.main(['boom'])"
    )
    process = python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout == "partial"
    assert "Traceback" not in stderr


def test_reader_that_leaves_causes_no_traceback() -> None:
    process = python("from edgespec.cli import main; main(['list'])", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert stderr == ""


def option(name: str, **kwargs: Any) -> click.Option:
    return click.Option([name], **kwargs)


def config_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("text", ["draft-max = 7", "draft_max = 7", "[boom]\ndraft-max = 7", "k = 7"])
def test_config_file_gives_defaults(add_command: Callable[..., None], tmp_path: Path, text: str) -> None:
    add_command(lambda k: click.echo(k), click.Option(["--draft-max", "k"], type=int, default=4))
    path = config_file(tmp_path, text)
    assert invoke("--config", path, "boom").stdout == "7\n"
    assert invoke("--config", path, "boom", "--draft-max", "2").stdout == "2\n"


def test_config_table_wins_over_top_level(add_command: Callable[..., None], tmp_path: Path) -> None:
    add_command(lambda k: click.echo(k), option("--k", type=int))
    assert invoke("--config", config_file(tmp_path, "k = 1\n[boom]\nk = 2"), "boom").stdout == "2\n"


def test_config_in_the_usual_place_is_read(add_command: Callable[..., None]) -> None:
    add_command(lambda k: click.echo(k), option("--k", type=int))
    config.config_dir().mkdir(parents=True)
    config.config_path().write_text("k = 3", encoding="utf-8")
    assert invoke("boom").stdout == "3\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_speculatve_tokens = 3", 'did you mean "num_speculative_tokens"?'),
        ("[rum]\nseed = 3", 'did you mean "run"?'),
        ("[boom]\nsead = 3", "unknown key 'sead' in [boom]"),
        ("seed = ", "not valid TOML"),
        ("seed = 'x'", "it must be a whole number"),
    ],
)
def test_config_mistakes_are_named(add_command: Callable[..., None], tmp_path: Path, text: str, message: str) -> None:
    add_command(
        lambda seed, num_speculative_tokens: None, option("--seed", type=int), option("--num-speculative-tokens")
    )
    result = invoke("--config", config_file(tmp_path, text), "boom")
    assert result.exit_code == 2
    assert message in result.stderr


def test_environment_decides_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("EDGESPEC_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_dir() == tmp_path / "xdg" / "edgespec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / ".cache" / "edgespec"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_offline_flag(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("EDGESPEC_OFFLINE", value)
    assert config.is_offline() is expected


def test_offline_flag_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_OFFLINE", "maybe")
    with pytest.raises(ConfigError, match="EDGESPEC_OFFLINE is 'maybe'"):
        config.is_offline()


class Terminal:
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest puts its own streams in place after the fixtures have run."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_colours_for_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    console.out().print("word", style="red")
    assert ESCAPE in terminal.text
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.text = ""
    console.out().print("word", style="red")
    assert terminal.text == "word\n"


def test_no_colours_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    console.out().print("[bold]word[/bold] :smile:", style="red")  # the model's text is no markup
    assert capsys.readouterr().out == "[bold]word[/bold] :smile:\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with console.progress() as report:
        report("Downloading x", 5, 10)
        report("Downloading x", 10, 10)
    assert "Downloading x" in terminal.text
    assert "100 %" in terminal.text


@pytest.mark.parametrize("plain", [True, False])
def test_progress_elsewhere_is_a_line_a_stage(capsys: pytest.CaptureFixture[str], plain: bool) -> None:
    with console.progress(plain=plain) as report:
        for done in range(3):
            report("Downloading x", done, 2)
        report("Checking x", 1, 1)
    captured = capsys.readouterr()
    assert captured.err == "Downloading x\nChecking x\n"
    assert captured.out == ""


def test_json_mode_leaves_the_terminal_without_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with console.progress(plain=True) as report:
        report("Downloading x", 1, 2)
    assert terminal.text == "Downloading x\n"


def test_json_is_one_strict_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": "é\n", "n": 1})
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == {"text": "é\n", "n": 1}
    with pytest.raises(ValueError, match="JSON"):
        console.print_json(float("nan"))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (98362432, "98.4 MB"), (4.2e12, "4.2 TB")]
)
def test_format_bytes(count: float, text: str) -> None:
    assert console.format_bytes(count) == text

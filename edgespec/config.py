"""Settings from outside: environment variables and the optional TOML configuration file.

The only module that reads `os.environ`. It knows where things lie and what a configuration file may hold; it does not
know what any setting means: values go to the command line as defaults and are checked there.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError

__all__ = [
    "bundles_dir",
    "cache_dir",
    "child_environment",
    "config_dir",
    "config_path",
    "is_offline",
    "nearest",
    "read_config",
    "read_toml",
    "wants_no_color",
]

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})


def cache_dir() -> Path:
    """Folder for downloads, bundles and the machine profile.

    $EDGESPEC_HOME, else $XDG_CACHE_HOME/edgespec, else ~/.cache/edgespec (on Windows the user's local application data
    take the place of ~/.cache). It is not created here.
    """
    home = os.environ.get("EDGESPEC_HOME")
    if home:
        return Path(home).expanduser().absolute()
    return _base_dir("XDG_CACHE_HOME", "LOCALAPPDATA", ".cache") / "edgespec"


def bundles_dir() -> Path:
    """Folder of the bundles that `pull` and `resolve` made."""
    return cache_dir() / "bundles"


def config_dir() -> Path:
    """Folder of the user's configuration and own manifests: $XDG_CONFIG_HOME/edgespec, else ~/.config/edgespec."""
    return _base_dir("XDG_CONFIG_HOME", "APPDATA", ".config") / "edgespec"


def config_path() -> Path:
    """The configuration file that is read when `--config` names no other; it need not exist."""
    return config_dir() / "config.toml"


def is_offline() -> bool:
    """Whether EDGESPEC_OFFLINE forbids every download."""
    return _flag("EDGESPEC_OFFLINE")


def wants_no_color() -> bool:
    """Whether NO_COLOR is set to anything but nothing (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of the environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def _base_dir(variable: str, windows_variable: str, fallback: str) -> Path:
    value = os.environ.get(variable)
    if value and Path(value).is_absolute():  # the XDG specification: relative paths are to be ignored
        return Path(value)
    windows = os.environ.get(windows_variable) if os.name == "nt" else None
    return Path(windows) if windows else Path.home() / fallback


def _flag(variable: str) -> bool:
    word = os.environ.get(variable, "").strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ConfigError(f"the environment variable {variable} is {word!r}, which is neither yes nor no: set it to 1 or 0")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for the known name most like `name`, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{matches[0]}"?' if matches else ""


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError naming the file when it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def read_config(path: Path, known: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Defaults per command from a configuration file, as click's `default_map` wants them.

    known: command -> {accepted spelling with underscores: parameter name}. A key at the top level applies to every
    command that has such an option, a table named after a command to that command alone (and wins). Dashes and
    underscores are the same. Raises ConfigError for keys that no command knows.
    """
    defaults: dict[str, dict[str, Any]] = {command: {} for command in known}
    content = read_toml(path)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for key, value in content.items():
        if key not in tables:
            _set_everywhere(path, key, value, known, defaults)
    for command, table in tables.items():
        if command not in known:
            hint = nearest(command, known)
            raise ConfigError(f"{path}: unknown table [{command}]{hint} (tables are: {', '.join(sorted(known))})")
        for key, value in table.items():
            spelling = _spelling(key)
            if spelling not in known[command]:
                raise ConfigError(f"{path}: unknown key {key!r} in [{command}]{nearest(spelling, known[command])}")
            defaults[command][known[command][spelling]] = value
    return defaults


def _set_everywhere(
    path: Path,
    key: str,
    value: Any,
    known: Mapping[str, Mapping[str, str]],
    defaults: dict[str, dict[str, Any]],
) -> None:
    spelling = _spelling(key)
    takers = [command for command in known if spelling in known[command]]
    if not takers:
        every = {name for names in known.values() for name in names}
        raise ConfigError(f"{path}: unknown key {key!r}{nearest(spelling, every)}")
    for command in takers:
        defaults[command][known[command][spelling]] = value


def _spelling(key: str) -> str:
    return key.replace("-", "_")

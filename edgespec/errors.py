"""The one exception tree.

`EdgeSpecError` and its children carry a full sentence: what happened, the two values, what to do. The CLI prints that
sentence and exits with `exit_code`: 2 where the input was at fault, 1 where the work failed.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BundleError",
    "CacheError",
    "ConfigError",
    "EdgeSpecError",
    "ExportError",
    "ExportRefusedError",
    "FormatError",
    "IncompatibleError",
    "MissingDependencyError",
    "NumericsError",
    "PullError",
]


class EdgeSpecError(Exception):
    """Anything that edgespec reports to its user."""

    exit_code = 1


class ConfigError(EdgeSpecError, ValueError):
    """A setting, prompt or name that cannot be used as given."""

    exit_code = 2


class IncompatibleError(ConfigError):
    """Two things that do not go together: draft and target, option and backend."""


class FormatError(EdgeSpecError, ValueError):
    """A file that does not hold what its format says (untrusted input); names the key and the offset."""

    exit_code = 2


class BundleError(EdgeSpecError):
    """A bundle that is incomplete, altered, or reaches outside its own folder."""

    exit_code = 2


class MissingDependencyError(EdgeSpecError, ImportError):
    """A package that is not installed; the message names the extra that brings it."""

    exit_code = 2


class ExportError(EdgeSpecError):
    """An export that cannot be written, or whose result failed its checks."""


class ExportRefusedError(ExportError, ConfigError):
    """An export that was asked for in a way that cannot be done: the input is at fault."""

    exit_code = 2


class PullError(EdgeSpecError):
    """A download that failed or did not match its hash; nothing half-made is left behind."""


class BackendError(EdgeSpecError):
    """A runtime that failed to load or run a model."""


class CacheError(BackendError):
    """A KV cache that cannot be rewound as asked."""


class NumericsError(BackendError):
    """Logits that are NaN or that leave no token to choose."""

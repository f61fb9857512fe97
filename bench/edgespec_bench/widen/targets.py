"""`widen`: from a known pair to a wide target in the cache, calibrated on the int4 bundle that is really used.

Owns the order of the work and the label. The noise is looked for by exporting and measuring; the one that is found is
written down in config.json, the manifest and bundle.json.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec_export import ExportOptions, export_model
from edgespec_export.sources import WeightSource, open_source

from edgespec.config import cache_dir
from edgespec.downloads import staging
from edgespec.errors import ConfigError
from edgespec.manifest import known_manifests
from edgespec_bench.widen.calibration import Agreement, agreement, calibrate, task_prompts
from edgespec_bench.widen.folder import write_folder, write_manifest
from edgespec_bench.widen.widening import FACTORS, Noise, WidenedSource

__all__ = ["WidenOptions", "wide_name", "widen"]

Say = Callable[[str], None]
Report = Callable[[str, int, int], None]
# Times the root of the factor: the largest noise that is tried, where less than half is accepted. Far beyond it the
# target repeats single words, which any draft follows: acceptance rises again, and is worth nothing.
HIGHEST = 0.45


@dataclass(frozen=True)
class WidenOptions:
    """factor: 2 or 3. acceptance, tolerance: of `model` as a draft. noise: its size, None to look for it;
    measure: its acceptance all the same.

    n_prompts, n_tokens: calibration tasks, new tokens of each.
    """

    model: str = "smollm2-135m"
    factor: int = 2
    acceptance: float = 0.70
    tolerance: float = 0.015
    noise: float | None = None
    measure: bool = False
    seed: int = 0
    n_prompts: int = 24
    n_tokens: int = 64
    threads: int = 2

    def __post_init__(self) -> None:
        if self.factor not in FACTORS:
            raise ConfigError(f"factor is {self.factor}: use {' or '.join(map(str, FACTORS))}")
        if not 0 < self.acceptance < 1:
            raise ConfigError(f"acceptance is {self.acceptance}: give a share between 0 and 1")
        if not 0 < self.tolerance < 0.5:
            raise ConfigError(f"tolerance is {self.tolerance}: give a share between 0 and 0.5")
        if self.noise is not None:
            Noise(self.noise)


def wide_name(model: str, factor: int) -> str:
    """Under which the target is known then."""
    return f"{model}-x{factor}"


def widen(options: WidenOptions, say: Say, report: Report) -> dict[str, Any]:
    """Make the target and its bundle; the result as a row. Raises ConfigError for a model that cannot be widened."""
    from edgespec.pairs import ensure, resolve, source_path

    original = open_source(source_path(options.model))
    _check(original, options.model)
    draft = ensure(options.model, report)
    name = wide_name(options.model, options.factor)
    size, found = _calibrated(original, draft, options, say, report)
    label = _label(options, size, found)
    source = WidenedSource(original, options.factor, Noise(size, options.seed), label)
    weights = cache_dir() / "synthetic" / name
    _replace_folder(source, weights, report)
    description = f"SYNTHETIC, for measuring speed: {label['what']}"
    notes = "Made, not trained: judge speed by it, not its words."
    write_manifest(name, description, notes, weights, export_settings(options.model))
    bundle = resolve(name, progress=report)
    return {**label, "name": name, "bundle": str(bundle), "n_parameters": _count(source)}


def _check(original: WeightSource, model: str) -> None:
    config = original.config
    if config.rope.kind != "none" or config.rope.divisors:
        raise ConfigError(f"{model} has scaled rotary positions ({config.rope.kind}), which the wide folder cannot say")


def _calibrated(
    original: WeightSource, draft: Path, options: WidenOptions, say: Say, report: Report
) -> tuple[float, Agreement | None]:
    """The size of the noise, and the acceptance that was measured with it."""
    if options.noise is not None and not options.measure:
        return options.noise, None
    prompts = task_prompts(draft, options.n_prompts)
    say(f"calibrating on {len(prompts)} tasks of {prompts.shape[1]} tokens, {options.n_tokens} new tokens each")

    def measure(size: float) -> Agreement:
        source = WidenedSource(original, options.factor, Noise(size, options.seed), {"what": "calibration"})
        with tempfile.TemporaryDirectory(prefix="widen-", dir=cache_dir()) as folder:
            bundle = export_model(source, Path(folder) / "bundle", _alone(options.model), report)
            return agreement(bundle, draft, prompts, options.n_tokens, options.threads)

    if options.noise is not None:
        return options.noise, measure(options.noise)
    found = calibrate(measure, options.acceptance, options.tolerance, 0.0, HIGHEST * math.sqrt(options.factor), say)
    return found.size, found.agreement


def export_settings(model: str) -> dict[str, Any]:
    """Those of the known pair, so that its drafts' taps and exit are there, rounded to nearest: GPTQ of 1 B is slow."""
    manifest = known_manifests()[model]
    return {key: value for key, value in manifest.export.items() if key != "search"} | {"quantizer": "rtn"}


def _alone(model: str) -> ExportOptions:
    """For bundles that only calibration reads: the same rounding without what drafts need."""
    values = {key: value for key, value in export_settings(model).items() if key not in ("taps", "exit_layer", "tree")}
    return ExportOptions(name="calibration", tree=False, **values)


def _label(options: WidenOptions, size: float, found: Agreement | None) -> dict[str, Any]:
    """What every place says of these weights."""
    what = f"{options.model} widened {options.factor} times, with noise of {size:.4f} of its weights on top"
    label: dict[str, Any] = {"what": what, "model": options.model, "factor": options.factor, "noise": size,
                             "seed": options.seed, "acceptance": None}  # fmt: skip
    if found is not None:
        label["what"] += f", so that the original's drafts are accepted at {found.acceptance:.2f} a position"
        label["acceptance"] = {
            "wanted": options.acceptance,
            "measured": round(found.acceptance, 4),
            "n_tokens": found.n_tokens,
            "prompts": f"{options.n_prompts} built-in training tasks",
            "draft": options.model,
        }
    return label


def _replace_folder(source: WidenedSource, weights: Path, report: Report) -> None:
    """Whole or not at all."""
    with staging(weights.parent) as temporary:
        write_folder(source, temporary / "weights", report)
        if weights.exists():
            shutil.rmtree(weights)
        (temporary / "weights").rename(weights)


def _count(source: WidenedSource) -> int:
    return sum(math.prod(shape) for shape in source.shapes.values())

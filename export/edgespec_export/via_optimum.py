"""Models of other families: a Hugging Face folder goes through optimum's exporter, and the result is judged here.

Owns starting optimum in its own Python (its transformers rarely fits beside other packages), what must be in the folder
for edgespec to run it, and the comparison with transformers' own logits. The graph is optimum's: float32, plain
operators, a cache that grows by a copy at every call.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends import load_model
from edgespec.children import describe_exit
from edgespec.config import child_environment
from edgespec.errors import ExportError, ExportRefusedError, MissingDependencyError
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Session
from edgespec_export.exporter import Progress
from edgespec_export.parity import CheckOptions, Parity, compare
from edgespec_export.texts import check_tokens
from edgespec_export.writer import new_folder

__all__ = ["export_with_optimum"]

FloatArray = NDArray[np.float32]
TASK = "text-generation-with-past"
_REFERENCE = Path(__file__).with_name("optimum_reference.py")
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Measured on SmolLM2-135M and tiny GPT-2, GPT-NeoX and Phi models: KLD up to 2e-11, every top token, logits to 1e-4.
MIN_TOP1, MAX_KLD = 0.99, 1e-6
_TAIL = 3  # lines of a child's output that an error shows
_INSTALL = (
    "python -m venv .venv-optimum && .venv-optimum/bin/pip install 'edgespec[optimum]', then"
    " --optimum-python .venv-optimum/bin/python"
)


def export_with_optimum(
    source: str | Path,
    out: str | Path,
    *,
    python: str | Path | None = None,
    check: CheckOptions | None = None,
    progress: Progress | None = None,
) -> Parity | None:
    """Export the Hugging Face folder `source` to the optimum folder `out`, which appears only if all went well.

    python: the interpreter that has optimum-onnx; None for the one that runs this. check: compare the graph, run by
    edgespec, with transformers' logits and refuse what is worse than its limits. Raises ExportRefusedError for a folder
    that cannot be exported, MissingDependencyError where there is no optimum, ExportError for what failed.
    """
    source, out, report = Path(source), Path(out), progress or (lambda step, done, total: None)
    _check_source(source)
    interpreter = _find_python(python)
    with new_folder(out, force=False) as folder:
        report("optimum", 0, 1)
        _run("optimum's export", [interpreter, "-m", "optimum.commands.optimum_cli", *_arguments(source, folder)])
        _complete(source, folder)
        report("optimum", 1, 1)
        if check is None:
            return None
        report("check", 0, 1)
        parity = _compare(source, folder, interpreter, check)
        report("check", 1, 1)
        _gate(parity, check)
    return parity


def _check_source(source: Path) -> None:
    if not (source / "config.json").is_file():
        what = "is a file" if source.is_file() else "has no config.json" if source.is_dir() else "does not exist"
        raise ExportRefusedError(
            f"{source} {what}: optimum takes a Hugging Face folder (of a GGUF, make one with `edgespec export --format"
            " hf`)."
        )
    if not list(source.glob("*.safetensors")):
        raise ExportRefusedError(f"{source} holds no *.safetensors: save the model with `safe_serialization=True`.")
    if not (source / "tokenizer.json").is_file():
        raise ExportRefusedError(
            f"{source} has no tokenizer.json, which edgespec reads words by: save a fast tokenizer there"
            " (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`)."
        )


def _find_python(python: str | Path | None) -> str:
    """The interpreter, after asking it for optimum's exporter."""
    found = sys.executable if python is None else shutil.which(str(python))
    if found is None:
        raise ExportRefusedError(f"{python} is no program: give the Python that has optimum, as in {_INSTALL}.")
    question = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('optimum.exporters.onnx') else 3)"
    try:
        has_optimum = subprocess.run([found, "-c", question], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise ExportRefusedError(f"{found} cannot be started ({error.strerror}): give a Python.") from error
    if not has_optimum:
        raise MissingDependencyError(
            f"{found} has no optimum-onnx, which --via optimum runs. It needs older packages than edgespec's others, so"
            f" give it an environment of its own: {_INSTALL}."
        )
    return found


def _arguments(source: Path, folder: Path) -> list[str]:
    return ["export", "onnx", "--model", str(source), "--task", TASK, "--dtype", "fp32", "--device", "cpu", str(folder)]


def _run(what: str, command: Sequence[str]) -> None:
    """Run a child to its end, offline; ExportError with its last words where it fails."""
    environment = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONWARNINGS="ignore")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise ExportError(f"{describe_exit(what, done.returncode)}: {' / '.join(lines[-_TAIL:]) or 'it said nothing'}")


def _complete(source: Path, folder: Path) -> None:
    """The source's own texts in place of what transformers made of them, and a graph where edgespec looks for it."""
    graphs = sorted(path.name for path in folder.glob("*.onnx"))
    if "model.onnx" not in graphs:
        raise ExportError(
            f"optimum wrote {', '.join(graphs) or 'no graph'} and no model.onnx: no decoder with a cache."
        )
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if Tokenizer.load(folder).hash != Tokenizer.load(source).hash:
        raise ExportError("the tokenizer that was written differs from the source's: this is a fault of edgespec.")


def _gate(parity: Parity, check: CheckOptions) -> None:
    min_top1 = MIN_TOP1 if check.min_top1 is None else check.min_top1
    max_kld = MAX_KLD if check.max_kld is None else check.max_kld
    if parity.top1_agreement < min_top1 or not parity.kld_mean <= max_kld:
        raise ExportError(
            f"the graph agrees with transformers on {parity.top1_agreement:.1%} of {parity.n_tokens} top tokens (at"
            f" least {min_top1:.1%} wanted) with a mean KLD of {parity.kld_mean:.4g} (at most {max_kld:.4g} wanted):"
            " optimum does not export this model right; try other versions of it, or lower the limits with --min-top1"
            " and --max-kld."
        )


class _SessionRunner:
    """The graph as edgespec runs it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def forward(self, tokens: Sequence[int], past: int) -> FloatArray:
        self._session.keep(past)
        return self._session.forward(tokens).logits


class _SavedLogits:
    """Logits of one text, [n, n_vocab], that the reference left; a state is how many tokens were read."""

    def __init__(self, text: Sequence[int], logits: FloatArray) -> None:
        self._text, self._logits = text, logits

    def new_state(self) -> list[int]:
        return [0]

    def forward(self, tokens: Sequence[int], state: list[int]) -> FloatArray:
        start, state[0] = state[0], state[0] + len(tokens)
        assert list(self._text[start : state[0]]) == list(tokens), "the comparison left the text"
        return self._logits[start : state[0]]


def _compare(source: Path, folder: Path, python: str, check: CheckOptions) -> Parity:
    model = load_model(folder, n_ctx=None)
    try:
        text = check_tokens(folder, model.info, check.n_tokens)
        with tempfile.TemporaryDirectory(prefix="edgespec-logits-") as place:
            ids, logits = Path(place) / "ids.json", Path(place) / "logits.npy"
            ids.write_text(json.dumps(text))
            _run("the comparison with transformers", [python, str(_REFERENCE), str(source), str(ids), str(logits)])
            expected: Any = np.load(logits, allow_pickle=False)
        if expected.shape != (len(text), model.info.n_vocab):
            raise ExportError(
                f"transformers gives logits {list(expected.shape)} and the graph {[len(text), model.info.n_vocab]}."
            )
        session = model.open_session()
        return compare(_SessionRunner(session), _SavedLogits(text, expected), text)
    finally:
        model.close()

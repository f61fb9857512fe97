"""The whole package: light imports, `__all__`, extras named where a package is missing, data files in the wheel."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import MissingDependencyError

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "llama_cpp", "gguf", "tokenizers", "jinja2", "safetensors")
COMMAND_LINE = ("click", "rich")
LIGHT = (
    "edgespec",
    "edgespec.bundle",
    "edgespec.config",
    "edgespec.cpu",
    "edgespec.device_report",
    "edgespec.devices",
    "edgespec.downloads",
    "edgespec.draft.eagle",
    "edgespec.draft.early_exit",
    "edgespec.draft.medusa",
    "edgespec.draft.model",
    "edgespec.draft.ngram",
    "edgespec.engine.controller",
    "edgespec.engine.decoder",
    "edgespec.engine.lookahead",
    "edgespec.engine.scheduler",
    "edgespec.errors",
    "edgespec.gguf",
    "edgespec.llm",
    "edgespec.loading",
    "edgespec.noise",
    "edgespec.pairs",
    "edgespec.sampling",
    "edgespec.stats",
    "edgespec.sim",
    "edgespec.testing",
    "edgespec.trace",
    "edgespec.types",
    "edgespec.verify",
    "edgespec.zoo",
)
MODULES = sorted(
    path
    for folder in ("edgespec", "export/edgespec_export")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__main__.py"
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in ("export", "bench", "models"))])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "export" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_import_is_light() -> None:
    """Nothing but numpy and the standard library comes in, whatever is installed."""
    code = f"import sys, {', '.join(LIGHT)}\nprint([n for n in {HEAVY + COMMAND_LINE!r} if n in sys.modules])"
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_import_works_without_any_optional_package() -> None:
    """An installation with numpy alone can import everything light."""
    code = f"import sys\nfor name in {HEAVY + COMMAND_LINE!r}: sys.modules[name] = None\nimport {', '.join(LIGHT)}"
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_command_line_is_light() -> None:
    """Listing the models needs no runtime."""
    code = (
        "import sys\nfrom edgespec.cli import main\nmain(['list', '--json'], standalone_mode=False)\n"
        f"sys.exit(str([n for n in {HEAVY!r} if n in sys.modules] or ''))"
    )
    result = python(code)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_public_names_are_declared(path: Path) -> None:
    """A module that defines something public has an `__all__` of names that it really defines or imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    declared = declared_names(tree)
    if declared is None:
        assert not defined, f"{module_name(path)} has no __all__"
        return
    assert len(set(declared)) == len(declared)
    module = importlib.import_module(module_name(path))
    for name in declared:
        assert hasattr(module, name), name


def declared_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def test_public_interface_resolves() -> None:
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None


def test_a_missing_runtime_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgespec.backends import load_model
    from edgespec.testing.onnx_models import write_bundle

    folder = write_bundle(tmp_path / "bundle")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'edgespec[onnx]'")):
        load_model(folder)


def pins_of(path: Path) -> set[str]:
    """No address of a registry, no path, no hash: `name==version`, with a marker where it needs a newer Python."""
    pattern = re.compile(r'[a-z0-9-]+==[0-9][0-9A-Za-z.]*( ; python_version >= "3\.\d+")?')
    pins = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(pattern.fullmatch(line) for line in pins), [line for line in pins if not pattern.fullmatch(line)]
    return {line.partition("==")[0] for line in pins}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[>=;<\[ ]", requirement)[0].replace("_", "-") for requirement in requirements}


def test_constraints_are_versions_only_and_cover_every_extra() -> None:
    """optimum's packages have pins of their own: it holds back others."""
    project = PROJECT["project"]
    extras = dict(project["optional-dependencies"])
    own = {"optimum": pins_of(ROOT / "tests/optimum/constraints.txt")}
    for extra, pinned in own.items():
        assert names_of([*project["dependencies"], *extras.pop(extra)]) <= pinned
    pinned = pins_of(ROOT / "constraints.txt")
    assert "edgespec" not in pinned
    wanted = [*project["dependencies"], *(name for extra in extras.values() for name in extra)]
    assert names_of([name for name in wanted if "<" not in name]) <= pinned
    for folder in ("openvino", "webgpu"):  # beside constraints.txt
        (package,) = pins_of(ROOT / f"tests/{folder}/constraints.txt")
        assert package == f"onnxruntime-{folder}"


def test_manifests_drafts_and_packages_go_into_the_wheel(tmp_path: Path) -> None:
    """Manifests were once listed by name, so that a new one would have been left out of the wheel."""
    source = tmp_path / "source"
    patterns = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".*_cache", ".hypothesis", "tests", "zoo")
    shutil.copytree(ROOT, source, ignore=lambda folder, names: patterns(folder, names) - {"zoo.py"})
    (source / "models" / "another.toml").write_text("", encoding="utf-8")
    draft = source / "models" / "zoo" / "another" / "eagle"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "edgespec/zoo.py",
        "edgespec/zoo/another/eagle/config.json",
        "edgespec/manifests/another.toml",
        "edgespec/manifests/smollm2-135m.toml",
        "edgespec_models/__init__.py",
        "edgespec_export/__init__.py",
        "edgespec_bench/__init__.py",
        "edgespec_bench/prompts/chat.jsonl",
        "edgespec_bench/report/page.html.jinja",
        "edgespec/py.typed",
    ):
        assert name in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "edgespec",
        "edgespec_export",
        "edgespec_bench",
        "edgespec_models",
    }


def test_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_drafter_of_the_architecture_page_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is complete, and the text stays the target's."""
    from edgespec import LLM, SamplingParams
    from edgespec.draft import base
    from edgespec.testing import TableModel

    monkeypatch.setitem(base.DRAFTERS, "repeat", "replaced below, removed afterwards")
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {})
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = LLM(TableModel(5, seed=1), draft="repeat").generate([[1, 2]], params)[0].outputs[0]
    plain = LLM(TableModel(5, seed=1), draft="none").generate([[1, 2]], params)[0].outputs[0]
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > 0

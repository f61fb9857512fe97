"""`edgespec train`: data end to end on a real session, bad input in one line with exit status 2, what resumes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from edgespec_models.corpus import Corpus
from edgespec_models.pipeline import Target

from edgespec.cli.train import command
from edgespec.errors import EdgeSpecError

DATA = ["--rows", "6", "--length", "64", "--batch", "3", "--max-user", "8", "--max-repetition", "1",
        "--min-assistant", "0", "--threads", "1"]  # fmt: skip


def run(*args: Any) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def error(result: Result) -> str:
    """The one line that the user sees; asserts that the input was blamed."""
    if isinstance(result.exception, EdgeSpecError):
        assert result.exception.exit_code == 2
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "c.safetensors"
    result = run("data", "-m", target.folder, "-o", path, *DATA, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["rows"] == 6
    assert facts["written"] == 6
    return path


def test_data_writes_corpus_and_recipe(target: Target, corpus: Path) -> None:
    made = Corpus.load(corpus)
    assert made.tokens.shape == (6, 64)
    assert made.recipe is not None
    assert made.recipe["tokenizer_hash"] == target.bundle.info.tokenizer_hash
    assert made.recipe["settings"]["rows"] == 6
    assert not corpus.with_name(f"{corpus.name}.parts").exists()


def test_interrupted_data_goes_on_to_the_same_bytes(
    target: Target, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import edgespec.backends.onnx.batch as batch

    n_calls = 0
    forward = batch.BatchSession.forward

    def failing(self: Any, tokens: Any, taps: Any = ()) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 80:
            raise KeyboardInterrupt
        return forward(self, tokens, taps)

    out = tmp_path / "c.safetensors"
    monkeypatch.setattr(batch.BatchSession, "forward", failing)
    result = run("data", "-m", target.folder, "-o", out, *DATA)
    assert result.exit_code == 1
    assert f"kept in {out}.parts" in result.output
    assert not out.exists()
    assert len(list(Path(f"{out}.parts").glob("part-*"))) == 1
    assert run("data", "-m", target.folder, "-o", out, *DATA).exit_code == 0
    assert out.read_bytes() == corpus.read_bytes()
    assert out.with_suffix(".json").read_bytes() == corpus.with_suffix(".json").read_bytes()


def test_data_does_not_overwrite(target: Target, corpus: Path) -> None:
    assert "--force" in error(run("data", "-m", target.folder, "-o", corpus, *DATA))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--temp-assistant", "hot"], "separated by commas"),
        (["--temp-assistant", ""], "empty"),
        (["--top-k", "-5"], "top_k"),
        (["--min-assistant", "1000"], "min_assistant"),
        (["--rows", "1"], "--rows"),
        (["--raw", "--system", "x"], "chat template"),
        (["--length", "100000"], "context holds"),
    ],
)
def test_wrong_data_options(target: Target, tmp_path: Path, args: list[str], word: str) -> None:
    assert word in error(run("data", "-m", target.folder, "-o", tmp_path / "c.safetensors", *DATA, *args))


def test_wrong_names(target: Target, tmp_path: Path) -> None:
    assert ".safetensors" in error(run("data", "-m", target.folder, "-o", tmp_path / "c.npz", *DATA))
    assert "does not exist" in error(run("data", "-m", tmp_path / "absent", "-o", tmp_path / "c.safetensors"))


@pytest.mark.parametrize("kind", ["tinydraft", "eagle", "medusa", "exit"])
def test_help_of_every_kind(kind: str) -> None:
    result = run(kind, "--help")
    assert result.exit_code == 0
    assert "--patience" in result.output


def test_training_needs_one_source_of_text(target: Target, corpus: Path, tmp_path: Path) -> None:
    assert "--corpus" in error(run("eagle", "-m", target.folder, "-o", tmp_path / "e"))
    both = run("eagle", "-m", target.folder, "-o", tmp_path / "e", "--corpus", corpus, "--rows", "4")
    assert "--rows" in error(both)


def test_training_does_not_overwrite_and_resumes_only_what_is_there(
    target: Target, corpus: Path, tmp_path: Path
) -> None:
    given = ["eagle", "-m", target.folder, "--corpus", corpus, "-o", tmp_path / "e"]
    assert "no checkpoint" in error(run(*given, "--resume"))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.json").write_text("{}")
    assert "--force" in error(run(*given))
    assert "one of them" in error(run(*given, "--resume", "--force"))


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_missing_torch_is_named(target: Target, corpus: Path, tmp_path: Path) -> None:
    assert "edgespec[train]" in error(run("eagle", "-m", target.folder, "--corpus", corpus, "-o", tmp_path / "e"))


@pytest.mark.train
def test_wrong_training_input(target: Target, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    given = ["-m", target.folder, "--corpus", corpus, "-o", tmp_path / "d"]
    whole = [*given, "--weights", target.weights]
    assert "--weights" in error(run("eagle", *given))
    assert "does not exist" in error(run("eagle", *given, "--weights", tmp_path / "absent"))
    assert "layer.9" in error(run("eagle", *whole, "--taps", "layer.9,final"))
    assert "final" in error(run("medusa", *whole, "--taps", "final,layer.0"))
    assert "cannot use it" in error(run("eagle", *whole, "--device", "toaster"))
    assert "--layers" in error(run("tinydraft", *whole, "--layers", "a,b"))
    assert "no corpus" in error(run("eagle", "-m", target.folder, "--corpus", tmp_path / "x", "-o", tmp_path / "d",
                                    "--weights", target.weights))  # fmt: skip


@pytest.mark.train
def test_training_by_rows_makes_its_own_corpus(target: Target, tmp_path: Path) -> None:
    """The whole way by the command line, with a bundle's weights given; the card holds commands that make it again."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from edgespec_models.conversation import DataSettings
    from edgespec_models.pipeline import make_corpus

    out = tmp_path / "exit"
    settings = DataSettings(rows=6, length=64, batch=3, max_user=8, max_repetition=1.0, min_assistant=0)
    make_corpus(target, out.with_name("exit.corpus.safetensors"), settings)  # what an earlier run left
    given = ["exit", "-m", target.folder, "--weights", target.weights, "-o", out, "--rows"]
    assert "holds 6 rows" in error(run(*given, "7"))
    result = run(*given, "6", "--steps", "2", "--batch", "2", "--width", "32", "--vocabulary", "80", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout.splitlines()[-1])["acceptance"]["k"] == 4
    card = (out / "README.md").read_text()
    assert "edgespec train data -m bundle -o exit.corpus.safetensors" in card
    assert "--steps 2 --batch 2" in card
    assert str(tmp_path) not in card

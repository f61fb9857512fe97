"""Known pairs: weights from a model hub, through a stand-in for its client.

The stand-in serves a local file; one test holds its signature against the real client's. The exporter is real.
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest
from pair_world import World

from edgespec import pairs
from edgespec.errors import MissingDependencyError, PullError

ROOT = Path(__file__).resolve().parents[2]


class FakeHub(types.ModuleType):
    """huggingface_hub's two functions over a local file; the first call breaks off after 1000 bytes when told so."""

    def __init__(self, content: bytes) -> None:
        super().__init__("huggingface_hub")
        self.content = content
        self.break_off = False
        self.resumed_from: list[int] = []

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str, local_dir: Path) -> str:
        partial = Path(local_dir) / ".cache" / "incomplete"
        partial.parent.mkdir(parents=True, exist_ok=True)
        start = partial.stat().st_size if partial.exists() else 0
        self.resumed_from.append(start)
        with partial.open("ab") as file:
            file.write(self.content[start:1000] if self.break_off else self.content[start:])
        if self.break_off:
            raise OSError("connection reset\nby peer")
        target = Path(local_dir) / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(partial, target)
        return str(target)

    def snapshot_download(self, repo_id: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> str:
        raise AssertionError("a single file was wanted")


@pytest.fixture
def hub(world: World, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(world.content)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    world.write_manifest(source=world.hub_source())
    return fake


def test_a_hub_download_resumes(world: World, hub: FakeHub) -> None:
    hub.break_off = True
    with pytest.raises(PullError, match=r"could not be downloaded: connection reset$"):
        pairs.pull("tiny")
    assert not any(path.name == "tiny.gguf" for path in world.sources())
    hub.break_off = False
    pairs.pull("tiny")
    assert hub.resumed_from == [0, 1000]
    assert world.leftovers() == []


def test_a_wrong_hub_file_is_thrown_away_whole(world: World, hub: FakeHub) -> None:
    """A file that fails its hash must not be what the next attempt resumes from."""
    hub.content = bytes(len(world.content))
    with pytest.raises(PullError, match="not the one that was published"):
        pairs.pull("tiny")
    assert world.sources() == []
    hub.content = world.content
    pairs.pull("tiny")
    assert hub.resumed_from == [0, 0]


def test_a_missing_hub_client_names_its_extra(world: World, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"edgespec\[hub\]"):
        pairs.pull("tiny")


def test_the_real_hub_client_takes_these_arguments() -> None:
    """FakeHub stands for functions of another package: their parameters must exist there under these names."""
    import inspect

    huggingface_hub = pytest.importorskip("huggingface_hub")
    one = inspect.signature(huggingface_hub.hf_hub_download).parameters
    many = inspect.signature(huggingface_hub.snapshot_download).parameters
    assert {"repo_id", "filename", "revision", "local_dir"} <= set(one)
    assert {"repo_id", "revision", "local_dir", "allow_patterns"} <= set(many)

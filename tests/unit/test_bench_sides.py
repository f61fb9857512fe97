"""The protocol that every measured engine speaks, and the environments of the peers, with small children."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgespec_bench import __main__ as command_line
from edgespec_bench import peers as peers_module
from edgespec_bench.peer_models import Workshop
from edgespec_bench.peers import GENAI, PEERS, Peer, find_peer, set_up
from edgespec_bench.protocol import CHILDREN, Child
from edgespec_bench.sides import Side, decode_tok_s, find_side, list_sides, open_sides

from edgespec.errors import BackendError, ConfigError

ENGINE = """
import sys
sys.path.insert(0, CHILDREN)
from line_server import serve


class Counter:
    name, version = "counter", "9.9"

    def __init__(self, given):
        print("a library that talks on stdout")
        if given["settings"].get("bad"):
            raise ValueError("no such model")

    def decode(self, setting, request, recorder):
        first, rest = request["prompt"][0], request["n_tokens"] - 1
        if first == 666:
            print("out of luck", file=sys.stderr, flush=True)
            sys.exit(3)
        recorder.add([first])
        while recorder.add([first + len(recorder.tokens)] * (2 if setting == "pairs" else 1)) and first != 7:
            pass
        return {"rounds": rest}


serve(Counter)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Child]:
    """A child that counts upwards from the prompt's first token, in the settings that are named."""
    script = tmp_path / "engine.py"
    script.write_text(f"CHILDREN = {str(CHILDREN)!r}\n{ENGINE}", encoding="utf-8")

    def begin(*settings: str) -> Child:
        given = {"model": "m", "threads": 2, "settings": {name: {"a": 1} for name in settings}}
        return Child("counter", [sys.executable, str(script), json.dumps(given)])

    return begin


def request(*prompt: int, setting: str = "plain", n_tokens: int = 4) -> dict[str, Any]:
    return {"do": "decode", "setting": setting, "prompt": list(prompt), "n_tokens": n_tokens, "temperature": 0.0,
            "top_p": 1.0, "seed": 1}  # fmt: skip


def test_a_child_says_what_it_is_and_answers_line_by_line(start: Callable[..., Child]) -> None:
    """What its libraries print to stdout used to be able to end up among the answers."""
    child = start("plain", "pairs")
    try:
        assert (child.ready["engine"], child.ready["version"], child.ready["threads"]) == ("counter", "9.9", 2)
        assert child.ready["settings"]["pairs"] == {"a": 1}
        for first in (10, 20):
            answer = child.ask("counter/plain", request(first))
            assert answer["tokens"] == [first, first + 1, first + 2, first + 3]
            assert answer["rounds"] == 3
            assert answer["drafted"] is None
            assert answer["seconds"] >= 0 <= answer["ttft_s"]
            assert answer["peak_rss_mb"] > 1
    finally:
        child.close()


def test_tokens_beyond_the_number_asked_for_are_cut(start: Callable[..., Child]) -> None:
    child = start("pairs")
    try:
        answer = child.ask("counter/pairs", request(10, setting="pairs"))
        assert answer["tokens"] == [10, 11, 11, 13]
        assert answer["first_tokens"] == 1
    finally:
        child.close()


def test_what_fails_names_the_side(start: Callable[..., Child]) -> None:
    child = start("plain")
    try:
        with pytest.raises(BackendError, match=r"counter/x failed .* was started without the setting 'x'"):
            child.ask("counter/x", request(1, setting="x"))
        with pytest.raises(BackendError, match="gave 2 tokens of 4: it stopped by itself"):
            child.ask("counter/plain", request(7))
        with pytest.raises(BackendError, match="no answer to 'logits'"):
            child.ask("counter/plain", {"do": "logits", "setting": "plain"})
        assert child.ask("counter/plain", request(1))["tokens"] == [1, 2, 3, 4]
        for _ in range(2):
            with pytest.raises(BackendError, match=r"counter/plain ended with status 3 .*: out of luck"):
                child.ask("counter/plain", request(666))
    finally:
        child.close()


def test_an_engine_that_cannot_load_is_one_line(start: Callable[..., Child]) -> None:
    with pytest.raises(BackendError, match=r"^counter failed while it was loaded: ValueError: no such model$"):
        start("bad")


def test_speed_leaves_out_what_came_with_the_first_token() -> None:
    answer = {"tokens": [1] * 10, "first_tokens": 4, "seconds": 2.0}
    assert decode_tok_s(answer) == 3.0
    with pytest.raises(BackendError, match="ask for more"):
        decode_tok_s({**answer, "first_tokens": 10})


def test_sides_have_names_of_their_own_and_say_why() -> None:
    sides = list_sides()
    assert len({side.name for side in sides}) == len(sides)
    assert all(side.note and side.what in ("plain", "speculative") for side in sides)
    assert all(json.loads(json.dumps(side.options)) == side.options for side in sides)
    assert find_side("edgespec/plain") is sides[0]
    with pytest.raises(ConfigError, match="use one of edgespec/plain"):
        find_side("abacus/plain")


def test_every_side_can_be_made() -> None:
    for side in list_sides():
        if side.peer is not None:
            assert side.peer in PEERS
            assert side.parts
            assert set(side.parts) <= set(side.peer.parts)
        folder, _, name = side.child.rpartition("/")
        assert folder in ("", *side.parts)
        assert (CHILDREN / (f"{name}.cpp" if folder else name)).is_file()


def build_touch(shop: Workshop, out: Path) -> None:
    (out / "model.bin").write_text(shop.model, encoding="utf-8")


def build_badly(shop: Workshop, out: Path) -> None:
    (out / "half").touch()
    raise BackendError("out of wood")


def small_peer(**parts: Any) -> Peer:
    return Peer("engine", "1.0", (("engine==1.0",),), parts)


def test_a_peer_that_is_not_set_up_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    peer = small_peer(int4=build_touch, draft=build_touch)
    side = Side("engine", "plain", "plain", {}, "", peer, "engine_child.py", ("int4",))
    assert peer.folder == tmp_path / "bench" / "engine-1.0"
    with pytest.raises(ConfigError, match=r"^engine/plain: engine 1.0 is not installed; run `python -m .* --setup`$"):
        side.start("m", 2)
    with pytest.raises(ConfigError, match="not installed"), open_sides([side], "m", 2):
        pass
    peer.python.parent.mkdir(parents=True)
    peer.python.touch()
    (peer.folder / "installed").touch()
    assert side.missing("m") == "engine has no int4 of m yet"
    assert peer.missing("m") == "engine has no int4 and no draft of m yet"
    (peer.model_folder("m") / "int4").mkdir(parents=True)
    assert side.missing("m") is None
    assert peer.missing("m") == "engine has no draft of m yet"


def test_setup_makes_what_is_missing_and_nothing_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    commands: list[list[str]] = []
    monkeypatch.setattr(peers_module, "run", lambda command, what: commands.append(list(command)))
    said: list[str] = []
    peer = small_peer(int4=build_touch, draft=build_badly)
    with pytest.raises(BackendError, match=r"^engine, draft of m: out of wood$"):
        set_up([peer], "m", Path("m.gguf"), said.append)
    assert [command[-1] for command in commands] == [str(peer.folder / "venv"), "engine==1.0"]
    assert (peer.model_folder("m") / "int4" / "model.bin").read_text(encoding="utf-8") == "m"
    assert not (peer.model_folder("m") / "draft").exists()
    assert sorted(path.name for path in peer.folder.iterdir()) == ["installed", "models"]
    assert list(peer.folder.parent.iterdir()) == [peer.folder]
    peer.python.parent.mkdir(parents=True)
    peer.python.touch()
    said.clear()
    set_up([small_peer(int4=build_badly, draft=build_touch)], "m", Path("m.gguf"), said.append)
    assert said == ["engine: making draft of m"]
    assert len(commands) == 2


@pytest.mark.parametrize("path", ["/models/m", "../m", "a/b", ".", ""])
def test_a_path_is_no_name_for_a_peers_model(path: str) -> None:
    """A path would lead out of the peer's folder, and what lies there is replaced by the build."""
    with pytest.raises(ConfigError, match="no pair's name"):
        GENAI.model_folder(path)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peer_packages_are_pinned(peer: Peer) -> None:
    packages = [package for group in peer.packages for package in group]
    assert all(package.count("==") == 1 for package in packages)
    assert any(package.endswith(f"=={peer.version}") for package in packages)
    assert find_peer(peer.name) is peer


def test_peers_lists_each_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    result = CliRunner().invoke(command_line.main, ["peers"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == len(PEERS)
    assert all("is not installed: add --setup" in line for line in lines)
    result = CliRunner().invoke(command_line.main, ["peers", "--only", "abacus"])
    assert (result.exit_code, result.stderr.startswith("error: there is no peer 'abacus'")) == (2, True)

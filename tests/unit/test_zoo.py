"""Trained drafts: found for their target, converted once, refused where they do not fit, the same text with each.

The target is a two-layer model that the exporter really converts; the drafts are random and therefore bad, which
changes speed alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pair_world import write_tiny_gguf
from zoo_world import KINDS, TARGET_EXPORT, write_all, write_draft

from edgespec import LLM, SamplingParams, pairs, zoo
from edgespec.bundle import Bundle
from edgespec.cli import main
from edgespec.compare import compare
from edgespec.errors import ConfigError, IncompatibleError
from edgespec.proof import pair

PROMPT = [5, 9, 5, 9, 11, 5, 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=24, ignore_eos=True)
MANIFEST = (
    'schema_version = 1\nname = "{name}"\ndescription = "a test"\nlicense = "CC0-1.0"\n{more}'
    '[target.source]\nkind = "path"\npath = "tiny.gguf"\n[target.export]\n{export}'
    '[drafts.half]\ndescription = "one layer"\nexport = {{ keep_layers = [0] }}\n'
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache, a configuration with the pairs `tiny` and `bare` (no graphs for drafts), and a zoo for `tiny`."""
    base = tmp_path_factory.mktemp("zoo é")
    models = base / "config" / "edgespec" / "models"
    models.mkdir(parents=True)
    write_tiny_gguf(models / "tiny.gguf")
    (models / "tiny.toml").write_text(MANIFEST.format(name="tiny", more="", export=TARGET_EXPORT), encoding="utf-8")
    (models / "bare.toml").write_text(MANIFEST.format(name="bare", more="", export="tree = false\n"), encoding="utf-8")
    write_all(base / "zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(base / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
        patch.setattr(zoo, "zoo_dir", lambda: base / "zoo")
        yield base


@pytest.fixture
def target(place: Path) -> Path:
    return pairs.pull("tiny")


@pytest.fixture
def bare(place: Path) -> Path:
    return pairs.pull("bare")


def ids(llm: LLM, params: SamplingParams) -> list[int]:
    return llm.generate(PROMPT, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [*KINDS, "ngram,eagle", "medusa,tinydraft"])
def test_every_trained_draft_leaves_the_text_as_it_is(target: Path, draft: str, params: SamplingParams) -> None:
    with LLM(target, draft=draft) as llm:
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == ids(llm.variant(draft="none"), params)
        assert set(output.stats.sources) & set(draft.split(","))
        accepted = output.stats.accepted + output.stats.accepted_fillers
        assert output.stats.emitted == accepted + output.stats.rounds - output.stats.cut


@pytest.mark.parametrize("draft", ["tinydraft", "eagle", "medusa", "ngram,eagle"])
def test_trees_leave_the_text_as_it_is_up_to_rounding(target: Path, draft: str) -> None:
    with LLM(target, draft=draft, tree=True, exact=False, tree_rows=6, tree_width=2) as llm:
        output = llm.generate(PROMPT, GREEDY)[0].outputs[0]
        plain = llm.variant(draft="none")
        assert plain.options.tree is False
        assert output.token_ids == ids(plain, GREEDY)
        assert max(record.drafted for record in output.stats.records) > 3
        assert llm.loaded.graph == "tree.onnx"


@pytest.mark.parametrize(
    ("options", "graph"),
    [
        ({"draft": "early-exit"}, "lower.onnx + upper.onnx + head.onnx"),
        ({"draft": "eagle", "tree": True, "exact": False}, "tree.onnx"),
        ({"draft": "eagle"}, "model.onnx"),
    ],
)
def test_compare_measures_plain_on_the_whole_graph_and_says_so(
    target: Path, options: dict[str, Any], graph: str
) -> None:
    with LLM(target, **options) as llm:
        result = compare(llm, PROMPT, GREEDY)
    assert result.graphs["plain"] == "model.onnx"
    assert {name: found for name, found in result.graphs.items() if name != "plain"} == dict.fromkeys(
        [name for name in result.graphs if name != "plain"], graph
    )
    assert result.identical or result.difference is not None
    says = any("on model.onnx" in line for line in result.summary())
    assert says == (graph != "model.onnx" and result.speedup is not None)
    if "tree" not in options:
        assert result.identical
        assert result.exact_plain is not None


def test_a_pull_converts_the_zoo_once(place: Path, target: Path) -> None:
    made = [zoo.converted(draft, Bundle.open(target)) for draft in zoo.list_drafts("tiny")]
    assert [Bundle.open(path).info.draft["kind"] for path in made] == [*KINDS.values()]  # type: ignore[index]
    times = [path.stat().st_mtime_ns for path in made]
    stages: list[str] = []
    pairs.pull("tiny", lambda stage, done, total: stages.append(stage))
    assert stages == []
    assert [path.stat().st_mtime_ns for path in made] == times
    shutil.rmtree(made[1])
    pairs.pull("tiny", lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"Converting the eagle draft of tiny"}


def test_a_pull_leaves_out_drafts_of_another_target(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of the user's that took a known pair's name must not fail on that pair's drafts."""
    write_draft(tmp_path / "bare" / "eagle", "eagle")
    write_draft(tmp_path / "bare" / "tinydraft", "tinydraft", seed=7)  # converted by no other test
    monkeypatch.setattr(zoo, "zoo_dir", lambda: tmp_path)
    stages: list[str] = []
    pairs.pull("bare", lambda stage, done, total: stages.append(stage))
    assert "Converting the tinydraft draft of bare" in stages
    assert not any("eagle" in stage for stage in stages)


def test_other_weights_are_another_bundle(place: Path, target: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(target)
    paths = [zoo.converted(zoo.read_draft(write_draft(tmp_path / str(s), "exit", seed=s)), bundle) for s in (1, 2)]
    assert paths[0] != paths[1]


def test_an_interrupted_conversion_leaves_nothing(place: Path, target: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, done: float, total: float | None) -> None:
        if done:
            raise KeyboardInterrupt

    draft = zoo.read_draft(write_draft(tmp_path / "own", "medusa", seed=7))
    before = sorted((place / "cache" / "bundles").iterdir())
    with pytest.raises(KeyboardInterrupt):
        zoo.ensure(draft, Bundle.open(target), interrupt)
    assert sorted((place / "cache" / "bundles").iterdir()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_own_weights_and_bundles_are_taken_for_their_kind(target: Path, tmp_path: Path, kind: str) -> None:
    own = write_draft(tmp_path / "own", KINDS[kind], seed=9)
    with LLM(target, draft_model=own) as llm:
        assert llm.options.draft == kind
        expected, made = ids(llm, GREEDY), llm.loaded.bundles[kind]
    assert made != zoo.converted(zoo.find_draft(kind, Bundle.open(target)), Bundle.open(target))
    with LLM(target, draft=f"ngram,{kind}", draft_model=made) as llm:
        assert llm.loaded.bundles[kind] == made
        assert ids(llm, GREEDY) == expected


def test_a_target_of_another_name_finds_the_drafts_that_fit(bare: Path) -> None:
    found = zoo.find_draft("tinydraft", Bundle.open(bare))
    assert found.config.target == "tiny"
    with LLM(bare, draft="tinydraft") as llm:
        assert ids(llm, GREEDY) == ids(llm.variant(draft="none"), GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "eagle"}, r"reads the features layer\.1, final, and bare gives none: export the target with taps="),
        ({"draft": "early-exit"}, r"needs lower\.onnx, upper\.onnx, head\.onnx of the target, and .*has model\.onnx"),
        ({"draft": "tinydraft", "tree": True, "exact": False}, r"needs tree\.onnx of the target, and .*drop the tree"),
    ],
)
def test_targets_without_the_graphs_are_refused(bare: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        LLM(bare, **options)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle", {"n_embd": 64}, "its features have 64 channels, the target's 32"),
        ("medusa", {"tokenizer_hash": "ab" * 32}, r"its tokenizer is abababababab\.\.\., the target's "),
        ("exit", {"exit_layer": 2}, "sits after 2 layers, and tiny was exported with exit_layer=1"),
        (
            "eagle",
            {"taps": ["layer.0", "final"]},
            r"reads the features layer\.0, final, and tiny gives layer\.1, final",
        ),
    ],
)
def test_drafts_of_another_target_are_refused(
    target: Path, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    own = write_draft(tmp_path / "own", kind, **changes)
    with pytest.raises(IncompatibleError, match=message):
        LLM(target, draft_model=own)


def test_no_draft_says_what_there_is_and_how_to_get_one(
    place: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_draft(tmp_path / "tiny" / "medusa", "medusa")
    monkeypatch.setattr(zoo, "zoo_dir", lambda: tmp_path)
    message = r"no eagle draft for tiny \(trained drafts that fit it: medusa\): train one with `edgespec train eagle`"
    with pytest.raises(IncompatibleError, match=message):
        LLM(target, draft="eagle")
    monkeypatch.setattr(zoo, "zoo_dir", lambda: tmp_path / "nowhere")
    with pytest.raises(IncompatibleError, match=r"fit it: none\): train one with `edgespec train exit`"):
        LLM(target, draft="early-exit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: {**fields, "version": 2}, "version is '2'; version 1 is read here: update edgespec"),
        (lambda fields: {**fields, "kind": "hydra"}, "kind is 'hydra'; use one of tinydraft"),
        (lambda fields: {**fields, "n_embd": "64"}, "n_embd is '64'"),
        (lambda fields: {**fields, "format": "other"}, "not the config of a trained draft"),
        (lambda fields: {**fields, "version": True}, "version is 'True'"),
        (lambda fields: {**fields, "kind": ["eagle"]}, r"kind is \"\['eagle'\]\"; use one of"),
        (lambda fields: {**fields, "n_heds": 4}, r"unknown key 'n_heds'; did you mean"),
        (lambda fields: {**fields, "taps": [1, 2]}, r"taps is '\[1, 2\]'"),
    ],
)
def test_broken_configurations_are_named(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    folder = write_draft(tmp_path / "own", "eagle")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(change(fields)), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        zoo.read_draft(folder)


def test_a_configuration_without_what_may_be_null_is_read(tmp_path: Path) -> None:
    """Used to be an internal KeyError, though null is fine and conversion asks for neither key."""
    folder = write_draft(tmp_path / "own", "eagle")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rest = {key: value for key, value in fields.items() if key not in ("acceptance", "tokenizer_hash")}
    (folder / "config.json").write_text(json.dumps(rest), encoding="utf-8")
    assert zoo.read_draft(folder).acceptance == {}
    assert zoo.read_draft(folder).config.tokenizer_hash is None


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "own", "eagle")
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no trained draft: it must hold config\.json and weights\.safetensors"):
        zoo.read_draft(folder)


def test_draft_weights_are_no_target(place: Path, tmp_path: Path) -> None:
    own = write_draft(tmp_path / "own", "eagle")
    with pytest.raises(ConfigError, match=r"weights of a draft.*--draft-model"):
        LLM(own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "medusa"}, "kind 'eagle' was given but draft='medusa' does not use it: use draft='eagle'"),
        ({"draft": "model"}, "kind 'eagle' was given but draft='model'"),
        ({"draft": "half"}, "'half' is a draft model of tiny and no kind of draft: use draft_model='tiny:half'"),
    ],
)
def test_a_draft_model_of_another_kind_is_refused(
    place: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    own = write_draft(tmp_path / "own", "eagle")
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", draft_model=own, **options)


@pytest.mark.parametrize(("config", "message"), [(None, "does not exist"), ("{", "holds no trained draft")])
def test_a_path_without_trained_weights_is_named(place: Path, tmp_path: Path, config: str | None, message: str) -> None:
    """A mistyped folder used to be called a draft model of another kind, and draft='model' was the advice."""
    own = tmp_path / "own"
    if config is not None:
        own.mkdir()
        (own / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"own {message}: for draft='eagle' give the folder"):
        LLM("tiny", draft="eagle", draft_model=own)


def test_a_variant_has_the_drafts_that_were_loaded(target: Path) -> None:
    with LLM(target, draft="eagle,medusa") as llm:
        assert ids(llm.variant(draft="medusa"), GREEDY) == ids(llm, GREEDY)
        with pytest.raises(ConfigError, match="draft='tinydraft' was not loaded"):
            llm.variant(draft="tinydraft")


def test_heads_are_loaded_once_for_all_sequences(target: Path) -> None:
    with LLM(target, draft="eagle,medusa") as llm:
        streams = [llm.stream(PROMPT, GREEDY) for _ in range(2)]
        texts = [[next(stream).token_ids] for stream in streams]
        for stream, text in zip(streams, texts, strict=True):
            text += [delta.token_ids for delta in stream]
        assert texts[0] == texts[1]
        slots = llm.slots.idle
        assert len(slots) == 2
        assert slots[0].drafters[0].model is slots[1].drafters[0].model is llm.loaded.heads["eagle"]  # type: ignore


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code == code, result.stderr
    return result


def test_list_shows_the_drafts(place: Path) -> None:
    lines = run("list").stdout
    assert "tokens a round on held-out text (k = 4, T = 0)" in lines
    (pair,) = [row for row in json.loads(run("list", "--json").stdout) if row["name"] == "tiny"]
    assert [draft["kind"] for draft in pair["trained"]] == [*KINDS]
    assert pair["trained"][0]["acceptance"]["mean_acceptance_length"] == 2.25
    assert pair["drafts"] == ["ngram", *KINDS, "half"]


@pytest.mark.parametrize("draft", KINDS)
def test_run_finds_drafts_by_kind(place: Path, target: Path, draft: str) -> None:
    done = run("run", "-m", "tiny", "--draft", draft, "-n", "12", "--ignore-eos", "--compare", "--json", "abc")
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert draft in result["sources"]
    assert len(result["acceptance_by_position"]) >= 1


def test_run_with_trees_reports_and_prints_figures(place: Path, target: Path) -> None:
    trees = ["-m", "tiny", "--draft", "eagle", "--fast", "--tree", "--tree-rows", "5", "-n", "12", "--ignore-eos"]
    result = json.loads(run("run", *trees, "--compare", "--json", "abc").stdout)
    assert "difference" in result
    said = run("run", *trees, "-v", "abc").stderr
    assert "accepted by source: eagle" in said


@pytest.mark.parametrize(
    ("default", "expected"), [("ngram,eagle", "ngram,eagle"), ("medusa", "medusa"), ("half", "model"), ("none", "none")]
)
def test_run_uses_the_draft_that_the_manifest_recommends(
    place: Path, target: Path, monkeypatch: pytest.MonkeyPatch, default: str, expected: str
) -> None:
    """`list` showed a default draft that `run` did not use."""
    path = place / "config" / "edgespec" / "models" / "tiny.toml"
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace("[target.source]", f'default_draft = "{default}"\n[target.source]', 1))
        assert pairs.default_draft("tiny")[0] == expected
        stats = json.loads(run("run", "-m", "tiny", "-n", "12", "--ignore-eos", "--json", "abcabc").stdout)["stats"]
        assert set(stats["sources"]) <= {*expected.split(","), "filler"}
        monkeypatch.setattr(zoo, "zoo_dir", lambda: place / "nowhere")
        assert pairs.default_draft("tiny")[0] == {"ngram,eagle": "ngram", "medusa": "ngram"}.get(default, expected)
    finally:
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("tree", "left_out"), [(True, ["block"]), (False, [])])
def test_check_judges_trees_by_the_rules_that_take_them(
    place: Path, target: Path, monkeypatch: pytest.MonkeyPatch, tree: bool, left_out: list[str]
) -> None:
    """Used to be refused, as the block rule, which judges chains, was always among the rules played."""
    monkeypatch.setattr(pair, "MAX_EMISSIONS", 20)
    with LLM(target, draft="eagle", tree=tree, exact=False) as llm:
        result = pair._pair(llm, [PROMPT], 8, 0, lambda *_: None)
    assert {row["rule"] for row in result["distribution"]} == {"rejection", "block"} - set(left_out)
    assert result["rules_without_trees"] == left_out
    assert result["identity_judged"] is False


def test_check_hashes_the_drafts_too(place: Path, target: Path) -> None:
    path = zoo.converted(zoo.find_draft("medusa", Bundle.open(target)), Bundle.open(target))
    content = (path / "vocabulary.i32").read_bytes()
    try:
        (path / "vocabulary.i32").write_bytes(content[:-4] + b"\x78\0\0\0")
        assert "was altered" in run("check", "tiny", "--draft", "medusa", code=2).stderr
    finally:
        (path / "vocabulary.i32").write_bytes(content)


def test_a_draft_in_fixed_shapes_has_a_place_of_its_own(target: Path) -> None:
    """An NPU's draft is converted beside the CPU's, and runs with the target as that one does."""
    bundle = Bundle.open(target)
    shape = zoo.StaticShape(n_ctx=48)
    (static,) = zoo.prepare(["tinydraft"], bundle, static=shape).values()
    (plain,) = zoo.prepare(["tinydraft"], bundle).values()
    assert static == zoo.converted(zoo.find_draft("tinydraft", bundle), bundle, shape) != plain
    info = Bundle.open(static).info
    assert (info.flavour, info.n_ctx, info.static["widths"]) == ("npu", 48, [1, 8])
    with LLM(target, draft="tinydraft", draft_model=static) as llm, LLM(target, draft="tinydraft") as other:
        assert ids(llm, GREEDY) == ids(other, GREEDY)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].stats.drafted > 0


def test_other_drafts_are_not_made_in_fixed_shapes(target: Path) -> None:
    with pytest.raises(ConfigError, match="a draft of the kind eagle, and graphs of fixed shapes"):
        zoo.prepare(["eagle"], Bundle.open(target), static=zoo.StaticShape())

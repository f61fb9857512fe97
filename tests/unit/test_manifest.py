"""Known pairs: manifests are read strictly and say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pair_world import MEMBER, World

from edgespec import pairs
from edgespec.errors import ConfigError, EdgeSpecError
from edgespec.manifest import known_manifests, read_manifest

ROOT = Path(__file__).resolve().parents[2]


def test_shipped_manifests_are_valid_and_named_after_their_files() -> None:
    from edgespec_export import ExportOptions

    found = [read_manifest(path) for path in (ROOT / "models").glob("*.toml")]
    assert found
    for manifest in found:
        assert manifest.path.stem == manifest.name
        for export in (manifest.export, *(draft.export for draft in manifest.drafts.values())):
            options = {key: tuple(value) if isinstance(value, list) else value for key, value in export.items()}
            replace(ExportOptions(), **options)


def test_the_users_own_manifest_wins(world: World) -> None:
    text = world.manifest.read_text(encoding="utf-8").replace('"tiny"', '"smollm2-135m"')
    (world.manifest.parent / "mine.toml").write_text(text, encoding="utf-8")
    assert known_manifests()["smollm2-135m"].description == "a test"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("license", "licence", "the key 'license' is missing; did you mean \"licence\""),
        ("[target.source]", "[target.source]\nurl = 1", r"\[target\] \[source\]: unknown key 'url'"),
        ("[target.source]", "extra = 1\n[target.source]", "unknown key 'extra'"),
        ("schema_version = 1", "schema_version = 2", "schema_version is 2, this edgespec reads 1"),
        ("schema_version = 1", "schema_version = true", r"schema_version is True \(bool\) where int"),
        ('name = "tiny"', 'name = "../tiny"', "name is '../tiny' where lower-case"),
        ('"tiny-weights==1.0"', '"tiny-weights>=1.0"', "where name==version is expected"),
        ('"tiny-weights==1.0"', '"--index-url=x"', "where name==version is expected"),
        (MEMBER, "tiny_weights/..", "a plain file name after the last /"),
        ('kind = "wheel"', 'kind = "weel"', 'not one of wheel, hub, path; did you mean "wheel"'),
        ('sha256 = "', 'sha256 = "x', "where 64 hexadecimal digits"),
        ("[drafts.half]", "[drafts.ngram]", "takes the name of a built-in draft"),
        ("[drafts.half]", "[drafts.eagle]", "takes the name of a built-in draft"),
        (
            'license = "CC0-1.0"',
            'license = "CC0-1.0"\ndefault_draft = "ngram,half"',
            "'half' is not one of ngram, table, tiny",
        ),
        ('license = "CC0-1.0"', 'license = "CC0-1.0"\ndefault_draft = "ngram,eagel"', 'did you mean "eagle"'),
        ('description = "one layer"', 'descripton = "one layer"', "the key 'description' is missing"),
        (
            'license = "CC0-1.0"',
            'license = "CC0-1.0"\ndefault_draft = "other"',
            "'other' is not one of ngram, table, none, tinydraft, eagle, medusa, early-exit, half",
        ),
    ],
)
def test_manifest_mistakes_are_named(world: World, old: str, new: str, message: str) -> None:
    text = world.manifest.read_text(encoding="utf-8")
    assert old in text
    world.manifest.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_manifest(world.manifest)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('revision = "a', 'revision = "main"\n#', "a commit of 40 hexadecimal digits"),
        ("sha256 =", "#sha256 =", "`file` and `sha256` go together"),
    ],
)
def test_hub_mistakes_are_named(world: World, old: str, new: str, message: str) -> None:
    world.write_manifest(source=world.hub_source().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_manifest(world.manifest)


def test_unknown_export_options_are_named(world: World) -> None:
    world.manifest.write_text(
        world.manifest.read_text(encoding="utf-8").replace("block_size", "blok_size"), encoding="utf-8"
    )
    with pytest.raises(EdgeSpecError, match="unknown export option 'blok_size'; did you mean \"block_size\""):
        pairs.pull("tiny")

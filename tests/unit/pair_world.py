"""A small world for tests of known pairs: a cache, an index with one wheel, a manifest of it, tiny weights."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import downloads
from edgespec.config import config_dir

MEMBER = "tiny_weights/tiny.gguf"
N_LAYERS, N_EMBD, N_HEADS, N_FF = 2, 32, 2, 64


def write_tiny_gguf(path: Path) -> None:
    """A random two-layer Llama with a byte-level vocabulary."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "add_block_count": N_LAYERS,
        "add_context_length": 64,
        "add_embedding_length": N_EMBD,
        "add_feed_forward_length": N_FF,
        "add_head_count": N_HEADS,
        "add_head_count_kv": N_HEADS,
        "add_rope_dimension_count": N_EMBD // N_HEADS,
        "add_layer_norm_rms_eps": 1e-5,
        "add_rope_freq_base": 10000.0,
        "add_vocab_size": len(tokens),
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": "gpt-2",
        "add_token_list": tokens,
        "add_token_types": [3] + [1] * (len(tokens) - 1),
        "add_token_merges": ["a b"],
        "add_eos_token_id": 0,
        "add_bos_token_id": 0,
        "add_add_bos_token": False,
    }.items():
        getattr(writer, name)(value)
    random = np.random.default_rng(5)
    shapes = {"token_embd.weight": (len(tokens), N_EMBD), "output_norm.weight": (N_EMBD,)}
    for layer in range(N_LAYERS):
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (N_EMBD, N_EMBD))
        wide = {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        norms = dict.fromkeys(("attn_norm", "ffn_norm"), (N_EMBD,))
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in {**square, **wide, **norms}.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.2, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, member: str, content: bytes) -> None:
    """tiny_weights 1.0 as pip accepts it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class World:
    """A cache, an index with one wheel and a manifest `tiny` of it, all in a temporary folder."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self.cache = folder / "cache"
        self.index = folder / "index"
        self.content = weights.read_bytes()
        self.manifest = config_dir() / "models" / "tiny.toml"
        write_wheel(self.index, MEMBER, self.content)
        self.write_manifest()

    def write_manifest(self, *, block_size: int = 32, source: str | None = None) -> None:
        self.manifest.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(self.content).hexdigest()
        source = source or (
            f'kind = "wheel"\nrequirement = "tiny-weights==1.0"\nmember = "{MEMBER}"\n'
            f'bytes = {len(self.content)}\nsha256 = "{digest}"'
        )
        self.manifest.write_text(
            'schema_version = 1\nname = "tiny"\ndescription = "a test"\nlicense = "CC0-1.0"\n'
            f"[target.source]\n{source}\n[target.export]\nblock_size = {block_size}\n"
            '[drafts.half]\ndescription = "one layer"\nexport = { keep_layers = [0] }\n',
            encoding="utf-8",
        )

    def hub_source(self) -> str:
        digest = hashlib.sha256(self.content).hexdigest()
        return (
            f'kind = "hub"\nrepo = "someone/tiny"\nfile = "q/tiny.gguf"\nrevision = "{"a" * 40}"\nsha256 = "{digest}"'
        )

    def leftovers(self) -> list[str]:
        """Every file in the cache that is neither a lock nor part of a finished source or bundle."""
        files = [file.relative_to(self.cache) for file in self.cache.rglob("*") if file.is_file()]
        whole = [
            file for file in files if (file.name == "tiny.gguf" and len(file.parts) == 3) or file.parts[0] == "bundles"
        ]
        return [str(file) for file in files if file not in whole and file.name != "lock"]

    def sources(self) -> list[Path]:
        return [file for file in (self.cache / "sources").rglob("*") if file.is_file()]

    def bundles(self) -> list[str]:
        return sorted(path.name.rsplit("-", 1)[0] for path in (self.cache / "bundles").glob("*"))


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(downloads.subprocess, "Popen", refuse)

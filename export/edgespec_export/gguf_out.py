"""A GGUF file that llama.cpp and edgespec read, from a Hugging Face folder or another GGUF.

Owns llama.cpp's key names on the writing side, its order of rotated rows and the types of tensors. One tensor is in
memory at a time. The tokenizer's keys are the matter of `gguf_tokenizer.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, ExportError, ExportRefusedError, FormatError, MissingDependencyError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.config import ModelConfig, check_shapes, expected_shapes
from edgespec_export.exporter import KeptWeights
from edgespec_export.gguf_tokenizer import tokenizer_metadata
from edgespec_export.rope import RopeConfig, frequencies
from edgespec_export.sources import GGUF_NAMES, GGUF_PARTS, open_source

__all__ = ["GGUF_TYPES", "check_place", "write_gguf"]

FloatArray = NDArray[np.float32]
GGUF_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # name -> llama.cpp's general.file_type
_BLOCK = 32  # values of a row that share a scale in q8_0
_OWN_NAMES = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
_OWN_PARTS = {ours: theirs for theirs, ours in GGUF_PARTS.items()}


def write_gguf(
    source: str | Path,
    out: str | Path,
    *,
    type: str = "q8_0",
    progress: Callable[[str, int, int], None] | None = None,
    force: bool = False,
) -> Path:
    """Write `source` (a Hugging Face folder or a GGUF) as the GGUF file `out`, which appears only if all went well.

    type: of the matrices, q8_0, f16 or f32; vectors stay in float32. progress(step, done, total) is called as tensors
    are written. Raises ConfigError and ExportError; ExportRefusedError for models that llama.cpp would run differently.
    """
    if type not in GGUF_TYPES:
        raise ConfigError(f"type is {type!r}; use one of {', '.join(GGUF_TYPES)}.")
    gguf = _gguf()
    out = Path(out)
    check_place(out, force)
    opened = open_source(source)
    config = opened.config
    check_shapes(config, opened.shapes)
    _check_model(config)
    tokenizer = Tokenizer.load(opened.path)
    if tokenizer.n_vocab > config.n_vocab:
        raise ExportError(f"the tokenizer has {tokenizer.n_vocab} tokens and the model only {config.n_vocab}.")
    writer = gguf.GGUFWriter(None, _architecture(config))
    _add_config(writer, config, GGUF_TYPES[type])
    for key, value in tokenizer_metadata(opened, tokenizer, config.n_vocab).items():
        _add_value(writer, key, value)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.gguf")
    try:
        _write(gguf, writer, temporary, config, KeptWeights(opened, None), type, progress or (lambda *step: None))
        if _read_back(temporary).hash != tokenizer.hash:
            raise ExportError("the tokenizer that was written differs from the source's: this is a fault of edgespec.")
        temporary.replace(out)
    except OSError as error:
        raise ExportError(f"{out} could not be written whole ({error}): is there room on its disk?") from error
    finally:
        temporary.unlink(missing_ok=True)
    return out


def _read_back(written: Path) -> Tokenizer:
    """numpy does not report small arrays that a full disk did not take: only the file's end shows it."""
    try:
        return Tokenizer.load(written)
    except FormatError as error:
        raise OSError("its end is missing") from error


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("writing a GGUF needs gguf: `pip install 'edgespec[export]'`.") from error
    return gguf


def check_place(out: Path, force: bool) -> None:
    if out.suffix.lower() != ".gguf":
        raise ExportRefusedError(f"{out} does not end in .gguf, by which such a file is known: choose another name.")
    if out.is_dir():
        raise ExportRefusedError(f"{out} is a folder: give the name of a file.")
    if out.exists() and not force:
        raise ExportRefusedError(f"{out} exists: choose another name, or replace it with --force.")


def _check_model(config: ModelConfig) -> None:
    if config.sliding_window is not None:
        raise ExportRefusedError(
            f"{config.name} has a sliding window of {config.sliding_window} tokens, which llama.cpp does not apply to"
            f" {config.architecture} models: a GGUF of it would be another model."
        )
    if config.rope.kind not in ("none", "linear", "llama3"):
        raise ExportRefusedError(
            f"rope scaling '{config.rope.kind}' of {config.name} is not written to a GGUF (none, linear, llama3 are)."
        )


def _architecture(config: ModelConfig) -> str:
    return "llama" if config.architecture == "mistral" else config.architecture


def _add_config(writer: Any, config: ModelConfig, file_type: int) -> None:
    writer.add_name(config.name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.rope.kind == "linear":
        writer.add_string(f"{_architecture(config)}.rope.scaling.type", "linear")
        writer.add_float32(f"{_architecture(config)}.rope.scaling.factor", config.rope.factor)


def _add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write(
    gguf: Any,
    writer: Any,
    path: Path,
    config: ModelConfig,
    weights: Callable[[str], FloatArray],
    type: str,
    progress: Callable[[str, int, int], None],
) -> None:
    names = list(expected_shapes(config))
    divisors = _rope_divisors(config)
    kinds = {}
    for name, shape in expected_shapes(config).items():
        kinds[name] = kind = _kind(gguf, shape, type)
        n_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(shape, kind)))
        writer.add_tensor_info(_gguf_name(name), shape, np.dtype(np.float32), n_bytes, kind)
    if divisors is not None:
        kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes, kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, name in enumerate(names, 1):
            value = _ordered(config, name, weights(name))
            writer.write_tensor_data(_encoded(gguf, name, value, kinds[name]))
            progress("tensors", done, len(names))
        if divisors is not None:
            writer.write_tensor_data(divisors)
    finally:
        writer.close()


def _kind(gguf: Any, shape: tuple[int, ...], type: str) -> Any:
    """Vectors in f32, rows that q8_0's blocks do not divide in f16."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if type == "q8_0" and shape[-1] % _BLOCK:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[type.upper()]


def _encoded(gguf: Any, name: str, value: FloatArray, kind: Any) -> NDArray[Any]:
    if kind == gguf.GGMLQuantizationType.F32:
        return np.ascontiguousarray(value, np.float32)
    with np.errstate(over="ignore"):
        encoded = gguf.quants.quantize(value, kind)
    if kind == gguf.GGMLQuantizationType.F16 and not np.isfinite(encoded).all():
        raise ExportRefusedError(f"tensor {name} has values beyond the range of float16: use type q8_0 or f32.")
    return np.ascontiguousarray(encoded)


def _rope_divisors(config: ModelConfig) -> FloatArray | None:
    """Llama 3's scaling, which a GGUF holds as one divisor a frequency."""
    if config.rope.divisors is None and config.rope.kind != "llama3":
        return None
    plain = frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
    return (plain / frequencies(config.rope, config.head_dim)).astype(np.float32)


def _gguf_name(name: str) -> str:
    if name in _OWN_NAMES:
        return _OWN_NAMES[name]
    _, index, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_OWN_PARTS[part]}.{kind}"


def _ordered(config: ModelConfig, name: str, value: FloatArray) -> FloatArray:
    """llama.cpp's order of rotated rows for the llama architecture: pairs next to each other."""
    if _architecture(config) != "llama" or not any(f".self_attn.{part}_proj." in name for part in "qk"):
        return value
    n_heads = config.n_heads if ".q_proj." in name else config.n_kv_heads
    halves = value.reshape(n_heads, 2, value.shape[0] // n_heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)

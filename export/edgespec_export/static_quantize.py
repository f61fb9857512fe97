"""Graphs of fixed shapes in 8-bit weights and 16-bit activations, by onnxruntime's tool in its configuration for QNN.

Owns the calibration: the float graphs run on a text as a session runs them, and every width gets the ranges that the
widest showed, so that all round alike. The weights of all widths stay one file.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from edgespec.backends import load_model
from edgespec.backends.onnx.static import PAST, PRESENT, StaticSession
from edgespec.bundle import static_graph
from edgespec.errors import ConfigError, ExportError
from edgespec.text.tokenizer import Tokenizer
from edgespec_export.config import ModelConfig
from edgespec_export.sources import file_sha256
from edgespec_export.static_options import StaticOptions
from edgespec_export.writer import DATA_NAME, DataFile

__all__ = ["quantize_graphs"]

MOST_TOKENS = 512  # of the text: ranges have settled by then, and each call's arrays are kept meanwhile


def quantize_graphs(
    folder: Path,
    config: ModelConfig,
    options: StaticOptions,
    extra: Sequence[int],
    report: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Replace the float graphs of the bundle in `folder`; what bundle.json says of the calibration.

    config: of the text's tokens. extra: tokens of a draft's last logits columns, whose rows are inputs as well.
    Raises ConfigError for a text that cannot be read or makes no tokens, ExportError where the tool fails.
    """
    assert options.calibration is not None
    tokens = _tokens(folder, config, options.calibration)
    feeds = _recorded(folder, tokens, extra)
    with tempfile.TemporaryDirectory(prefix="edgespec-quantize-") as name:
        ranges, made = Path(name) / "ranges.json", {}
        widest = static_graph(options.widths[-1])
        _quantize(folder / widest, Path(name) / "calibrated.onnx", feeds, ranges)
        _share_ranges(ranges)
        for done, width in enumerate(options.widths):
            report("quantize", done, len(options.widths))
            made[width] = Path(name) / static_graph(width)
            _quantize(folder / static_graph(width), made[width], [], ranges)
        _join(folder, made)
    report("quantize", len(options.widths), len(options.widths))
    return {"sha256": file_sha256(options.calibration), "n_tokens": len(tokens)}


def _tokens(folder: Path, config: ModelConfig, path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text {path} cannot be read: {error}.") from error
    tokens = Tokenizer.load(folder).encode(text)[: min(MOST_TOKENS, config.n_ctx)]
    if len(tokens) < 2:
        raise ConfigError(f"the calibration text {path} makes {len(tokens)} tokens: give a page of ordinary text.")
    return tokens


def _recorded(folder: Path, tokens: Sequence[int], extra: Sequence[int]) -> list[dict[str, NDArray[Any]]]:
    """The inputs of every call that the tokens take on the widest graph."""
    model = load_model(folder)
    session, width = cast(StaticSession, model.open_session()), model.info.max_rows or 1
    if extra:
        session.set_extra(extra)
    feeds = []
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        feeds.append(session.feeds(piece))
        session.forward(piece, logits_rows=())
    session.close()
    return feeds


class _Reader:
    """Calibration data as the tool reads it."""

    def __init__(self, feeds: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        self._left: Iterator[Mapping[str, NDArray[Any]]] = iter(feeds)

    def get_next(self) -> Mapping[str, NDArray[Any]] | None:
        return next(self._left, None)


def _quantize(graph: Path, out: Path, feeds: Sequence[Mapping[str, NDArray[Any]]], ranges: Path) -> None:
    """Quantize one graph; `ranges` is written by the first call and read by the others."""
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    CalibrationDataReader.register(_Reader)  # its own base has methods that nothing here needs
    logging.disable(logging.WARNING)  # the tool warns of what does not matter here, on the root logger
    try:
        config = get_qnn_qdq_config(
            str(graph), cast(Any, _Reader(feeds)), activation_type=QuantType.QUInt16, weight_type=QuantType.QUInt8
        )
        quantize_static(
            str(graph),
            str(out),
            config.calibration_data_reader,
            activation_type=config.activation_type,
            weight_type=config.weight_type,
            op_types_to_quantize=config.op_types_to_quantize,
            per_channel=config.per_channel,
            use_external_data_format=True,
            calibrate_method=config.calibrate_method,
            calibration_cache_path=ranges,
            extra_options=config.extra_options,
        )
    except Exception as error:  # the tool raises anything
        raise ExportError(f"onnxruntime's quantization failed on {graph.name}: {str(error)[:300]}") from error
    finally:
        logging.disable(logging.NOTSET)


def _share_ranges(ranges: Path) -> None:
    """Give a key the same range when it is made, when it is put into the cache, and when it comes back from the host.

    Otherwise it would be rounded once more in the call that makes it than in later ones, and a row would depend on
    which tokens came in its own call.
    """
    from onnxruntime.quantization.calibrate import TensorData, load_tensors_data, save_tensors_data

    found = load_tensors_data(ranges)
    for name in [name for name in found if name.endswith("/whole")]:
        new = name.removesuffix("/whole")
        same = [name, new, f"{new}/placed", new.replace(PRESENT, PAST)]
        lowest = min(found[key].lowest for key in same)
        highest = max(found[key].highest for key in same)
        for key in same:
            found[key] = TensorData(lowest=lowest, highest=highest)
    save_tensors_data(found, ranges)


def _join(folder: Path, made: Mapping[int, Path]) -> None:
    """Put the quantized graphs into the bundle, their weights into its one file."""
    import onnx
    from onnx import numpy_helper

    (folder / DATA_NAME).unlink()
    with DataFile(folder) as data:
        for width in sorted(made):
            model = onnx.load(str(made[width]))
            arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
            del model.graph.initializer[:]
            for name, array in arrays.items():
                data.add(name, array)
                model.graph.initializer.append(data.initializers[name])
            model.producer_name = "edgespec"
            (folder / static_graph(width)).write_bytes(model.SerializeToString(deterministic=True))

"""What is particular to the ONNX backend: buffers, bindings, folders, and errors that name what is wrong."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from edgespec.backends import backend_kind, load_model, register_backend
from edgespec.backends.onnx import cached
from edgespec.backends.onnx.devices import short_message
from edgespec.backends.onnx.model import OnnxModel
from edgespec.backends.onnx.probe import open_session
from edgespec.backends.onnx.session import Capabilities, SharedCacheSession
from edgespec.backends.onnx.stateless import StatelessGraph
from edgespec.errors import BackendError, BundleError, CacheError, ConfigError, IncompatibleError, NumericsError
from edgespec.testing.onnx_models import quantize_matrix, write_bundle, write_genai, write_optimum
from edgespec.testing.tiny import TinySpec, tiny_logits, tiny_weights

SPEC = TinySpec()
TOKENS = np.random.default_rng(6).integers(0, 64, 96).tolist()


def load(folder: Path, **options: object) -> OnnxModel:
    model = load_model(folder, threads=1, **options)
    assert isinstance(model, OnnxModel)
    return model


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"))


# --- buffers and bindings ---------------------------------------------------------------------------------------------


def test_buffers_grow_and_keep_the_cache(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MIN_CAPACITY", 8)
    session = load(bundle).open_session()
    assert isinstance(session, SharedCacheSession)
    logits, capacities = [], []
    for start in range(0, 40, 5):
        logits.append(session.forward(TOKENS[start : start + 5]).logits.copy())
        capacities.append(session.capacity)
    assert capacities == [8, 16, 16, 32, 32, 32, 64, 64]
    session.keep(3)
    np.testing.assert_allclose(np.concatenate(logits), tiny_logits(SPEC, TOKENS[:40]), atol=1e-4)
    session.forward(TOKENS[3:96], logits_rows=())
    assert session.capacity == 96, "the last growth stops at the context"


def test_a_step_copies_no_cache_and_binds_nothing_anew(bundle: Path) -> None:
    """Rebinding every cache tensor at each step used to cost more than a small draft model's whole step."""
    session = load(bundle).open_session()
    session.forward(TOKENS[:4])
    session.forward(TOKENS[4:5])
    addresses = [array.ctypes.data for array in session._graph.cache]
    bindings = {key: id(binding.io) for key, binding in session._graph.bindings.items()}
    for step in range(20):
        session.keep(5 + step % 3)
        session.forward(TOKENS[10:11] if step % 2 else TOKENS[10:14])
    assert [array.ctypes.data for array in session._graph.cache] == addresses
    assert {key: id(binding.io) for key, binding in session._graph.bindings.items()} == bindings
    assert all(array.ctypes.data % 64 == 0 for array in session._graph.cache)


def test_calls_of_another_shape_do_not_bind_the_cache_again(bundle: Path) -> None:
    """Sixty caches bound anew for every new number of rows took 0.45 ms, a tenth of a small model's step."""
    session = load(bundle).open_session()
    graph = session._graph
    for width in (4, 1, 9, 2, 30, 3, 1, 2, 30, 9):  # 30 rows of logits are more than the first buffer holds
        rows = tiny_logits(SPEC, TOKENS[:width])
        session.keep(0)
        np.testing.assert_allclose(session.forward(TOKENS[:width], logits_rows=range(width)).logits, rows, atol=1e-4)
        session.keep(0)
        np.testing.assert_allclose(session.forward(TOKENS[:width]).logits[-1], rows[-1], atol=1e-4)
    assert len(graph.bindings) > 2
    assert len({id(binding.io) for binding in graph.bindings.values()}) == 1


def test_closing_frees_the_bindings_at_once(bundle: Path) -> None:
    """A binding to a GPU that outlives the runtime ends the process badly, and each holds a whole cache."""
    session = load(bundle).open_session()
    session.forward(TOKENS[:4])
    gone = [weakref.ref(binding.bound) for binding in session._graph.bindings.values()]
    gc.disable()
    try:
        session.close()
        assert gone
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()


def test_inputs_in_a_devices_own_memory_are_bound_again_for_each_call(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Binding copies such an input at once: a GPU gave the rows of the first call for ever."""
    expected = load_model(bundle, threads=1).open_session().forward([5, 6, 7]).logits.copy()
    head_path = write_bundle(tmp_path, exit_layer=1) / "head.onnx"
    features = np.random.default_rng(2).standard_normal((2, 3, SPEC.n_embd)).astype(np.float32)
    monkeypatch.setattr("edgespec.backends.onnx.buffers.HOST_MEMORY", "somewhere else")
    session = load_model(bundle, threads=1).open_session()
    bound: list[str] = []
    bind = ort.IOBinding.bind_ortvalue_input
    monkeypatch.setattr(
        ort.IOBinding, "bind_ortvalue_input", lambda io, name, value: (bound.append(name), bind(io, name, value))[1]
    )
    for tokens in ([1, 2, 3], [5, 6, 7]):
        session.keep(0)
        bound.clear()
        logits = session.forward(tokens).logits
        assert {"input_ids", "seqlens_k", "logits_rows", "past_key_values.1.value"} <= set(bound)
    np.testing.assert_array_equal(logits, expected)
    head = StatelessGraph(head_path, 1)
    head.run({"features": features[0]})
    bound.clear()
    head.run({"features": features[1]})
    assert bound == ["features"]


def test_a_cache_in_a_devices_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth, rewinds and paths of trees where only the device holds the cache; here the CPU plays the device."""
    monkeypatch.setattr("edgespec.backends.onnx.kv_memory.HOST_MEMORY", "somewhere else")
    monkeypatch.setattr("edgespec.backends.onnx.kv_memory.PLACES", {"Cpu": "cpu"})
    monkeypatch.setattr(cached, "MIN_CAPACITY", 8)
    fetch = ort.OrtValue.numpy
    monkeypatch.setattr(ort.OrtValue, "numpy", lambda value: fetch(value).copy())  # as from a device
    session = load(write_bundle(tmp_path, tree=True), tree=True).open_session()
    text = TOKENS[:20]
    for start in range(0, 20, 5):
        session.forward(text[start : start + 5])
        assert session._graph.cache == []
    tree = [3, 4, 5, 6, 7]
    session.forward(tree, parents=[-1, 0, 0, 2, -1])
    session.keep(23, path=[0, 2, 3])  # the third of them moves over the second
    text += [3, 5, 6]
    np.testing.assert_allclose(session.forward([9]).logits[0], tiny_logits(SPEC, [*text, 9])[-1], atol=1e-4)
    session.keep(7)
    session.forward(TOKENS[30:60])
    assert session._graph.capacity == 64
    expected = tiny_logits(SPEC, [*text[:7], *TOKENS[30:60], 8])[-1]
    np.testing.assert_allclose(session.forward([8]).logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("bits", [32, 4])
def test_chains_on_a_tree_graph_are_the_plain_graph_bit_for_bit(tmp_path: Path, bits: int) -> None:
    folder = write_bundle(tmp_path, bits=bits, tree=True)
    plain, tree = load(folder).open_session(), load(folder, tree=True).open_session()
    for width in range(1, 10):
        piece = TOKENS[width : 2 * width]
        np.testing.assert_array_equal(tree.forward(piece).logits, plain.forward(piece).logits)
        tree.forward(TOKENS[:4], parents=[-1, 0, 0, 1])
        tree.keep(plain.n_past)


def test_a_tree_step_binds_nothing_anew_and_moves_only_what_must(tmp_path: Path) -> None:
    session = load(write_bundle(tmp_path, tree=True), tree=True).open_session()
    call = {"tokens": TOKENS[20:26], "parents": [-1, 0, 1, 1, 0, 4]}
    session.forward(TOKENS[:10])
    session.forward(**call)
    graph = session._graph
    bindings = {key: id(binding.io) for key, binding in graph.bindings.items()}
    for path, n_same in (
        ([0, 1, 2], 16),
        (
            [
                0,
                1,
                3,
            ],
            12,
        ),
        ([0, 4, 5], 11),
        ([], 16),
    ):
        session.keep(10)
        session.forward(**call)
        before = [array.copy() for array in graph.cache]
        session.keep(10 + len(path), path=path)
        for array, old in zip(graph.cache, before, strict=True):
            np.testing.assert_array_equal(array[:, :, :n_same], old[:, :, :n_same])
            rows = [10 + index for index in path]
            np.testing.assert_array_equal(array[:, :, 10 : 10 + len(path)], old[:, :, rows])
            np.testing.assert_array_equal(array[:, :, 10 + len(path) :], old[:, :, 10 + len(path) :])
    assert {key: id(binding.io) for key, binding in graph.bindings.items()} == bindings
    assert not graph._no_bias.any(), "chains share zeros that no tree may write to"


def test_sessions_run_at_the_same_time(bundle: Path) -> None:
    model = load(bundle)
    pieces = [TOKENS[start : start + 40] for start in range(0, 48, 8)]

    def decode(tokens: list[int]) -> np.ndarray:
        session = model.open_session()
        return np.concatenate([session.forward([token]).logits.copy() for token in tokens])

    with ThreadPoolExecutor(len(pieces)) as pool:
        for tokens, logits in zip(pieces, pool.map(decode, pieces), strict=True):
            np.testing.assert_allclose(logits, tiny_logits(SPEC, tokens), atol=1e-4)


def test_call_shapes_are_forgotten_beyond_a_limit(bundle: Path) -> None:
    session = load(bundle).open_session()
    for width in range(49, 0, -1):
        session.keep(0)
        session.forward(TOKENS[:width])
    assert len(session._graph.bindings) == cached.MAX_BINDINGS
    session.keep(0)
    np.testing.assert_allclose(session.forward(TOKENS[:2]).logits, tiny_logits(SPEC, TOKENS[:2]), atol=1e-4)


def test_wanting_one_row_does_not_change_it(tmp_path: Path) -> None:
    """A head that is asked for one row runs another kernel: the row used to differ from the same row among others."""
    session = load(write_bundle(tmp_path, TinySpec(n_embd=256), bits=4)).open_session()
    among_others = session.forward(TOKENS[:6]).logits[3].copy()
    session.keep(0)
    alone = session.forward(TOKENS[:6], logits_rows=[3]).logits
    np.testing.assert_array_equal(alone[0], among_others)


def test_int4_weights_are_the_decoded_ones(tmp_path: Path) -> None:
    weights = tiny_weights(SPEC)
    decoded = {
        name: quantize_matrix(matrix)[2] if matrix.ndim == 2 and name != "embed" else matrix
        for name, matrix in weights.items()
    }
    logits = load(write_bundle(tmp_path, bits=4)).open_session().forward(TOKENS[:30]).logits
    # activations are rounded to 8 bits (accuracy level 4), hence the wide tolerance on logits of deviation 3.5
    np.testing.assert_allclose(logits, tiny_logits(SPEC, TOKENS[:30], decoded), atol=0.6)


def test_info(bundle: Path, tmp_path: Path) -> None:
    info = load(bundle, n_ctx=50, name="mine").info
    assert (info.name, info.n_vocab, info.n_ctx, info.eos_ids, info.device) == ("mine", 64, 50, (2,), "cpu")
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, head_dim, float32
    assert info.weight_bytes == sum((bundle / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    assert (info.max_rows, info.max_rewind, info.tree, info.taps) == (None, None, False, ("final",))
    assert info.tokenizer_hash
    assert load(write_genai(tmp_path / "last", last_row_only=True)).info.max_rows == 1
    assert load(write_genai(tmp_path / "one", one_row=True)).info.max_rows == 1
    growing = load(write_optimum(tmp_path / "optimum"))
    assert growing.info.max_rows is None
    assert not growing.capabilities.is_shared


def test_a_cache_that_cannot_go_back_says_so(bundle: Path) -> None:
    model = load(bundle)
    capabilities = Capabilities(can_rewind=False)
    session = open_session(model.runtime, model.signature, model.info, capabilities)
    session.forward(TOKENS[:5])
    with pytest.raises(CacheError, match="cannot go back from 5 to 4 tokens"):
        session.keep(4)
    session.keep(5)
    session.keep(0)
    np.testing.assert_allclose(session.forward(TOKENS[:2]).logits, tiny_logits(SPEC, TOKENS[:2]), atol=1e-4)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_raise(tmp_path: Path, value: float) -> None:
    """NaN logits used to come out as token 0 for ever: an argmax over NaN is its index."""
    weights = tiny_weights(SPEC)
    weights["embed"][7] = value
    session = load(write_bundle(tmp_path, weights=weights)).open_session()
    session.forward([1, 2])
    with pytest.raises(NumericsError, match=r"logits after position [23] have the maximum"):
        session.forward([3, 7, 4])
    assert session.n_past == 2
    np.testing.assert_allclose(session.forward([3]).logits[0], tiny_logits(SPEC, [1, 2, 3])[-1], atol=1e-4)


def test_half_precision_comes_out_as_float32(tmp_path: Path) -> None:
    model = load(write_genai(tmp_path, is_half=True))
    assert model.open_session().forward([1, 2]).logits.dtype == np.float32
    assert model.info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [0, -5, 97])
def test_contexts_out_of_range(bundle: Path, n_ctx: int) -> None:
    with pytest.raises(ConfigError, match=rf"n_ctx is {n_ctx}, allowed are 1\.\.96"):
        load(bundle, n_ctx=n_ctx)


def test_context_of_one(bundle: Path) -> None:
    session = load(bundle, n_ctx=1).open_session()
    session.forward([5])
    with pytest.raises(ConfigError, match="exceed the context of 1"):
        session.forward([5])


def test_unknown_device_and_thread_count(bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"device 'npu9' is unknown.*cpu"):
        load(bundle, device="npu9")
    with pytest.raises(ConfigError, match="threads is 0"):
        load_model(bundle, threads=0)


def test_a_closed_model_opens_no_sessions_but_open_ones_live(bundle: Path) -> None:
    model = load(bundle)
    session = model.open_session()
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.open_session()
    session.forward([1])


# --- folders ----------------------------------------------------------------------------------------------------------


def test_kinds(tmp_path: Path, bundle: Path) -> None:
    assert backend_kind(bundle) == "bundle"
    assert backend_kind(write_genai(tmp_path / "g")) == "genai"
    assert backend_kind(write_optimum(tmp_path / "o")) == "optimum"


def test_a_registered_backend_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import edgespec.backends as registry

    monkeypatch.setattr(registry, "_BACKENDS", list(registry._BACKENDS))
    register_backend("mine", lambda path: path.suffix == ".mine", "edgespec.backends:backend_kind", "a .mine file")
    file = tmp_path / "x.mine"
    file.touch()
    assert backend_kind(file) == "mine"


def test_unknown_folders_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"bundle\.json.*genai_config\.json.*config\.json beside an \.onnx"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "decoder_a.onnx").touch()
    (tmp_path / "decoder_b.onnx").touch()
    with pytest.raises(ConfigError, match=r"decoder_a\.onnx, decoder_b\.onnx and no model\.onnx"):
        load_model(tmp_path)


def test_a_folder_with_a_space_and_an_accent_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bundle(tmp_path / "mon modèle" / "v 1")
    moved = tmp_path / "déplacé là"
    folder.rename(moved)
    monkeypatch.chdir(tmp_path)
    logits = load(Path("déplacé là")).open_session().forward([1, 2, 3]).logits
    np.testing.assert_allclose(logits, tiny_logits(SPEC, [1, 2, 3]), atol=1e-4)


def test_linked_weights_are_named(tmp_path: Path) -> None:
    """onnxruntime refuses a linked data file with a message about paths that escape the model directory."""
    folder = write_genai(tmp_path / "model")
    data = folder / "model.onnx.data"
    data.rename(tmp_path / "weights")
    data.symlink_to(tmp_path / "weights")
    with pytest.raises(BackendError, match=r"symbolic link.*copy or hard-link"):
        load(folder)
    data.unlink()
    os.link(tmp_path / "weights", data)
    load(folder)


def test_missing_and_broken_files_give_one_sentence(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "model")
    (folder / "model.onnx.data").unlink()
    with pytest.raises(BackendError, match=r"cannot load .*model\.onnx") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    (folder / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BackendError, match="cannot load"):
        load(folder)
    (folder / "model.onnx").unlink()
    with pytest.raises(BackendError, match=r"names the graph model\.onnx, which is not there"):
        load(folder)
    (folder / "genai_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load(folder)


def test_a_bundle_without_its_data_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data"):
        load(folder)


def test_config_and_weights_of_different_models(tmp_path: Path) -> None:
    """The files of two models in one folder used to load and write nonsense."""
    folder = write_genai(tmp_path / "a")
    write_genai(tmp_path / "b", TinySpec(n_vocab=80, n_layers=3))
    (folder / "genai_config.json").write_bytes((tmp_path / "b" / "genai_config.json").read_bytes())
    with pytest.raises(IncompatibleError, match="n_vocab 80 against 64; n_layers 3 against 2"):
        load(folder)


def test_graphs_that_are_not_decoders(tmp_path: Path) -> None:
    folder = write_optimum(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    _without_cache(folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackendError, match="export it with past"):
        load(folder)


def _without_cache(path: Path) -> None:
    """Cut the graph's cache outputs off."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    kept = [value for value in model.graph.output if value.name == "logits"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    path.write_bytes(model.SerializeToString())


def _add_tokenizer(folder: Path) -> None:
    added = [{"id": 1, "content": "<|im_start|>"}, {"id": 2, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    template = "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}"
    (folder / "chat_template.jinja").write_text(template + "{% endfor %}{{ '<|im_start|>assistant\\n' }}")


def test_a_turn_opener_is_no_eos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A builder that declares <|im_start|> an EOS used to end chats after two tokens."""
    folder = write_genai(tmp_path, TinySpec(eos_ids=(1, 2)))
    assert load(folder).info.eos_ids == (1, 2), "nothing to judge by"
    _add_tokenizer(folder)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert model.info.eos_ids == (2,)
    assert "<|im_start|> (id 1)" in caplog.text
    assert "<|im_start|> (id 1)" in model.folder.notes[0]


def test_eos_of_an_optimum_folder(tmp_path: Path) -> None:
    folder = write_optimum(tmp_path, TinySpec(eos_ids=(5,)))
    assert load(folder).info.eos_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(folder).info.eos_ids == (7, 8)


def test_onnxruntime_missing(bundle: Path, child_env: dict[str, str]) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from edgespec.backends import load_model\n"
        "from edgespec.errors import MissingDependencyError\n"
        "try: load_model(sys.argv[1])\n"
        "except MissingDependencyError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, env=child_env, check=True
    )
    assert "pip install 'edgespec[onnx]'" in done.stdout


def test_runtime_messages_are_shortened() -> None:
    text = "[ONNXRuntimeError] : 1 : FAIL : /onnxruntime_src/onnxruntime/core/graph/model.cc:12 The graph is bad.\nmore"
    assert short_message(RuntimeError(text)) == "The graph is bad."
    assert short_message(RuntimeError("")) == "RuntimeError."

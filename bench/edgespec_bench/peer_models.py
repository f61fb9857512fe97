"""What each peer engine reads: its own form of a pair's float weights and of the trained draft.

One source for all: the pair's weights, dequantized, as a Hugging Face folder in float32; the draft is the TinyDraft of
the zoo on its target's tables, a plain Llama of two layers that every engine can run. A part is a subfolder of the
peer's model folder; it appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec.children import describe_exit
from edgespec.config import child_environment
from edgespec.errors import BackendError, ConfigError

__all__ = ["GENAI_PARTS", "LLAMACPP_PARTS", "OPENVINO_PARTS", "TRANSFORMERS_PARTS", "Build", "Workshop", "make_part",
           "run"]  # fmt: skip

LLAMACPP = "0.3.36"
_PROGRAM = Path(__file__).with_name("children") / "llamacpp_child.cpp"


@dataclass(frozen=True)
class Workshop:
    """Where a part is made. python: of the peer's environment. work: scratch of one setup. folder: of its parts."""

    model: str
    source: Path
    python: Path
    work: Path
    folder: Path

    def made(self, part: str) -> Path:
        """A part that is there already. Raises ConfigError where it is not."""
        if not (self.folder / part).is_dir():
            raise ConfigError(f"{part} has to be made before it")
        return self.folder / part

    def floats(self) -> Path:
        """The target as a Hugging Face folder in float32, written once."""
        from edgespec_export.hf_out import write_hf_model

        folder = self.work / "float"
        return folder if folder.is_dir() else write_hf_model(self.source, folder)

    def draft_floats(self) -> Path:
        """The same of the draft. Raises ConfigError where the zoo has none."""
        from edgespec_export.hf_out import write_hf_folder

        from edgespec import zoo

        folder = self.work / "draft-float"
        if folder.is_dir():
            return folder
        drafts = [draft for draft in zoo.list_drafts(self.model) if draft.kind == "tinydraft"]
        if not drafts:
            raise ConfigError(f"{self.model} has no tinydraft in the zoo, so there is no draft model for other engines")
        return write_hf_folder(drafts[0].folder, self.source, folder)


Build = Callable[[Workshop, Path], None]
"""Makes one part in the empty folder that it is given."""


def _copy_floats(shop: Workshop, out: Path, *, draft: bool = False) -> None:
    shutil.copytree(shop.draft_floats() if draft else shop.floats(), out, dirs_exist_ok=True)


def _genai_int4(shop: Workshop, out: Path) -> None:
    """onnxruntime-genai's own int4 build of the target."""
    _genai_builder(shop, shop.floats(), out)


def _genai_draft(shop: Workshop, out: Path) -> None:
    """The draft's int4 build with its target in a folder below, as one configuration must not lead out of its own."""
    _genai_builder(shop, shop.draft_floats(), out)
    below, path = out / "target", out / "genai_config.json"
    shutil.copytree(shop.made("int4"), below, copy_function=_link)
    config = json.loads(path.read_text(encoding="utf-8"))
    target = json.loads((below / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    config["model"]["draft"] = config["model"]["decoder"]
    config["model"]["decoder"] = {**target, "filename": f"{below.name}/{target['filename']}"}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _link(source: str, target: str) -> None:
    """A second name for a large file; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _genai_builder(shop: Workshop, floats: Path, out: Path) -> None:
    command = [str(shop.python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    run([*command, "-i", str(floats), "-o", str(out), "-c", str(shop.work / "cache")], "its model builder")
    # The builder declares the opening of a chat turn an end of sequence, and every side runs for a fixed number of
    # tokens: the end of sequence is set to a token that no text contains. (Lists of an overlay do not replace.)
    path = out / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"]["eos_token_id"] = [config["model"]["vocab_size"] - 1]
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _gguf_as_is(shop: Workshop, out: Path) -> None:
    """The file that the pair is made from. Raises ConfigError where that is none."""
    if shop.source.suffix.lower() != ".gguf":
        raise ConfigError(f"{shop.source} is no GGUF file, so there is none to run as it is")
    shutil.copyfile(shop.source, out / "model.gguf")


_QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, sys.argv[3] == "pure"
raise SystemExit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def _gguf_q4_0(shop: Workshop, out: Path, *, draft: bool = False, pure: bool = True) -> None:
    """Q4_0 by llama.cpp's own quantizer; pure: embedding and head too, which it would leave at 8 bits."""
    floats = _gguf_floats(shop, draft)
    how = "pure" if pure else "mixed"
    run([str(shop.python), "-c", _QUANTIZE, str(floats), str(out / "model.gguf"), how], "llama.cpp's quantizer")


def _gguf_floats(shop: Workshop, draft: bool) -> Path:
    from edgespec_export.gguf_out import write_gguf

    folder = shop.draft_floats() if draft else shop.floats()
    file = folder.with_suffix(".gguf")
    return file if file.is_file() else write_gguf(folder, file, type="f32")


def _llamacpp_program(shop: Workshop, out: Path) -> None:
    """Our child in C++, against the headers of the source package and the wheel's libraries. Needs g++."""
    pip = [str(shop.python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
    sources = shop.work / "sources"
    run([*pip, ":all:", "-d", str(sources), f"llama-cpp-python=={LLAMACPP}"], "the source package of llama-cpp-python")
    with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    tree = next(sources.glob("*/vendor/llama.cpp"))
    libraries = next((shop.python.parent.parent / "lib").glob("python*/site-packages/lib"))
    includes = [f"-I{tree / name}" for name in ("common", "include", "ggml/include", "vendor")]
    # An old-style path: it holds for the libraries that the libraries need, too.
    linking = [f"-L{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", "-Wl,--disable-new-dtags",
               f"-Wl,-rpath,{libraries}"]  # fmt: skip
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BackendError("there is no C++ compiler (g++), which llama.cpp's own speculation needs: install one")
    define = f'-DLLAMA_CPP_PACKAGE="{LLAMACPP}"'
    run([compiler, "-std=c++17", "-O2", define, *includes, str(_PROGRAM), "-o", str(out / "llamacpp_child"), *linking],
        "the C++ compiler")  # fmt: skip


_CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
_COMPRESS = """
import sys, nncf, openvino
model = openvino.Core().read_model(sys.argv[1])
mode = nncf.CompressWeightsMode.INT4_ASYM
openvino.save_model(nncf.compress_weights(model, mode=mode, group_size=64, all_layers=True), sys.argv[2])
"""


def _openvino_as_is(shop: Workshop, out: Path) -> None:
    """OpenVINO's own form of the pair's GGUF file."""
    _gguf_as_is(shop, out)
    _openvino_from_gguf(shop, out)


def _openvino_int4(shop: Workshop, out: Path, *, draft: bool = False) -> None:
    """Int4 with zero points in groups of 64, embedding and head too, by NNCF, which OpenVINO recommends."""
    from edgespec_export.gguf_out import write_gguf

    half = shop.work / f"half-{out.name}"
    half.mkdir(exist_ok=True)
    write_gguf(shop.draft_floats() if draft else shop.floats(), half / "model.gguf", type="f16", force=True)
    _openvino_from_gguf(shop, half)
    files = [str(half / "openvino_model.xml"), str(out / "openvino_model.xml")]
    run([str(shop.python), "-c", _COMPRESS, *files], "NNCF")
    # A draft gets its target's tokenizer files: OpenVINO compares the files and not the vocabularies.
    for path in (shop.made("as-is") if draft else half).glob("openvino_*tokenizer.*"):
        shutil.copyfile(path, out / path.name)


def _openvino_from_gguf(shop: Workshop, folder: Path) -> None:
    """What OpenVINO's reader makes of the folder's model.gguf, in its place."""
    file = folder / "model.gguf"
    run([str(shop.python), "-c", _CONVERT, str(file)], "OpenVINO's GGUF reader")
    if not (folder / "openvino_model.xml").is_file():
        raise BackendError("OpenVINO's GGUF reader wrote no model")
    file.unlink()


GENAI_PARTS = {"int4": _genai_int4, "draft": _genai_draft}
LLAMACPP_PARTS: dict[str, Build] = {
    "q4_0-pure": _gguf_q4_0,
    "q4_0": partial(_gguf_q4_0, pure=False),
    "as-is": _gguf_as_is,
    "draft-q4_0": partial(_gguf_q4_0, draft=True),
    "program": _llamacpp_program,
}
OPENVINO_PARTS: dict[str, Build] = {
    "int4": _openvino_int4,
    "as-is": _openvino_as_is,
    "draft": partial(_openvino_int4, draft=True),
}
TRANSFORMERS_PARTS: dict[str, Build] = {"float": _copy_floats, "draft": partial(_copy_floats, draft=True)}


def run(command: Sequence[str], what: str) -> None:
    """Run to the end. Raises BackendError with the last lines of a failure."""
    done = subprocess.run(list(command), capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise BackendError(f"{describe_exit(what, done.returncode)}:\n{tail}")


def make_part(build: Build, shop: Workshop, target: Path) -> None:
    """Let `build` fill a scratch folder, and move it to `target` once it is whole."""
    made = shop.work / f"made-{target.name}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    build(shop, made)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)

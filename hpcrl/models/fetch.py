"""Download of a published model into a directory, which appears only when it is complete.

Files are collected in a hidden directory next to the target. Each has the digest that the hub lists for it before it
gets its name, and the received part of one stays when a download ends early: the next one continues after it.
`huggingface_hub` itself (2.4) begins each file anew in another process, and compares sizes alone.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.errors import UsageError
from hpcrl.models.hub import HubId
from hpcrl.models.remote import FetchError, RemoteFile, RemoteModel, list_remote, open_digest, read_remote
from hpcrl.storage import lost_replies
from hpcrl.storage.files import atomic_write, fsync_dir

SOURCE = ".hpcrl-source"
"""File of a fetched model that says which one it is: JSON with id, commit, and digests of files."""
_OTHER_FORMATS = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot"),
    "consolidated*",
)
"""Files that are left out of a model that has safetensors files: copies in other formats."""
_NEVER_MEANT = ("*/*", ".*", "*.part")
"""Files that are left out of any model: folders, hidden files, and names that unfinished files have here."""
_COPY_BYTES = 8 << 20


class FetchedModel(NamedTuple):
    """Result of a fetch.

    Attributes
    ----------
    path, commit:
        Its directory, and what it is a copy of.
    bytes, received:
        Bytes of all of its files, and of those that came over the network now.
    left_out:
        Published files that were not wanted.
    """

    path: Path
    commit: str
    bytes: int
    received: int
    left_out: tuple[str, ...]


def fetch_model(
    model: HubId,
    target: Path,
    *,
    include: Sequence[str] = (),
    jobs: int = 4,
    endpoint: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> FetchedModel:
    """Download a published model, or what is missing of it.

    Parameters
    ----------
    target:
        The directory of the model.
    include:
        Patterns of further files, which are left out otherwise (`_OTHER_FORMATS`, `_NEVER_MEANT`).
    jobs:
        Files at a time.
    endpoint:
        Address of the hub; None: ``HF_ENDPOINT``, or huggingface.co.
    report:
        Gets a line for each file that has come.

    Raises
    ------
    UsageError
        The model does not exist for this user, there is not enough room for it, ``target`` has another model, or
        another process fetches it now.
    FetchError
        The hub cannot be reached, or sent other bytes than it lists. What came is kept, but for these bytes.
    """
    remote = list_remote(model, endpoint=endpoint)
    wanted, left_out = _choose(remote, include)
    size = sum(file.size for file in wanted)
    if not any(file.name == "config.json" for file in wanted):
        raise UsageError(f"{model} has no config.json: it is not a model that hpcrl reads")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target, model):
        if target.exists() or target.is_symlink():
            _check_present(target, model, remote.commit)
            return FetchedModel(target, remote.commit, size, 0, left_out)
        stage = stage_of(target)
        stage.mkdir(exist_ok=True)
        download = _Download(model, remote.commit, stage, endpoint)
        missing = download.missing(wanted)
        _check_room(stage, model, sum(file.size - download.held(file) for file in missing))
        download.fetch(missing, jobs, report)
        for left in stage.rglob("*.part"):
            left.unlink()  # a file of another commit
        fsync_dir(stage)
        lost_replies.rename(stage, target)
        fsync_dir(target.parent)
    return FetchedModel(target, remote.commit, size, download.received, left_out)


def stage_of(target: Path) -> Path:
    """Return the directory in which the files of ``target`` are collected."""
    return target.with_name(f".{target.name}.part")


def read_source(model_dir: Path) -> dict[str, Any] | None:
    """Return what ``.hpcrl-source`` of a model says (``id``, ``commit``, ``files``); None where it has none."""
    try:
        found = json.loads((model_dir / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    texts = isinstance(found, dict) and all(isinstance(found.get(key), str) for key in ("id", "commit"))
    return found if texts and isinstance(found.get("files"), dict) else None


def _choose(remote: RemoteModel, include: Sequence[str]) -> tuple[tuple[RemoteFile, ...], tuple[str, ...]]:
    whole = any(file.name.endswith(".safetensors") and "/" not in file.name for file in remote.files)
    others = (*_NEVER_MEANT, *(_OTHER_FORMATS if whole else ()))

    def has(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = tuple(file for file in remote.files if has(file.name, include) or not has(file.name, others))
    names = {file.name for file in wanted}
    return wanted, tuple(sorted(file.name for file in remote.files if file.name not in names))


@contextmanager
def _alone(target: Path, model: HubId) -> Iterator[None]:
    """Hold the lock of a target (UsageError where another process has it).

    Where a filesystem grants it to several, they write equal bytes to equal places, and digests are compared at the
    end.
    """
    path = target.with_name(f".{target.name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(f"{who} fetches {model} into {target} now\n    hint: wait for it, or end it") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _check_present(target: Path, model: HubId, commit: str) -> None:
    source = read_source(target)
    if source is None:
        raise UsageError(f"{target} exists, and `hpcrl model get` did not make it\n    hint: --output, or remove it")
    if source["id"] != model.name or source["commit"] != commit:
        has = f"{source['id']} at commit {source['commit'][:12]}"
        raise UsageError(f"{target} is {has}, not {model} at {commit[:12]}\n    hint: --output, or remove it")


def _check_room(stage: Path, model: HubId, size: int) -> None:
    free = shutil.disk_usage(stage).free
    if size > free:
        raise UsageError(
            f"{model} needs {size / 1e9:,.1f} GB more, and {stage.parent} has {free / 1e9:,.1f} GB free\n"
            "    hint: free some, or choose another place with --output"
        )


class _StoppedError(Exception):
    """Another file failed, or the user asked for the end."""


class _Download:
    """The files of one commit, as they come."""

    def __init__(self, model: HubId, commit: str, stage: Path, endpoint: str | None) -> None:
        self._model, self._commit, self._stage, self._endpoint = model, commit, stage, endpoint
        source = read_source(stage)
        self._done: dict[str, str] = {} if source is None else source["files"]
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.received = 0

    def missing(self, wanted: Sequence[RemoteFile]) -> list[RemoteFile]:
        """Return the files that are missing or differ in digest, small ones first; remove those of other commits."""
        digests = {file.name: file.digest for file in wanted}
        for path in [each for each in self._stage.rglob("*") if each.is_file()]:
            name = path.relative_to(self._stage).as_posix()
            if name != SOURCE and not name.endswith(".part") and self._done.get(name) != digests.get(name, ""):
                path.unlink()
        self._done = {
            name: digest
            for name, digest in self._done.items()
            if digests.get(name) == digest and (self._stage / name).is_file()
        }
        return sorted((file for file in wanted if file.name not in self._done), key=lambda file: file.size)

    def held(self, file: RemoteFile) -> int:
        """Return the bytes of a file that were received before."""
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.is_file() else 0

    def fetch(self, files: Sequence[RemoteFile], jobs: int, report: Callable[[str], None]) -> None:
        """Fetch files, some at a time. The first error ends the others; what came of them stays."""
        self._record()
        count, of = len(self._done), len(self._done) + len(files)
        with ThreadPoolExecutor(max(1, jobs), thread_name_prefix="model-get") as pool:
            running = {pool.submit(self._fetch, file): file for file in files}
            waiting = set(running)
            try:
                while waiting:
                    ended, waiting = wait(waiting, return_when=FIRST_EXCEPTION, timeout=1.0)
                    for each in ended:
                        each.result()
                        count += 1
                        report(f"{running[each].name}: {running[each].size:,} bytes ({count} of {of} files)")
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: RemoteFile) -> None:
        path, part = self._stage / file.name, self._part(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = self.held(file)
        try:
            if not self._receive(file, part, begin):
                # the earlier part may have been damaged on the way to the disk: fetch again from the first byte
                part.unlink()
                if not begin or not self._receive(file, part, 0):
                    part.unlink(missing_ok=True)
                    raise FetchError(
                        f"{file.name} of {self._model} has other bytes than the hub lists ({file.algorithm} "
                        f"{file.digest}); they were removed\n    hint: call again; a proxy may have changed them"
                    )
        except OSError as error:
            named = OSError(error.errno, error.strerror, str(part))
            raise named from error
        lost_replies.rename(part, path)
        with self._lock:
            self._done[file.name] = file.digest
            self._record()

    def _receive(self, file: RemoteFile, part: Path, begin: int) -> bool:
        """Fetch the bytes behind ``begin``; return whether the digest of all is the one that is listed."""
        digest = open_digest(file)
        with part.open("r+b" if begin else "w+b") as stream:
            for _ in range(0, begin, _COPY_BYTES):
                digest.update(stream.read(min(_COPY_BYTES, begin - stream.tell())))
            if begin < file.size or not begin:
                target: Any = _Received(stream, file, digest, self._stop, self._count)
                read_remote(self._model, self._commit, file, target, begin, endpoint=self._endpoint)
                digest = target.digest
            stream.truncate(file.size)
            stream.flush()
            os.fsync(stream.fileno())
        return digest.hexdigest() == file.digest

    def _count(self, size: int) -> None:
        with self._lock:
            self.received += size

    def _part(self, file: RemoteFile) -> Path:
        path = self._stage / file.name
        return path.with_name(f"{path.name}.{file.digest[:16]}.part")

    def _record(self) -> None:
        document = {"id": self._model.name, "commit": self._commit, "files": self._done}
        atomic_write(self._stage / SOURCE, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


class _Received:
    """A file whose bytes are hashed as they are written; see `hpcrl.models.remote.read_remote`."""

    def __init__(
        self, stream: Any, file: RemoteFile, digest: hashlib._Hash, stop: threading.Event, count: Callable[[int], None]
    ) -> None:
        self._stream, self._file, self._stop, self._count = stream, file, stop, count
        self.digest = digest

    def write(self, data: bytes) -> int:
        """Write and hash ``data``; end the download where that was asked for."""
        if self._stop.is_set():
            raise _StoppedError
        self._stream.write(data)
        self._stream.flush()
        self.digest.update(data)
        self._count(len(data))
        return len(data)

    def tell(self) -> int:
        """Return the position."""
        return int(self._stream.tell())

    def seek(self, position: int) -> int:
        """Go back to the first byte: the server begins there although it was asked for less."""
        assert position == 0, position
        self.digest = open_digest(self._file)
        return int(self._stream.seek(0))

    def truncate(self) -> int:
        """Remove what stands behind the position."""
        return int(self._stream.truncate())

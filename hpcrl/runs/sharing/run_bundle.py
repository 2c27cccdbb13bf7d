"""One file with what a colleague needs to understand a run: no weights, no secrets, of a bounded size."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcrl import __version__
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.runs.metrics_files import metrics_parts
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretScan
from hpcrl.runs.views.diagnosis import diagnose, diagnosis_document
from hpcrl.storage.files import written_whole
from hpcrl.storage.sealed_files import content_from, sealed_path

BUNDLE_SCHEMA = "hpcrl.bundle/1"
_FIRST = ("recipe.yaml", "cluster.yaml", "plan.json", "run.json", "status.json", "restart.json", "job.sbatch")
_LOG_BYTES = 256 << 10
"""Maximum bytes of the end of each log."""
_BEFORE_BYTES = 64 << 10
"""Maximum length in bytes of a secret that lies on both sides of its begin."""
_ROLLOUT_FILES = 5
"""Maximum number of the newest files of rollouts."""
_ROLLOUT_BYTES = 2 << 20
"""Maximum bytes of the beginning of each of them."""
_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".txt", ".log", ".out", ".err", ".sh", ".sbatch", ".png", ".diff"})
"""Files of attempts that are taken."""


class _Part(NamedTuple):
    """A file, and how much of it: from its end where ``tail``; 0: all of it."""

    path: Path
    limit: int = 0
    tail: bool = False


class Bundled(NamedTuple):
    """A bundle that was written.

    Attributes
    ----------
    files:
        Number of files.
    bytes:
        Size of the bundle.
    left_out:
        Files for which there was no room.
    redacted:
        Kinds of secrets that were removed, by file.
    """

    path: Path
    files: int
    bytes: int
    left_out: list[str]
    redacted: dict[str, list[str]]


def write_run_bundle(
    run: RunDir,
    output: Path,
    *,
    max_bytes: int,
    rollouts: int = _ROLLOUT_FILES,
    more: Mapping[str, bytes] | None = None,
) -> Bundled:
    """Write a bundle; its file is readable by its user alone until you hand it on.

    Parameters
    ----------
    max_bytes:
        Maximum size of the files in it, before compression. What exceeds it is left out, the newest logs last.
    rollouts:
        Number of the newest files of rollouts; 0 for none.
    more:
        Data of other files by name, such as a page; in the bundle they come after the diagnosis.

    Raises
    ------
    UsageError
        The file exists.
    OSError
        A file cannot be read or written.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists\n    hint: name another file with -o")
    scan = SecretScan.of_run(run)
    left_out, redacted, written, total = list[str](), dict[str, list[str]](), list[str](), 0
    with written_whole(output) as temporary:  # replaces nothing
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(fd, "wb") as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", filename="") as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for name, data in _contents(run, scan, rollouts, more or {}):
                clean, kinds = scan.redacted(data)
                if total + len(clean) > max_bytes:
                    left_out.append(name)
                    continue
                total += len(clean)
                if kinds:
                    redacted[name] = sorted(set(kinds))
                written.append(name)
                _add(tar, f"{run.name}/{name}", clean)
            manifest = {
                "schema": BUNDLE_SCHEMA,
                "run": run.name,
                "hpcrl_version": __version__,
                "made_at_s": time.time(),
                "files": written,
                "left_out": left_out,
                "redacted": redacted,
            }
            _add(tar, f"{run.name}/MANIFEST.json", json.dumps(manifest, indent=2).encode())
    return Bundled(output, len(written) + 1, output.stat().st_size, left_out, redacted)


def _contents(run: RunDir, scan: SecretScan, rollouts: int, more: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield name and data of each file, the most important first."""
    try:
        yield "why.json", diagnosis_document(diagnose(run)).encode()
    except (HpcrlError, OSError, ValueError) as error:
        yield "why.txt", f"the run cannot be diagnosed: {error}\n".encode()
    yield from more.items()
    for part in _parts(run, rollouts):
        try:
            data = _read(part, scan)
        except OSError:
            continue  # it has gone meanwhile, or is not readable: the run may be alive
        yield str(part.path.relative_to(run.path)), data


def _parts(run: RunDir, rollouts: int) -> Iterator[_Part]:
    yield from (_Part(run.path / name) for name in _FIRST)
    metrics = _metrics_files(run)
    yield from (_Part(path) for path in [*_files(run.snapshots_dir), *metrics, *_files(run.events_dir)])
    if rollouts:
        # a hundred that shares a file is older than all that have one of their own
        files = sorted(run.rollouts_dir.glob("step-*.jsonl"))[-rollouts:]
        yield from (_Part(path, _ROLLOUT_BYTES) for path in files)
    attempts = [path for number in reversed(run.attempts()) for path in _files(run.attempt_dir(number))]
    logs = [path for path in attempts if path.suffix == ".log"]
    yield from (_Part(path, _LOG_BYTES) for path in attempts if path.suffix != ".log")
    yield from (_Part(path, _LOG_BYTES, tail=True) for path in logs)
    for directory in (run.sinks_dir, run.path / "submitit"):
        yield from (_Part(path, _LOG_BYTES, tail=True) for path in _files(directory) if path.suffix != ".json")


def _files(directory: Path) -> list[Path]:
    """Return the regular files below a directory that are text for people or programs."""
    found = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if path.suffix in _SUFFIXES and _is_regular(path))


def _metrics_files(run: RunDir) -> list[Path]:
    """Return the files of records, by their plain names also where they are sealed: a bundle has their lines."""
    found = set(_files(run.metrics_dir))  # first: a file that is sealed now is among these
    with contextlib.suppress(OSError):
        found |= {path for path in metrics_parts(run) if not os.path.lexists(path) and _is_regular(sealed_path(path))}
    return sorted(found)


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _read(part: _Part, scan: SecretScan) -> bytes:
    if not part.limit:
        return content_from(part.path)
    with part.path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= part.limit:
            return stream.read()
        if not part.tail:
            data = stream.read(part.limit)
            return data[: data.rfind(b"\n") + 1]
        # the rest of a secret that begins before it would not look like one
        begin = max(0, size - part.limit - _BEFORE_BYTES)
        stream.seek(begin)
        data = stream.read()
        return data[scan.first_behind(data, size - part.limit - begin) :].partition(b"\n")[2]


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o644
    tar.addfile(info, io.BytesIO(data))

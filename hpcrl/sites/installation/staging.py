"""Temporary directory next to an environment where it is made: one installation at a time; a failed one leaves
nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.processes.procfs import hostname
from hpcrl.storage import lost_replies

_PREFIX = ".installing-"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of filesystems without locks (Lustre without the option flock)."""
_TEXT_BYTES = 1 << 16
"""Scripts in ``bin/`` are smaller; what is larger is a program."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Temporary place where an environment is made.

    Attributes
    ----------
    root:
        Directory that is removed at the end, with everything but `environment`.
    descriptors:
        File descriptors of the lock, for programs that must hold it as long as they run.
    """

    root: Path
    descriptors: tuple[int, ...]

    @property
    def environment(self) -> Path:
        return self.root / "environment"

    @property
    def scratch(self) -> Path:
        return self.root / "tmp"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"


def make_prefix(prefix: Path) -> None:
    """Make the directory that holds environments (UsageError: it cannot be made, or not be written)."""
    try:
        prefix.mkdir(parents=True, exist_ok=True)
        if not os.access(prefix, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(prefix))
    except OSError as error:
        raise UsageError(
            f"--prefix {prefix}: {error.strerror or error}\n"
            "    hint: name a directory that you may write and that all nodes see"
        ) from error


@contextmanager
def staged(prefix: Path, name: str) -> Iterator[Stage]:
    """Yield an exclusive place to make the environment ``name`` of a prefix.

    A lock of the filesystem keeps two installations from working at once, and shows that the files of an earlier one
    are abandoned. Without locks each has its own place, and the first that is ready takes the name.

    Raises
    ------
    UsageError
        Another process makes this environment now.
    """
    with _locked(prefix / f".{name}.lock", f"{prefix / name}") as lock:
        if lock is not None:
            for left in prefix.glob(f"{_PREFIX}{name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        root = prefix / f"{_PREFIX}{name}-{hostname()}-{os.getpid()}"
        stage = Stage(root, () if lock is None else (lock,))
        shutil.rmtree(root, ignore_errors=True)
        try:
            root.mkdir()
            for directory in (stage.scratch, stage.wheels):
                directory.mkdir()
            yield stage
        finally:
            shutil.rmtree(root, ignore_errors=True)


def give_final_name(stage: Stage, target: Path) -> None:
    """Rename a finished environment, whose scripts name the place where they were made (FileExistsError: it is there).

    Programs in ``bin`` begin with the path of their interpreter, and what activates an environment names it.
    """
    made, final = os.fsencode(stage.environment), os.fsencode(target)
    for path in (*(stage.environment / "bin").iterdir(), stage.environment / "pyvenv.cfg"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _TEXT_BYTES:
            continue
        data = path.read_bytes()
        if made in data:
            path.write_bytes(data.replace(made, final))
    if target.exists():  # a rename can replace an empty directory
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.sync()  # otherwise a power failure could leave the name without some of the files
    lost_replies.rename(stage.environment, target)


@contextmanager
def _locked(path: Path, what: str) -> Iterator[int | None]:
    """Hold the lock of an environment; give its descriptor, or None where the filesystem has no locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                yield None
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            owner = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "another process"
            raise UsageError(
                f"{what} is being installed now, by {owner}\n    hint: wait for it, then call this again"
            ) from None
        with contextlib.suppress(OSError):  # for people; a full filesystem is reported elsewhere
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {hostname()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)

"""States of the files of tasks at a submit, so that runs that read different rows do not count as equal.

Shared filesystems may be slow or hang: reading ends after a while, and what was not read by then is unknown.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrl.config.environments import TaskFileEnv
from hpcrl.config.recipe import Recipe
from hpcrl.config.verifiers_environment import VerifiersEnv

LONGEST_S = 30.0
"""Maximum time for all files together."""
MOST_BYTES = 1 << 30
"""Maximum size of a file, or of the files of a directory, whose content is read."""
_MOST_FILES = 10_000
_CHUNK = 1 << 20


def data_states(recipe: Recipe, *, longest_s: float = LONGEST_S) -> dict[str, str]:
    """Return what identifies the files of tasks, by path as the recipe has it.

    That is the hash of the content (``sha256:``); of files of more than `MOST_BYTES` their size and time. An empty text
    stands for what is missing, or was not read in time. Data sets of the hub are named by the recipe itself.
    """
    found = dict.fromkeys(_paths(recipe), "")
    if not found:
        return {}
    end_s = time.monotonic() + longest_s

    def read() -> None:
        for path in found:
            found[path] = _state(Path(path), end_s)

    # a read from a filesystem that hangs never returns: the process does not wait for this thread
    thread = threading.Thread(target=read, name="files of tasks", daemon=True)
    thread.start()
    thread.join(longest_s)
    return dict(found)


def short_data(state: str) -> str:
    """Return what identifies a file, for people: the begin of a hash."""
    return state.removeprefix("sha256:")[:12] if state.startswith("sha256:") else state


def _paths(recipe: Recipe) -> Iterator[str]:
    for environment in recipe.environments:
        if isinstance(environment, TaskFileEnv):
            yield from (path for path in (environment.path, environment.held_out_path) if path is not None)
        elif isinstance(environment, VerifiersEnv) and environment.path is not None:
            yield environment.path


def _state(path: Path, end_s: float) -> str:
    try:
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        stats = [each.stat() for each in files]
        if len(files) > _MOST_FILES or sum(each.st_size for each in stats) > MOST_BYTES:
            size, newest_ns = sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)
            return f"{size} bytes, changed at {newest_ns / 1e9:.6f}"
        digest = hashlib.sha256()
        for each in files:
            digest.update(os.fsencode(each.relative_to(path)) + b"\0")
            if not _read(each, digest.update, end_s):
                return ""
        return f"sha256:{digest.hexdigest()}"
    except OSError:
        return ""


def _read(path: Path, take: Callable[[bytes], object], end_s: float) -> bool:
    """Give the content of a file to a function; return whether there was time for it."""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            if time.monotonic() > end_s:
                return False
            take(chunk)
    return True

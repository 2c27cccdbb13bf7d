"""The archive with pytest and the packages that tests need, which each work tree of a set has.

Sandboxes start from a tree of files, and their Python has no packages of its own: so nothing that is installed on the
node is seen by tests, the unchanged package among it. Python imports from the archive as it is. It has the modules
compiled for the interpreter of the tests, because imports would take seconds otherwise.
"""

from __future__ import annotations

import io
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hpcrl.errors import UsageError

_MOMENT = (1980, 1, 1, 0, 0, 0)
"""Time of each entry: equal files give equal archives."""
_LEXERS = frozenset({"__init__", "_mapping", "python", "diff", "special", "console"})
"""Lexer modules of Pygments that pytest may use; the hundreds of others are left out."""
_COMPILE_TIMEOUT_S = 300.0


def build_tools(wheels: Sequence[Path], *, python: Path) -> bytes:
    """Return the archive of pure-Python wheels.

    Parameters
    ----------
    python:
        The interpreter of the tests, which compiles them.

    Raises
    ------
    UsageError
        A wheel cannot be read, or the interpreter does not run.
    """
    with TemporaryDirectory(prefix="hpcrl-tools-") as directory:
        base = Path(directory)
        for wheel in wheels:
            _unpack(wheel, base)
        # the interpreter has no site packages here: it compiles by its standard library alone
        command = [str(python), "-I", "-S", "-m", "compileall", "-q", "-b", "-s", directory, "-p", "tools"]
        try:
            done = subprocess.run(
                [*command, "--invalidation-mode", "unchecked-hash", directory],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
                env={},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{python} cannot compile the packages of tests: {error}") from error
        if done.returncode > 1:
            raise UsageError(f"{python} cannot compile the packages of tests: {done.stderr.strip()[-400:]}")
        return _archive(base)


def _unpack(wheel: Path, base: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                target = (base / name).resolve()
                if not target.is_relative_to(base.resolve()) or name.endswith("/") or not _is_needed(name):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"the wheel {wheel} cannot be read: {error}") from error


def _is_needed(name: str) -> bool:
    path = Path(name)
    if path.parts[:2] in (("pygments", "lexers"), ("pygments", "styles")):
        return path.stem in _LEXERS | {"default"}
    return path.suffix != ".exe"


def _archive(base: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(base.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = zipfile.ZipInfo(path.relative_to(base).as_posix(), _MOMENT)
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return stream.getvalue()

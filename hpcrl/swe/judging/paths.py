"""Changes of an agent that count: those of the source code, and none that says how tests run or what they are."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from hpcrl.sandboxes import Patch, PatchEntry

HIDDEN_DIRECTORY = ".hpcrl"
"""Directory of the work tree with what hpcrl itself puts there."""
_TEST_DIRECTORIES = frozenset({"tests", "test"})
_CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "setup.cfg", "setup.py"),
        *("tox.ini", ".coveragerc", "pyproject.toml", "noxfile.py", "sitecustomize.py", "usercustomize.py"),
    }
)
_MADE = frozenset({".git", ".hg", HIDDEN_DIRECTORY, "__pycache__", ".pytest_cache", "site-packages", "dist-packages"})
_SUFFIXES = frozenset({".pth", ".pyc", ".pyo", ".so", ".pyd", ".dll", ".dylib", ".egg-link"})
_TOOLS = frozenset(
    {
        *(
            "pytest",
            "_pytest",
            "py",
            "pluggy",
            "iniconfig",
            "packaging",
            "pygments",
            "exceptiongroup",
            "tomli",
            "hpcrl",
        ),
        *("hypothesis", "attr", "attrs", "mock", "freezegun", "dateutil", "pytz", "six", "nose", "trial"),
    }
)
_LINK = "it is a symbolic link"


def counted_changes(
    patch: Patch, *, test_files: Collection[str], roots: Iterable[str], modules: Collection[str]
) -> tuple[Patch, dict[str, str]]:
    """Split the changes of an agent into those that count, and the others with the reason.

    Parameters
    ----------
    test_files:
        Paths that the task lays itself.
    roots:
        Directories that modules are imported from, relative to the work tree; ``.`` is the work tree.
    modules:
        Names of the modules that the base tree has in these directories.
    """
    kept: list[PatchEntry] = []
    refused: dict[str, str] = {}
    for entry in patch.entries:
        if reason := refused_reason(entry, test_files=test_files, roots=roots, modules=modules):
            refused[entry.path] = reason
        else:
            kept.append(entry)
    return Patch(tuple(kept)), refused


def refused_reason(
    entry: PatchEntry, *, test_files: Collection[str], roots: Iterable[str], modules: Collection[str]
) -> str:
    """Return why a change does not count; empty where it does."""
    if any(file is not None and file.link for file in (entry.before, entry.after)):
        return _LINK
    if reason := _place_reason(entry.path):
        return reason
    path = PurePosixPath(entry.path)
    if entry.path in test_files or _is_test(path):
        return "it is a test"
    if entry.before is None and (module := _shadowing(path, roots, modules)):
        return f"it would replace the module {module!r}"
    return ""


def _place_reason(name: str) -> str:
    """Return what is wrong with the place of a path; empty where nothing is."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return "it is outside of the repository"
    if not name.isprintable():
        return "its name has characters that cannot be shown"
    # names are compared as on a filesystem that takes no account of case
    parts = [part.casefold() for part in path.parts]
    if any(part in _MADE or part.endswith((".egg-info", ".dist-info")) for part in parts):
        return "it is in a directory that tools make"
    if parts[-1] in _CONFIGURATION:
        return "it configures tests or the interpreter"
    if path.suffix.casefold() in _SUFFIXES:
        return "it is not source code"
    return ""


def _is_test(path: PurePosixPath) -> bool:
    if any(part.casefold() in _TEST_DIRECTORIES for part in path.parts[:-1]):
        return True
    return path.suffix == ".py" and (path.stem.startswith("test_") or path.stem.endswith("_test"))


def _shadowing(path: PurePosixPath, roots: Iterable[str], modules: Collection[str]) -> str:
    """Return the name of a foreign module that a new file would be found in place of; empty where there is none."""
    for root in roots:
        base = PurePosixPath(root)
        if not path.is_relative_to(base):
            continue
        module = path.relative_to(base).parts[0].partition(".")[0]
        if (module in sys.stdlib_module_names or module in _TOOLS) and module not in modules:
            return module
    return ""

"""The order in which files of tests are tried on a mutant: first those that are likely to see it.

A test is near to a module that it imports itself, whose name its own name repeats, and whose functions it names. With
this order most mutants are caught by the first two or three files, and nothing has to be recorded before.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

_UNREACHED = 6
"""Distance, in imports, of a file that imports nothing that leads to the module: it may still start it as a process."""


class Nearness:
    """Imports between the modules of a checkout, for distances from tests to a module."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._imports: dict[str, tuple[str, ...]] = {}

    @cached_property
    def _helpers(self) -> dict[str, str]:
        """Paths of the modules of tests by name: tests import each other's helpers without a package."""
        found = (path.relative_to(self._tree) for path in sorted((self._tree / "tests").rglob("*.py")))
        return {path.stem: path.as_posix() for path in found if path.stem not in ("__init__", "conftest")}

    def order(self, module: str, function: str, files: Sequence[str]) -> list[str]:
        """Return ``files``, paths relative to the checkout, those that are nearest to ``function`` first."""
        names = [name for name in function.split(".") if len(name) > 4 and not name.startswith("__")]
        return sorted(files, key=lambda file: (self._distance(module, names, file), file))

    def importers(self, module: str) -> list[str]:
        """Return the files of tests that import ``module`` themselves: lists of rooms need not name them."""
        files = (path.relative_to(self._tree).as_posix() for path in sorted((self._tree / "tests").rglob("test_*.py")))
        return [file for file in files if module in self._imported_by(file)]

    def _distance(self, module: str, names: Sequence[str], file: str) -> float:
        words, own = (set(Path(path).stem.removeprefix("test_").split("_")) for path in (module, file))
        folders, own_folders = (Path(path).parts[1:-1] for path in (module, file))
        text = (self._tree / file).read_text(encoding="utf-8")
        shared = len(words & own) / len(words)
        same_folder = bool(folders) and own_folders[: len(folders)] == folders
        named = max((text.count(name) for name in names), default=0)
        return self._steps(file, module) - 2.0 * shared - same_folder - bool(named) - min(named, 10) / 10

    def _steps(self, file: str, module: str) -> int:
        """Return over how many imports ``file`` reaches ``module``."""
        seen, waiting = {file}, deque([(file, 0)])
        while waiting:
            place, steps = waiting.popleft()
            if place == module:
                return steps
            if steps + 1 < _UNREACHED:
                for other in self._imported_by(place):
                    if other not in seen:
                        seen.add(other)
                        waiting.append((other, steps + 1))
        return _UNREACHED

    def _imported_by(self, path: str) -> tuple[str, ...]:
        if path not in self._imports:
            parsed = ast.parse((self._tree / path).read_text(encoding="utf-8"))
            found = (self._module(name) for node in ast.walk(parsed) for name in _imported_names(node))
            self._imports[path] = tuple(dict.fromkeys(each for each in found if each is not None))
        return self._imports[path]

    def _module(self, name: str) -> str | None:
        """Return the path of a module of this checkout by its dotted name, or by that of something in it."""
        if not name.startswith("hpcrl"):
            return self._helpers.get(name.partition(".")[0])
        while name:
            place = name.replace(".", "/")
            for path in (f"{place}.py", f"{place}/__init__.py"):
                if (self._tree / path).is_file():
                    return path
            name = name.rpartition(".")[0]
        return None


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)

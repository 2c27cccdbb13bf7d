"""Tasks ready for use: their trees read and checked, their diffs applied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hpcrl.sandboxes import Patch, PatchEntry, SandboxFile
from hpcrl.swe.diffs import apply_diff, parse_diff
from hpcrl.swe.image_tree import read_image_tree
from hpcrl.swe.judging.canaries import test_file_of
from hpcrl.swe.judging.paths import HIDDEN_DIRECTORY
from hpcrl.swe.task import SweTask, SweTaskError
from hpcrl.swe.trees import MAX_KEPT_BYTES, Tree, read_tree, tree_bytes

TOOLS = f"{HIDDEN_DIRECTORY}/tools.zip"
"""Path in the work tree of the archive with pytest and the packages that tests need."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """One task with its files.

    Attributes
    ----------
    task:
        The task.
    tree:
        The repository without the bug, and with the tests that the tree has; shared by tasks.
    start:
        Text of the files that the agent finds changed against the tree; None for one that is removed.
    laid:
        Text of the test files that the judge lays; None for one that is removed.
    solution:
        Changes against the tree that are a right result; None where none is known.
    modules:
        Names of modules in the directories that modules are imported from.
    """

    task: SweTask
    tree: Tree = field(repr=False)
    start: dict[str, str | None] = field(repr=False)
    laid: dict[str, str | None] = field(repr=False)
    solution: dict[str, str | None] | None = field(repr=False)
    modules: frozenset[str] = field(repr=False)

    @property
    def start_patch(self) -> Patch:
        """Changes from the tree to what the agent finds."""
        return changes_of(self.tree, self.start)

    @property
    def solution_patch(self) -> Patch | None:
        """Changes from the tree to a right result; None where none is known."""
        return None if self.solution is None else changes_of(self.tree, self.solution)

    def test_texts(self) -> dict[str, str]:
        """Return the text of the files that the tests of the task are in, by path; other files are left out."""
        texts = {}
        for path in {test_file_of(test) for test in (*self.task.fail_to_pass, *self.task.pass_to_pass)}:
            file = self.tree.get(path)
            text = self.laid[path] if path in self.laid else _text(file) if file is not None else None
            if text is not None and path.endswith(".py"):
                texts[path] = text
        return texts


def changes_of(tree: Mapping[str, SandboxFile], files: Mapping[str, str | None]) -> Patch:
    """Return the changes that give files of a tree these texts."""
    entries = []
    for path in sorted(files):
        before, text = tree.get(path), files[path]
        after = None if text is None else SandboxFile(text.encode(), executable=bool(before and before.executable))
        if before != after:
            entries.append(PatchEntry(path, before, after))
    return Patch(tuple(entries))


class TaskPreparer:
    """Prepares tasks of one file, in any thread. Calls at the same time read a tree once."""

    def __init__(self, directory: Path, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """Remember where the task file lies: paths of trees are relative to it.

        Parameters
        ----------
        max_kept_bytes:
            Bytes of the files of trees that are kept for other tasks; the newest one always is. Prepared tasks keep
            their trees.
        """
        self._directory, self._max_kept_bytes = directory, max_kept_bytes
        self._trees: OrderedDict[tuple[str, str], Tree] = OrderedDict()
        self._reading: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._tools: bytes | None = None

    def prepare(self, task: SweTask) -> PreparedTask:
        """Read what a task needs.

        Raises
        ------
        TreeError
            The tree cannot be read, or is another one.
        DiffError
            A diff does not fit the tree.
        SweTaskError
            A file that a diff changes is not text.
        """
        tree = self._tree(task)
        start = _applied(tree, {}, task.bug, task)
        laid = _applied(tree, {}, task.tests, task)
        solution = _applied(tree, start, task.solution, task) if task.solution else None
        if solution is not None:
            solution = {**start, **solution}
        return PreparedTask(task, tree, start, laid, solution, module_names(tree, task.imports))

    def _tree(self, task: SweTask) -> Tree:
        # without a tree the image has the repository
        key = (task.tree, task.digest) if task.tree else (task.image, task.directory)
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        # the rollouts of a group ask for one tree at the same time
        with reading:
            with self._lock:
                if key in self._trees:
                    self._trees.move_to_end(key)
                    return self._trees[key]
            if task.tree:
                tree = read_tree(self._directory / task.tree, digest=task.digest)
            else:
                tree = read_image_tree(Path(task.image), task.directory) if task.image else {}
            tools = self._directory / "tools.zip"
            if tools.is_file():
                self._tools = self._tools or tools.read_bytes()
                tree = {**tree, TOOLS: SandboxFile(self._tools)}
            with self._lock:
                self._trees[key] = tree
                kept = sum(map(tree_bytes, self._trees.values()))
                while kept > self._max_kept_bytes and len(self._trees) > 1:
                    kept -= tree_bytes(self._trees.popitem(last=False)[1])
            return tree


def _applied(tree: Tree, changed: Mapping[str, str | None], diff: str, task: SweTask) -> dict[str, str | None]:
    """Return the text of each file that a diff changes in a tree that has been changed before."""
    if not diff:
        return {}
    parsed = parse_diff(diff)
    texts: dict[str, str] = {}
    for path in {path for each in parsed for path in (each.old, each.new) if path is not None}:
        if path in changed:
            text = changed[path]
        elif path in tree:
            text = _text(tree[path])
            if text is None:
                raise SweTaskError(f"task {task.id!r}: its diff changes {path}, which is not UTF-8 text")
        else:
            text = None
        if text is not None:
            texts[path] = text
    return apply_diff(parsed, texts)


def _text(file: SandboxFile) -> str | None:
    try:
        return None if file.link else file.content.decode()
    except UnicodeDecodeError:
        return None


def module_names(tree: Tree, roots: Iterable[str]) -> frozenset[str]:
    """Return the first parts of the names below the directories that modules are imported from."""
    bases = [PurePosixPath(root) for root in roots]
    paths = [PurePosixPath(path) for path in tree]
    return frozenset(
        path.relative_to(base).parts[0].partition(".")[0]
        for path in paths
        for base in bases
        if path.is_relative_to(base) and path != base
    )

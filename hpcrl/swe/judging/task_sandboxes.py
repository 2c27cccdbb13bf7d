"""Sandboxes with the repository of a task."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hpcrl.sandboxes import (
    Sandbox,
    SandboxHost,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)
from hpcrl.swe.judging.prepared import TOOLS, PreparedTask
from hpcrl.swe.task import SweTask
from hpcrl.swe.trees import MAX_KEPT_BYTES, Tree, tree_bytes


@dataclass(slots=True)
class _HostTree:
    """A tree that the host has, or gets. The tree itself is kept: a number names it only while it is there."""

    tree: Tree
    size: int
    adding: asyncio.Lock = field(default_factory=asyncio.Lock)
    name: str | None = None
    users: int = 0
    released: bool = False


class TaskSandboxes:
    """Starts sandboxes of tasks; each tree is given to the host once, and taken back when no task uses it any more and
    the trees have more than ``max_kept_bytes``.

    Attributes
    ----------
    scripts_that_work:
        Ids of tasks whose script has left a reward without an agent.
    """

    def __init__(
        self, host: SandboxHost, *, limits: SandboxLimits | None = None, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        """Remember where sandboxes are started, and their limits."""
        self._host, self._limits, self._max_kept_bytes = host, limits, max_kept_bytes
        self._trees: OrderedDict[int, _HostTree] = OrderedDict()
        self.scripts_that_work: set[str] = set()

    async def tree_name(self, prepared: PreparedTask) -> str:
        """Return the host's name of the tree of a task (SandboxError where it cannot be kept)."""
        known = self._known(prepared.tree)
        # the rollouts of a group give the same tree at the same time
        async with known.adding:
            if known.name is None:
                known.name = await self._host.add_tree(prepared.tree)
            return known.name

    @contextlib.asynccontextmanager
    async def using(self, prepared: PreparedTask) -> AsyncIterator[None]:
        """Keep the tree of a task with the host; afterwards it may be given up. Without this it is kept."""
        known = self._known(prepared.tree)
        known.users += 1
        try:
            yield
        finally:
            known.users -= 1
            known.released = True
            await self._give_up()

    def _known(self, tree: Tree) -> _HostTree:
        known = self._trees.get(id(tree))
        if known is None:
            known = self._trees[id(tree)] = _HostTree(tree, tree_bytes(tree))
        self._trees.move_to_end(id(tree))
        return known

    async def _give_up(self) -> None:
        """Give up trees without users, the oldest ones first, until few enough are kept."""
        kept = sum(each.size for each in self._trees.values())
        for key, each in list(self._trees.items()):
            if kept <= self._max_kept_bytes:
                return
            if each.released and not each.users and self._trees.get(key) is each:
                del self._trees[key]
                kept -= each.size
                if each.name is not None:
                    # a daemon that has ended keeps nothing
                    with contextlib.suppress(SandboxLostError):
                        await self._host.drop_tree(each.name)

    async def start(self, prepared: PreparedTask) -> Sandbox:
        """Start a sandbox with the tree of a task, without its bug.

        Raises
        ------
        SandboxStartError
            It does not start.
        """
        task, known = prepared.task, self._known(prepared.tree)
        known.users += 1
        try:
            return await self._host.start(
                image=task.image or None,
                tree=await self.tree_name(prepared),
                limits=self._limits_of(task),
                work_directory=task.directory,
                env=_variables(prepared),
            )
        except SandboxLimitError as error:
            # no agent has caused it: a judgement must not end with 0 for it
            what = f"the repository of task {task.id!r} has no space in its sandbox: {error}"
            raise SandboxStartError(f"{what}\n    hint: raise disk_gib and memory_gib") from None
        finally:
            known.users -= 1

    def _limits_of(self, task: SweTask) -> SandboxLimits | None:
        """Return the limits of a task's sandboxes: a task may be given less memory than others."""
        if not task.memory_mib:
            return self._limits
        limits = self._limits or SandboxLimits()
        return dataclasses.replace(limits, memory_bytes=min(limits.memory_bytes, task.memory_mib << 20))


def _variables(prepared: PreparedTask) -> dict[str, str]:
    """Return the variables of all programs in sandboxes of a task."""
    task = prepared.task
    variables = {
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TZ": "UTC",
    }
    if TOOLS in prepared.tree:
        path = [f"{task.directory}/{TOOLS}", *(inside(task.directory, root) for root in task.imports)]
        variables["PYTHONPATH"] = ":".join(path)
    return {**variables, **task.env}


def inside(directory: str, path: str) -> str:
    """Return the absolute path of a path of the repository; ``.`` is the repository."""
    return directory if path == "." else f"{directory}/{path}"

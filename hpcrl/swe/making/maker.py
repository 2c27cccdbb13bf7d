"""The generator: a set of tasks from pinned packages.

::

    OUT/tasks.jsonl          the tasks
    OUT/trees/NAME.tar       the unchanged packages, which sandboxes get with the bug of a task
    OUT/tools.zip            pytest and what tests need
    OUT/set.json             what the set was made from
    OUT/parts/               measurements and batches: what a repeated call does not do again

Equal arguments give equal tasks, whatever the number of workers: candidates are numbered, and which of them become
tasks depends on their numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sandboxes import SandboxFile
from hpcrl.storage.files import atomic_write, write_json
from hpcrl.swe.judging.prepared import TOOLS
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.making.drawing import BugDrawer, SeededVersion
from hpcrl.swe.making.measuring import MeasuredPackage, base_task, measure_package
from hpcrl.swe.making.packages import SourcePackage, fetch_package, pinned_packages, pinned_tools, source_tree
from hpcrl.swe.making.tools import build_tools
from hpcrl.swe.making.versions import Version, run_versions
from hpcrl.swe.making.writing import most_failed, task_of
from hpcrl.swe.task import SweTask, read_tasks, write_tasks
from hpcrl.swe.trees import Tree, tree_digest, write_tar

_BATCH = 24
"""Candidates of one sandbox."""
_CPU_FACTOR = 2.0
_CPU_EXTRA_S = 2.0
_WALL_FACTOR = 12.0
_MAX_BATCHES = 400
"""Maximum batches of one package: it has no more different bugs."""


class SetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a set is made from; a directory has the parts of one.

    Attributes
    ----------
    tasks:
        Number of tasks.
    seed:
        Seed of all draws.
    packages:
        Names of the packages.
    held_out_share:
        Share of the functions of each package whose tasks are held out.
    held_out_packages:
        Packages all of whose tasks are held out.
    python:
        The interpreter of the tests.
    """

    tasks: int
    seed: int
    packages: tuple[str, ...]
    held_out_share: float
    held_out_packages: tuple[str, ...]
    python: str


@dataclass(slots=True)
class MadeSet:
    """A set that was made.

    Attributes
    ----------
    tasks:
        The tasks in their order in the file.
    candidates:
        Number of versions that were tried.
    flaky:
        Number of tests that were left out because they do not always pass.
    notes:
        Shortfalls, a sentence each.
    """

    tasks: list[SweTask]
    candidates: int = 0
    flaky: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    """A package in work."""

    package: SourcePackage
    tree: Tree
    digest: str
    measured: MeasuredPackage
    drawer: BugDrawer
    batches: dict[int, list[SweTask]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.package.pinned.name


class TaskSetMaker:
    """Makes one set of tasks."""

    def __init__(
        self,
        sandboxes: TaskSandboxes,
        settings: SetSettings,
        out: Path,
        *,
        cache: Path,
        workers: int,
        index: str,
        offline: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare; nothing is fetched or written yet.

        Parameters
        ----------
        out:
            Directory of the set.
        cache:
            Directory with the files of packages.
        workers:
            Sandboxes at once.
        progress:
            Called with a description of finished work.

        Raises
        ------
        UsageError
            A package is not pinned, or the directory has a set of other settings.
        """
        known = pinned_packages()
        if unknown := [name for name in (*settings.packages, *settings.held_out_packages) if name not in known]:
            raise UsageError(f"no package {unknown[0]!r} is pinned\n    hint: there are {', '.join(known)}")
        self._known, self._settings, self._out = known, settings, out
        self._sandboxes, self._cache, self._index, self._offline = sandboxes, cache, index, offline
        self._slots = asyncio.Semaphore(workers)
        self._progress = progress

    async def make(self) -> MadeSet:
        """Make the set, or what is missing of it.

        Raises
        ------
        UsageError
            A file cannot be fetched, or a package cannot be used.
        SandboxError
            Tests could not be run.
        """
        begin = time.monotonic()
        self._check_directory()
        tools = await asyncio.to_thread(self._tools)
        sources = await asyncio.gather(*(self._source(name, tools) for name in self._settings.packages))
        self._progress(f"{len(sources)} packages are measured after {time.monotonic() - begin:.0f} s")
        quotas = {source.name: -(-self._settings.tasks // len(sources)) for source in sources}
        await asyncio.gather(*(self._fill(source, quotas[source.name]) for source in sources))
        # packages with too few bugs leave their share to the others
        while (missing := self._settings.tasks - sum(len(self._accepted(each)) for each in sources)) > 0:
            able = [each for each in sources if len(self._accepted(each)) >= quotas[each.name]]
            if not able:
                break
            for each in able:
                quotas[each.name] += -(-missing // len(able))
            await asyncio.gather(*(self._fill(each, quotas[each.name]) for each in able))
        made = self._chosen(sources, quotas)
        self._write(sources, made)
        return made

    def _check_directory(self) -> None:
        path = self._out / "parts/settings.json"
        # a larger set of the same seed has the tasks of a smaller one
        settings = msgspec.structs.replace(self._settings, tasks=0)
        if path.is_file():
            if msgspec.json.decode(path.read_bytes(), type=SetSettings) != settings:
                what = f"{self._out} has a set of other settings"
                raise UsageError(f"{what}\n    hint: name another directory, or remove this one")
            return
        if self._out.is_dir() and any(self._out.iterdir()):
            raise UsageError(f"{self._out} is not empty, and has no set\n    hint: name a new directory")
        (self._out / "parts").mkdir(parents=True, exist_ok=True)
        (self._out / "trees").mkdir(exist_ok=True)
        atomic_write(path, msgspec.json.encode(settings))

    def _tools(self) -> bytes:
        wheels = [self._fetch(pinned) for pinned in pinned_tools()]
        path = self._out / "tools.zip"
        if not path.is_file():
            atomic_write(path, build_tools(wheels, python=Path(self._settings.python)))
        return path.read_bytes()

    def _fetch(self, pinned: object) -> Path:
        return fetch_package(pinned, self._cache, index=self._index, offline=self._offline)  # type: ignore[arg-type]

    async def _source(self, name: str, tools: bytes) -> _Source:
        package = self._known[name]
        path = await asyncio.to_thread(self._fetch, package.pinned)
        tree = await asyncio.to_thread(source_tree, path)
        digest = tree_digest(tree)
        archive = self._out / f"trees/{name}-{package.pinned.version}.tar"
        if not archive.is_file():
            await asyncio.to_thread(write_tar, archive, tree)
        full = {**tree, TOOLS: SandboxFile(tools)}
        part = self._out / f"parts/{name}.json"
        if part.is_file():
            measured = msgspec.json.decode(part.read_bytes(), type=MeasuredPackage)
        else:
            async with self._slots:
                measured = await measure_package(self._sandboxes, package, full, Path(self._settings.python))
            atomic_write(part, msgspec.json.encode(measured))
            self._progress(f"{name}: {len(measured.tests)} tests pass, {len(measured.flaky)} do not always")
        drawer = BugDrawer(
            package,
            tree,
            measured,
            seed=self._settings.seed,
            held_out_share=self._settings.held_out_share,
            held_out=name in self._settings.held_out_packages,
        )
        return _Source(package, full, digest, measured, drawer)

    async def _fill(self, source: _Source, quota: int) -> None:
        """Try batches of a package until it has enough tasks."""
        while len(self._accepted(source)) < quota and len(source.batches) < _MAX_BATCHES:
            done = len(source.batches)
            missing = quota - len(self._accepted(source))
            # most candidates become tasks
            wanted = min(-(-missing * 4 // (3 * _BATCH)), _MAX_BATCHES - done)
            before = len(self._accepted(source))
            await asyncio.gather(*(self._batch(source, number) for number in range(done, done + wanted)))
            if len(self._accepted(source)) == before:
                return

    async def _batch(self, source: _Source, number: int) -> None:
        path = self._out / f"parts/{source.name}-{number:04d}.jsonl"
        if path.is_file():
            source.batches[number] = list(read_tasks(path)) if path.stat().st_size else []
            return
        drawn = [source.drawer.draw(each) for each in range(number * _BATCH, (number + 1) * _BATCH)]
        candidates = [each for each in drawn if each is not None]
        async with self._slots:
            tasks = await self._try(source, candidates)
        write_tasks(path, tasks)
        source.batches[number] = tasks
        self._progress(f"{source.name}: {len(tasks)} of {len(candidates)} versions are tasks")

    async def _try(self, source: _Source, candidates: Sequence[SeededVersion]) -> list[SweTask]:
        """Run the tests of candidates; return those that are tasks."""
        cpu_s = _CPU_FACTOR * source.measured.cpu_s + _CPU_EXTRA_S
        versions = [
            Version(
                job=each.number,
                changes=each.changes,
                files=sorted({test.partition("::")[0] for test in each.tests}),
                tests=each.tests,
                cpu_s=cpu_s,
                max_failed=most_failed(source.measured) + 1,
            )
            for each in candidates
        ]
        python = Path(self._settings.python)
        prepared = base_task(source.package, source.tree, [], python)
        # compiles the tests once for all
        first = Version(job=-1, changes={}, files=source.package.tests, tests=[], keep_compiled=True)
        results = await run_versions(self._sandboxes, prepared, [first, *versions], wall_s=_WALL_FACTOR * cpu_s)
        tasks = []
        for each in candidates:
            if (result := results.get(each.number)) is not None:
                task = task_of(
                    each,
                    result,
                    package=source.package,
                    tree=source.tree,
                    digest=source.digest,
                    measured=source.measured,
                    python=python,
                )
                tasks += [] if task is None else [task]
        return tasks

    def _accepted(self, source: _Source) -> list[SweTask]:
        """Return the tasks of the batches up to the first that is missing, each bug once."""
        found: dict[str, SweTask] = {}
        for number in range(len(source.batches)):
            for task in source.batches.get(number, ()):
                found.setdefault(task.bug, task)
        return list(found.values())

    def _chosen(self, sources: Sequence[_Source], quotas: dict[str, int]) -> MadeSet:
        accepted = [self._accepted(source)[: quotas[source.name]] for source in sources]
        # in turns: the first tasks of a set are of all packages
        longest = max((len(tasks) for tasks in accepted), default=0)
        turns = [tasks[turn] for turn in range(longest) for tasks in accepted if turn < len(tasks)]
        made = MadeSet(turns[: self._settings.tasks])
        made.candidates = sum(len(source.batches) for source in sources) * _BATCH
        made.flaky = sum(len(source.measured.flaky) for source in sources)
        if len(made.tasks) < self._settings.tasks:
            made.notes.append(f"the packages have only {len(made.tasks)} different bugs that tests find")
        return made

    def _write(self, sources: Sequence[_Source], made: MadeSet) -> None:
        write_tasks(self._out / "tasks.jsonl", made.tasks)
        counts: dict[str, int] = {}
        for task in made.tasks:
            counts[task.split] = counts.get(task.split, 0) + 1
        document = {
            "format": "hpcrl-swe-set-1",
            "settings": msgspec.to_builtins(self._settings),
            "packages": {s.name: {"version": s.package.pinned.version, "digest": s.digest} for s in sources},
            "splits": counts,
        }
        write_json(self._out / "set.json", document)

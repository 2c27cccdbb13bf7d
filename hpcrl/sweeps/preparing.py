"""Preparation of a sweep: each member is prepared as a single run is, and all problems are collected."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.config.joined import load_both
from hpcrl.errors import ConfigError, Finding, RunDirError
from hpcrl.jobplan import absolute_site_paths, default_run_name
from hpcrl.runs.locate import profile_roots, runs_root
from hpcrl.runs.registry import check_name
from hpcrl.submit.prepare import PreparedRun, prepare, try_programs
from hpcrl.submit.start import with_admission
from hpcrl.submit.submission import check_vacant
from hpcrl.sweeps.space import overrides_of, sweep_points
from hpcrl.sweeps.sweep_files import PlannedMember, SweepDir
from hpcrl.sweeps.unmade import unmade_runs

_NUMBERS = ("seed", "algorithm.", "trainer.optimizer.")
"""Keys whose numbers no program of a role reads before it starts: members that differ in them alone are tried once."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of ``hpcrl submit`` that make a sweep; see `hpcrl.sweeps.space.sweep_points`.

    Attributes
    ----------
    max_running:
        Maximum number of members that run at a time; None: one of a local sweep, any number on Slurm.
    """

    grid: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    count: int | None = None
    sample_seed: int = 0
    seeds: int = 1
    max_running: int | None = None

    @property
    def given(self) -> bool:
        """Return whether they ask for more than one run."""
        return bool(self.grid or self.samples or self.count is not None or self.seeds > 1)


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A recipe on a profile, with the options that make a sweep of it.

    Attributes
    ----------
    recipe, cluster, overrides, from_run:
        As of `hpcrl.submit.prepare.prepare`, for all members.
    name:
        Name of the sweep, and beginning of the names of its runs; by default the recipe's name with the time.
    root:
        Only this directory of runs; see `hpcrl.runs.locate.runs_root`.
    queue_anyway:
        Do not ask Slurm whether it could start the members.
    """

    recipe: str
    cluster: str
    overrides: tuple[str, ...]
    options: SweepOptions
    name: str | None = None
    from_run: str | None = None
    root: str | None = None
    queue_anyway: bool = False


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """Members of a sweep as they would be submitted.

    Attributes
    ----------
    name:
        Name of the sweep.
    sweep:
        Its directory.
    members, runs:
        The same runs, once as the sweep records them.
    problems:
        Reasons why the sweep is refused; those that all members share are there once.
    notes:
        Checks that were impossible, a sentence each.
    """

    name: str
    sweep: SweepDir
    members: tuple[PlannedMember, ...]
    runs: tuple[PreparedRun, ...]
    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def uses_slurm(self) -> bool:
        """Return whether members are jobs that Slurm queues."""
        plan = self.runs[0].plan
        return self.runs[0].profile.uses_slurm and plan is not None and bool(plan.layout.components)

    def refuse(self) -> None:
        """Raise ConfigError with all problems where there are any."""
        if self.problems:
            raise ConfigError(self.problems)


def prepare_sweep(request: SweepRequest, *, environ: Mapping[str, str], cwd: Path) -> PreparedSweep:
    """Prepare every member by `hpcrl.submit.prepare.prepare`. Starts and writes nothing.

    Parameters
    ----------
    environ, cwd:
        As of `hpcrl.submit.prepare.prepare`, for all members.

    Raises
    ------
    ConfigError
        The options are wrong, or recipe or profile cannot be read with the values of a member.
    UsageError
        A name cannot be used.
    """
    options = request.options
    loaded, site = load_both(request.recipe, request.cluster, request.overrides, environ=environ)
    named = check_name(request.name or default_run_name(loaded.value, time.time()))
    points = sweep_points(
        grid=options.grid,
        samples=options.samples,
        count=options.count,
        sample_seed=options.sample_seed,
        seeds=options.seeds,
        first_seed=loaded.value.seed,
        fixed=request.overrides,
    )
    members = _members(named, points)
    sweep = SweepDir.below(runs_root(request.root, absolute_site_paths(site.value, cwd)), named)
    left = {run.path for run in unmade_runs(sweep)}
    runs: list[PreparedRun] = []
    problems = _MemberProblems(members, options)
    for member in members:
        try:
            prepared = prepare(
                request.recipe,
                request.cluster,
                [*request.overrides, *overrides_of(member.values)],
                environ=environ,
                cwd=cwd,
                name=member.name,
                root=lambda profile: runs_root(request.root, profile),
                from_run=request.from_run,
                roots=profile_roots if request.root is None else None,
                programs=False,
            )
        except ConfigError as error:
            problems.add(member, error.findings)
            continue
        runs.append(prepared)
        problems.add(member, [*prepared.problems, *([] if sweep.run_of(member).path in left else _taken(prepared))])
    problems.refuse_unreadable(len(runs))
    tried, notes = _try(members, runs, problems, request.queue_anyway)
    return PreparedSweep(
        name=named,
        sweep=sweep,
        members=tuple(members),
        runs=tuple(tried),
        problems=tuple(problems.findings()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _members(name: str, points: Sequence[Mapping[str, str]]) -> list[PlannedMember]:
    if len(points) == 1 and not points[0]:  # one run that only waits
        return [PlannedMember(number=1, name=name)]
    digits = max(2, len(str(len(points))))
    return [
        PlannedMember(number=number, name=check_name(f"{name}-{number:0{digits}d}"), values=dict(values))
        for number, values in enumerate(points, 1)
    ]


def _taken(prepared: PreparedRun) -> list[Finding]:
    """Return the problem that there is a directory of this name."""
    if prepared.plan is None:
        return []
    try:
        check_vacant(prepared.plan.run_dir)
    except RunDirError as error:
        what, _, hint = str(error).partition("\n    hint: ")
        return [Finding("--name", "", what, hint.partition("\n")[0])]
    return []


def _try(
    members: Sequence[PlannedMember], runs: Sequence[PreparedRun], problems: _MemberProblems, queue_anyway: bool
) -> tuple[list[PreparedRun], list[str]]:
    """Try programs of roles, and ask Slurm, once for members that differ in numbers alone which neither reads."""
    tried: dict[str, PreparedRun] = {}
    notes: list[str] = [note for run in runs for note in run.notes]
    results = []
    for member, run in zip(members, runs, strict=True):
        reads = {key: value for key, value in member.values.items() if not _is_plain_number(key, value)}
        # rows of supervised training are counted with the seed
        group = json.dumps([reads, member.number if run.recipe.value.sft is not None else 0], sort_keys=True)
        first = tried.get(group)
        if first is None and run.plan is not None:
            first = try_programs(run)
            first = first if queue_anyway else with_admission(first)
            tried[group] = first
            notes += first.notes
        if first is None:
            results.append(run)
            continue
        problems.add(member, first.problems)
        resolved = first.resolved if first.place.name == member.name else run.resolved
        results.append(replace(run, resolved=resolved, problems=first.problems))
    return results, notes


def _is_plain_number(key: str, value: str) -> bool:
    number = json.loads(value)
    return isinstance(number, int | float) and not isinstance(number, bool) and key.startswith(_NUMBERS)


class _MemberProblems:
    """Collects problems of members, each once with the members that have it."""

    def __init__(self, members: Sequence[PlannedMember], options: SweepOptions) -> None:
        self._members = members
        self._found: dict[Finding, list[int]] = {}
        named = [*(("--grid", each) for each in options.grid), *(("--sample", each) for each in options.samples)]
        self._options = {words.partition("=")[0].strip(): option for option, words in named}

    def add(self, member: PlannedMember, findings: Sequence[Finding]) -> None:
        for each in findings:
            # a member's values are read as settings of --set
            where = self._options.get(each.key, each.where) if each.where == "--set" else each.where
            numbers = self._found.setdefault(replace(each, where=where), [])
            if member.number not in numbers:
                numbers.append(member.number)

    def findings(self) -> list[Finding]:
        """Return all, the members in the text where not all have it."""
        whole = len(self._members)
        return [
            each if len(numbers) == whole else replace(each, what=f"{self._names(numbers)}: {each.what}")
            for each, numbers in self._found.items()
        ]

    def refuse_unreadable(self, readable: int) -> None:
        """Raise what was found where a member could not even be read."""
        if readable < len(self._members):
            raise ConfigError(self.findings())

    def _names(self, numbers: Sequence[int]) -> str:
        names = [member.name for member in self._members if member.number in numbers]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

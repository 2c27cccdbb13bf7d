"""hpcrl for scripts: the functions behind ``hpcrl plan``, ``submit``, ``resume``, ``simulate`` and sweeps.

Recipes, profiles and overrides are given as on the command line; errors are those of `hpcrl.errors`, with the same
sentences. Nothing here imports torch. See docs/python.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.plan import Plan
from hpcrl.errors import UsageError
from hpcrl.planning.calibration.calibration_file import load_site_calibration
from hpcrl.planning.report import Outlook, find_facts, make_outlook
from hpcrl.planning.verdict import Verdict, judge
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.locate import profile_roots, runs_root
from hpcrl.runs.start.resume import ResumeFrom
from hpcrl.simulation import Failures, SimulationResult, durations_from_plan, load_durations, make_scenario
from hpcrl.simulation import simulate as simulate_scenario
from hpcrl.slurm.lookup import look_up
from hpcrl.submit.handle import Run
from hpcrl.submit.prepare import PreparedRun, prepare, try_programs
from hpcrl.submit.resume import resume as resume_run
from hpcrl.submit.start import submit as submit_prepared
from hpcrl.submit.start import with_admission
from hpcrl.sweeps.control import start_sweep
from hpcrl.sweeps.creation import make_sweep
from hpcrl.sweeps.preparing import SweepOptions, SweepRequest, prepare_sweep
from hpcrl.sweeps.sweep_handle import Sweep

__all__ = ["Overrides", "PlannedRun", "Run", "Sweep", "plan", "resume", "simulate", "submit", "submit_sweep"]

Overrides = Sequence[str] | Mapping[str, Any]
"""Changes of a recipe: ``["trainer.steps=10"]`` as of ``--set``, or ``{"trainer.steps": 10}``."""


@dataclass(frozen=True)
class PlannedRun:
    """Result of ``hpcrl plan`` for a recipe on a cluster.

    Attributes
    ----------
    prepared:
        Recipe, profile and every problem that prevents a submit.
    outlook:
        Memory and times.
    verdict:
        Whether it fits.
    """

    prepared: PreparedRun
    outlook: Outlook
    verdict: Verdict

    @property
    def plan(self) -> Plan:
        """Return the resolved plan: groups of roles, their places, commands and limits."""
        return self.prepared.outlined()

    @property
    def starts(self) -> bool:
        """Return whether `submit` would start it; else `problems` says why not."""
        return self.prepared.starts

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the reasons why `submit` refuses the run, one sentence each; empty if it does not refuse."""
        return tuple(f"{each.key}: {each.what}" if each.key else each.what for each in self.prepared.problems)

    @property
    def fits(self) -> bool | None:
        """Return whether memory and nodes suffice; None if unknown."""
        return self.verdict.fits

    @property
    def step_s(self) -> float | None:
        """Return the expected seconds of a step; None without a forecast."""
        return None if self.outlook.loop is None else self.outlook.loop.step_s


def plan(
    recipe: str | Path,
    cluster: str | Path = "local",
    overrides: Overrides = (),
    *,
    calibration: str | Path | None = None,
    programs: bool = True,
) -> PlannedRun:
    """Plan a run: whether it fits, how long a step takes, and whether `submit` would start it. Changes nothing.

    Parameters
    ----------
    recipe, cluster:
        Names or files.
    calibration:
        A file of ``hpcrl plan calibrate``; the shipped one by default.
    programs:
        Also try interpreters, packages and environments, and ask Slurm. Without that ``starts`` covers less than
        `submit` checks.

    Raises
    ------
    ConfigError
        Recipe or profile cannot be read, or rules do not hold.
    DoesNotFitError
        The site has fewer nodes.
    """
    prepared = _prepared(recipe, cluster, overrides, programs=False)
    prepared.refuse_forecast()
    value, site = prepared.recipe.value, prepared.site.value
    facts = find_facts(value)
    outlook = make_outlook(value, site, load_site_calibration(site, calibration), facts)
    if programs:
        prepared = with_admission(try_programs(prepared))
    return PlannedRun(prepared, outlook, judge(outlook, facts))


def submit(
    recipe: str | Path,
    cluster: str | Path = "local",
    overrides: Overrides = (),
    *,
    name: str | None = None,
    from_run: str | None = None,
    root: str | Path | None = None,
    queue_anyway: bool = False,
) -> Run:
    """Start a run and return it at once; it continues when the script ends.

    Parameters
    ----------
    name:
        Name of the run; by default the recipe's name with the time.
    from_run:
        ``RUN``, ``RUN@STEP`` or ``RUN@vN``, whose weights it begins with.
    root:
        Directory of runs; by default that of ``HPCRL_RUNS_ROOT`` or the profile.
    queue_anyway:
        Submit even if Slurm could not start the job now.

    Raises
    ------
    ConfigError
        ``hpcrl submit`` would refuse it, with every problem. Nothing was written.
    RunDirError
        There is a run of this name.
    UsageError
        Slurm could not start it.
    hpcrl.slurm.errors.SlurmError
        Slurm does not answer, or refuses a job.
    """
    set_job_query(look_up)
    given = None if root is None else str(root)
    prepared = _prepared(recipe, cluster, overrides, name=name, from_run=from_run, root=given)
    started = submit_prepared(prepared, from_run=from_run, queue_anyway=queue_anyway)
    return Run(started.path)


def submit_sweep(
    recipe: str | Path,
    cluster: str | Path = "local",
    overrides: Overrides = (),
    *,
    grid: Sequence[str] | Mapping[str, Sequence[Any]] = (),
    samples: Sequence[str] | Mapping[str, str] = (),
    count: int | None = None,
    sample_seed: int = 0,
    seeds: int = 1,
    max_running: int | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    after: Sequence[Run] = (),
    from_run: str | None = None,
    root: str | Path | None = None,
    queue_anyway: bool = False,
) -> Sweep:
    """Start a sweep, a run for each setting, and return it at once; it continues when the script ends.

    Parameters
    ----------
    grid:
        ``{"trainer.optimizer.learning_rate": [1e-6, 3e-6]}``, or texts as of ``--grid``.
    samples, count, sample_seed:
        ``{"trainer.optimizer.learning_rate": "loguniform(1e-6, 1e-4)"}``, or texts as of ``--sample``; how many points
        to draw; another seed draws others.
    seeds:
        Replicates of each setting.
    max_running:
        Maximum number of members that run at a time; None: one of a local sweep, any number on Slurm.
    tags, after:
        Tags of the members in addition to the name of the sweep; runs whose end they wait for.
    name, from_run, root, queue_anyway:
        As of `submit`; ``name`` is that of the sweep, and the beginning of the names of its runs.

    Raises
    ------
    ConfigError
        ``hpcrl submit`` would refuse members, with every problem. Nothing was written.
    RunDirError
        There is a sweep or a run of this name, or members could not be handed to Slurm, which stay in the queue.
    UsageError
        It asks for one run alone, or for too many.
    """
    set_job_query(look_up)
    options = SweepOptions(
        grid=tuple(_texts(grid, lambda values: ",".join(json.dumps(value, default=str) for value in values))),
        samples=tuple(_texts(samples, str)),
        count=count,
        sample_seed=sample_seed,
        seeds=seeds,
        max_running=max_running,
    )
    if not options.given:
        raise UsageError("a sweep needs a grid, samples or several seeds\n    hint: hpcrl.api.submit starts one run")
    request = SweepRequest(
        recipe=str(recipe),
        cluster=str(cluster),
        overrides=tuple(_settings(overrides)),
        options=options,
        name=name,
        from_run=from_run,
        root=None if root is None else str(root),
        queue_anyway=queue_anyway,
    )
    prepared = prepare_sweep(request, environ=os.environ, cwd=Path.cwd())
    prepared.refuse()
    before = [run.directory for run in after]
    made = make_sweep(prepared, max_running=max_running, tags=tags, after=before, from_run=from_run)
    start_sweep(made, lambda words: None)
    return Sweep(made.path)


def resume(
    run: Run | str | Path,
    overrides: Overrides = (),
    *,
    from_step: int | None = None,
    from_scratch: bool = False,
    accept_changes: bool = False,
    root: str | Path | None = None,
) -> Run:
    """Start the next attempt of a run that has ended, from its newest good checkpoint.

    Parameters
    ----------
    overrides:
        Changes of its recipe.
    from_step, from_scratch, accept_changes:
        See ``hpcrl resume``.
    root:
        Only this directory of runs.

    Raises
    ------
    RunDirError
        The run is alive, or there is nothing to do. Nothing was changed.
    NothingToRestoreError
        It has checkpoints, and none can be restored.
    ConfigError
        The changes are wrong, or the attempt would not start.
    """
    found = run if isinstance(run, Run) else Run(run, root=root)
    begin = ResumeFrom(scratch=from_scratch, step=from_step)
    resume_run(found.directory, begin, _settings(overrides), accept_changes=accept_changes)
    return found


def simulate(
    recipe: str | Path,
    cluster: str | Path = "local",
    overrides: Overrides = (),
    *,
    durations: str | Path | None = None,
    calibration: str | Path | None = None,
    nodes: int | None = None,
    days: float = 1.0,
    seed: int = 0,
    mtbf_h: float | None = None,
    sample: int | None = None,
) -> SimulationResult:
    """Simulate the asynchronous loop of a recipe. Changes nothing.

    Parameters
    ----------
    durations:
        A file with how long things take (docs/simulation.md); by default what the planner predicts.
    calibration:
        Calibration of the prediction; the shipped file by default.
    nodes:
        Another size; roles and batch grow in proportion.
    days:
        Simulated time.
    mtbf_h:
        Mean hours between failures of one node; None: no failures.
    sample:
        Engines to simulate, 0 for all; by default as many as take about a minute.

    Raises
    ------
    ConfigError
        Recipe or profile cannot be read, or rules do not hold.
    UsageError
        The planner has no times for this recipe on this cluster.
    """
    prepared = _prepared(recipe, cluster, overrides, programs=False)
    prepared.refuse_forecast()
    value, site = prepared.recipe.value, prepared.site.value
    if value.sft is not None:
        raise UsageError("a supervised run (sft) has a trainer alone: there are no rollouts to simulate")
    if mtbf_h is not None and not mtbf_h > 0:
        raise UsageError(f"mtbf_h is {mtbf_h}: it must be a positive number")
    if durations is not None:
        find_facts(value)
        lasting = load_durations(Path(durations))
    else:
        lasting = durations_from_plan(value, site, load_site_calibration(site, calibration))
    failures = Failures(mtbf_h=mtbf_h)
    return simulate_scenario(
        make_scenario(value, site, lasting, nodes=nodes, days=days, seed=seed, failures=failures, sample=sample)
    )


def _prepared(
    recipe: str | Path,
    cluster: str | Path,
    overrides: Overrides,
    *,
    name: str | None = None,
    from_run: str | None = None,
    root: str | None = None,
    programs: bool = True,
) -> PreparedRun:
    return prepare(
        str(recipe),
        str(cluster),
        _settings(overrides),
        environ=os.environ,
        cwd=Path.cwd(),
        name=name,
        root=lambda profile: runs_root(root, profile),
        from_run=from_run,
        roots=profile_roots if root is None else None,
        programs=programs,
    )


def _settings(overrides: Overrides) -> list[str]:
    """Return overrides as ``--set`` takes them; values of a mapping are written as JSON, which is YAML."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def _texts(given: Sequence[str] | Mapping[str, Any], written: Callable[[Any], str]) -> list[str]:
    """Return texts of the form ``KEY=VALUE``, of a mapping with its values as ``written``."""
    return [f"{key}={written(value)}" for key, value in given.items()] if isinstance(given, Mapping) else list(given)

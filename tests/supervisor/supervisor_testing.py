"""Runs of stand-in roles through submitit, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import patience

from hpcrl.config.cluster import LocalCluster, PathsConfig
from hpcrl.config.layout import AttemptPolicy
from hpcrl.config.plan import FileProbe, HttpProbe, Plan, Role, RoleGroup, RolePolicy, WatchPolicy
from hpcrl.config.recipe import ModelConfig, Recipe, TrainerConfig, WordsEnv
from hpcrl.processes import procfs
from hpcrl.runs.contents import RunContents
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.submit.submission import create_run, submit_attempt

STAND_INS = str(Path(__file__).with_name("stand_ins.py"))
#: seconds from a fault to the end of the run, on a machine that is not busy
LIMIT_S = 10.0


def command(behaviour: str, *more: str) -> tuple[str, ...]:
    return ("{python}", "-S", STAND_INS, behaviour, "{host}", "{port}", *more)


def make_plan(
    run_dir: Path,
    *,
    engine: str = "serve",
    servers: int = 0,
    trainer: str = "work",
    replicas: int = 1,
    start_timeout_s: float = 120.0,
    stop_timeout_s: float = 0.5,
    time_limit_s: float = 1200.0,
    engine_policy: Mapping[str, Any] | None = None,
    watch: WatchPolicy | None = None,
    attempts: AttemptPolicy | None = None,
) -> Plan:
    """Engines that serve, and a trainer that starts after them and ends the run.

    ``servers`` is how many each engine has; 0 where it is a single process.
    """
    policy = {"stop_timeout_s": stop_timeout_s}
    return Plan(
        run=run_dir.name,
        recipe="stand-ins",
        cluster="local",
        run_dir=run_dir,
        groups=(
            RoleGroup(
                role=Role.ENGINE,
                replicas=replicas,
                ranks=max(1, servers),
                servers_per_node=servers,
                ports=max(1, servers),
                command=command(engine),
                ready=HttpProbe(path="/health"),
                start_timeout_s=start_timeout_s,
                policy=RolePolicy(drain_order=1, **policy, **(engine_policy or {})),
            ),
            RoleGroup(
                role=Role.TRAINER,
                replicas=1,
                ranks=1,
                command=command(trainer),
                after=(Role.ENGINE,),
                ready=FileProbe(),
                start_timeout_s=start_timeout_s,
                policy=RolePolicy(ends_run=True, drain_order=0, **policy),
            ),
        ),
        first_port=21000,
        last_port=29999,
        time_limit_s=time_limit_s,
        watch=watch or WatchPolicy(),
        attempts=attempts or AttemptPolicy(),
    )


def make_recipe() -> Recipe:
    return Recipe(
        name="stand-ins",
        model=ModelConfig(path="/nowhere"),
        environments=(WordsEnv(name="words", kind="words"),),
        trainer=TrainerConfig(steps=10),
    )


def make_cluster() -> LocalCluster:
    return LocalCluster(name="local", kind="local", paths=PathsConfig(runs_root="runs"))


def create(root: Path, name: str = "run-1", **changes: object) -> RunDir:
    """A run directory, nothing started."""
    root.mkdir(parents=True, exist_ok=True)
    return create_run(make_recipe(), make_cluster(), make_plan(root / name, **changes)).run  # type: ignore[arg-type]


def start(root: Path, name: str = "run-1", **changes: object) -> RunDir:
    """A submitted run."""
    run = create(root, name, **changes)
    submit_attempt(RunContents.read(run))
    return run


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    patience.wait_for(condition, timeout_s, what, every_s=0.02)


def wait_running(run: RunDir) -> RunView:
    wait_for(lambda: observe(run).state not in (RunState.SUBMITTED, RunState.STARTING), 60, "the run to start")
    view = observe(run)
    assert view.state is RunState.RUNNING, view
    return view


def wait_ended(run: RunDir, limit_s: float = LIMIT_S + 20, *, marked_only: bool = False) -> RunView:
    """Wait until the run has ended and nothing of it is left; return the last state."""
    wait_for(lambda: observe(run).state.ended, limit_s, "the run to end")
    wait_for(lambda: not processes_of(run, marked_only=marked_only), LIMIT_S, f"the end of {processes_of(run)}")
    return observe(run)


def processes_of(run: RunDir, *, marked_only: bool = False) -> list[tuple[int, str]]:
    """Every living process that carries the run's mark, or was started by one that did."""
    run_id = RunRecord.read(run).run_id
    found = procfs.with_environ("HPCRL_RUN_ID", run_id)
    if not marked_only:
        found += procfs.with_environ("ESCAPEE_OF", run_id)
    return [(process.pid, _command_line(process.pid)) for process in found if process.pid != os.getpid()]


def end_everything(run: RunDir) -> None:
    """What a test that failed, or that killed all cleaners, has left."""
    for pid, _ in processes_of(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""

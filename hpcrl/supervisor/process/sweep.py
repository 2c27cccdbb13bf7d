"""Finding and ending what an attempt left behind on this machine: by the run's mark in the environment."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import KIND_VARIABLE, LAUNCH_DIR_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrl.runs.copies import belongs_elsewhere
from hpcrl.storage.shm_directories import remove_dead
from hpcrl.supervisor.process.guard import end_processes

_GRACE_S = 1.0


def find_leftovers(
    run_id: str, *, kinds: tuple[str, ...] = ("role", "guard"), run_dir: Path | None = None
) -> list[procfs.Process]:
    """Return guards and roles of a run that are alive on this machine, except this process and its ancestors.

    With ``run_dir`` none of a copy of the run, nor of the run that this one is a copy of.
    """
    spared = {os.getpid(), *procfs.ancestors(os.getpid())}
    found = []
    for process in procfs.with_environ(RUN_ID_VARIABLE, run_id):
        environ = procfs.read_environ(process.pid)
        place = environ.get(RUN_DIR_VARIABLE) or environ.get(LAUNCH_DIR_VARIABLE, "")
        elsewhere = run_dir is not None and belongs_elsewhere(place, run_dir)
        if process.pid not in spared and environ.get(KIND_VARIABLE) in kinds and not elsewhere:
            found.append(process)
    return found


def sweep(run_id: str, *, run_dir: Path | None = None) -> list[procfs.Process]:
    """End all guards and roles of a run; returns what was found. Blocks for up to the grace and a moment.

    For use when no attempt of the run is alive, or by its supervisor after the guards are gone. ``run_dir``: see
    `find_leftovers`.
    """
    found = find_leftovers(run_id, run_dir=run_dir)
    if found:
        end_processes(
            lambda: find_leftovers(run_id, run_dir=run_dir),
            kill_at=time.monotonic() + _GRACE_S,
            between=lambda: reap(found),
        )
    remove_dead()  # guards do it, but they may have been killed
    return found


def end_orphans(run_id: str, guards: Collection[int]) -> list[procfs.Process]:
    """Kill processes without a guard as ancestor: adopted orphans, and those with the mark of the run.

    Return them. ``guards`` are the pids of running guards, which end their own processes.
    """

    def sheltered(process: procfs.Process) -> bool:
        return process.pid in guards or any(pid in guards for pid in procfs.ancestors(process.pid))

    def find() -> list[procfs.Process]:
        candidates = {process.pid: process for process in procfs.descendants(os.getpid())}
        candidates.update((process.pid, process) for process in find_leftovers(run_id))
        return [process for process in candidates.values() if not sheltered(process)]

    orphans = find()
    end_processes(find, kill_at=time.monotonic(), between=lambda: reap(orphans))
    reap(orphans)
    return orphans


def reap(processes: list[procfs.Process]) -> None:
    """Reap those of the processes that are dead children of this one, which adopts orphans."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)

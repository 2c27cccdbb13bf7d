"""Stages of a first run: their inputs, their results, and their errors."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl import __version__
from hpcrl.bringup.records import FirstRunState, StageStatus
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import Loaded, load_cluster
from hpcrl.config.resources import list_clusters
from hpcrl.config.runs_root import resolve_runs_root
from hpcrl.errors import HpcrlError
from hpcrl.sites.profile_check import CheckFinding, Severity
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.reach import reachable_slurm


class StageStoppedError(HpcrlError):
    """A stage found something that is wrong.

    Attributes
    ----------
    commands:
        Commands to call before the first run continues; may be empty where the hints of the message say it.
    facts:
        Facts that were found nevertheless.
    """

    def __init__(self, message: str, *, commands: Sequence[str] = (), facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.commands = tuple(commands)
        self.facts = dict(facts or {})


@dataclass(frozen=True, kw_only=True)
class FirstRunRequest:
    """Options of the command ``first-run``.

    Attributes
    ----------
    cluster:
        Name or file of the profile.
    directory:
        Absolute path of the directory for state, recipe and report.
    cwd:
        Directory to which relative paths refer.
    environ:
        Variables of the shell.
    runs_root, fabric, python, vllm_python:
        Values for the draft of a profile that does not exist yet.
    nodes:
        Nodes of the job of ``check-job``.
    wait_s:
        Maximum time in the queue of each job, in seconds.
    command, draft_options:
        The command line that continues this first run, and the options that it also needs before the profile exists.
    """

    cluster: str
    directory: Path
    cwd: Path
    environ: Mapping[str, str]
    runs_root: str | None = None
    fabric: str | None = None
    python: str | None = None
    vllm_python: str | None = None
    nodes: int = 2
    wait_s: float = 1800.0
    command: str = "hpcrl site first-run"
    draft_options: str = ""

    @property
    def is_file(self) -> bool:
        """Return whether the profile was named by its file."""
        return Path(self.cluster).suffix in (".yaml", ".yml") or os.sep in self.cluster

    @property
    def is_there(self) -> bool:
        """Return whether there is a profile of this name; a file may be missing."""
        return self.is_file or self.cluster in list_clusters()

    @property
    def way_on(self) -> str:
        """Return the command line that continues this first run."""
        return self.command if self.is_there or not self.draft_options else f"{self.command} {self.draft_options}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Findings of a stage that passed.

    Attributes
    ----------
    summary:
        Result in one line.
    warnings:
        Findings that need attention, one sentence each. With at least one, the stage has the status ``warning``.
    facts:
        See `hpcrl.bringup.records.StageRecord`.
    """

    summary: str
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> StageStatus:
        """Return ``warning`` where the stage has warnings, else ``passed``."""
        return StageStatus.WARNING if self.warnings else StageStatus.OK


class SiteBench:
    """Inputs and state that the stages share.

    Attributes
    ----------
    request:
        Options of the command.
    state:
        Results of earlier stages; written by `keep`.
    profile_file:
        File of the profile, once it was read; before that the argument of the command.
    """

    def __init__(self, request: FirstRunRequest, state: FirstRunState, say: Callable[[str], None]) -> None:
        self.request = request
        self.state = state
        self.say = say
        self.profile_file = request.cluster

    @property
    def client(self) -> SlurmClient:
        """Return the Slurm of this shell, whose controller answers (UsageError otherwise)."""
        return reachable_slurm()

    def profile(self) -> Loaded[SlurmCluster]:
        """Return the profile as it is now (ConfigError, StageStoppedError where it cannot be used)."""
        loaded = load_slurm_profile(self.profile_file)
        # later reads take the file, so that the place where a name was found is logged once
        self.profile_file = str(loaded.source)
        return loaded

    def runs_root(self, cluster: SlurmCluster) -> Path:
        """Return the directory of runs, absolute."""
        return resolve_runs_root(cluster.paths.runs_root, self.request.cwd)

    def facts(self, stage: str) -> dict[str, Any]:
        """Return what an earlier stage found; empty where it has not passed."""
        record = self.state.stages.get(stage)
        return record.facts if record is not None and record.status.passed else {}

    def keep(self) -> None:
        """Write the state."""
        self.state.write(self.request.directory)


@dataclass(frozen=True, kw_only=True)
class BringupStage:
    """One stage.

    Attributes
    ----------
    name:
        As ``--from`` takes it.
    what:
        Description for people.
    run:
        Does it. Raises HpcrlError where something is wrong.
    limit_s:
        Maximum time in seconds, without the time in a queue.
    queues:
        Number of jobs that it submits, each of which may wait in the queue for ``wait_s`` of the request.
    inputs:
        Inputs other than the profile, as JSON; a stage that passed is not run again while they are the same.
        None: it is quick, and always runs.
    """

    name: str
    what: str
    run: Callable[[SiteBench], Outcome]
    limit_s: float
    queues: Callable[[SiteBench], int] = lambda bench: 0
    inputs: Callable[[SiteBench], Any] | None = None

    def most_s(self, bench: SiteBench) -> float:
        """Return its maximum time with that in queues, in seconds."""
        return self.limit_s + self.queues(bench) * bench.request.wait_s

    def digest(self, bench: SiteBench, profile: str) -> str:
        """Return the SHA-256 of what it depends on; empty where it always runs."""
        if self.inputs is None:
            return ""
        inputs = [self.name, __version__, profile, self.inputs(bench)]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def load_slurm_profile(name: str) -> Loaded[SlurmCluster]:
    """Load a profile of a Slurm site.

    Raises
    ------
    ConfigError
        It is not there, or has values that cannot be used.
    StageStoppedError
        It describes a machine without Slurm.
    """
    loaded: Loaded[Any] = load_cluster(name)
    if not isinstance(loaded.value, SlurmCluster):
        raise StageStoppedError(
            f"{loaded.source} is of a machine without Slurm (kind: {loaded.value.kind})",
            commands=["hpcrl submit quickstart --follow    # the loop on this machine"],
        )
    return loaded


def finding_text(finding: CheckFinding, where: str) -> str:
    """Return a finding of a check as two lines."""
    return f"{where}: {finding.key}: {finding.what} [{finding.code}]\n    hint: {finding.hint}"


def stop_at_errors(
    loaded: Loaded[SlurmCluster], found: Sequence[CheckFinding], facts: Mapping[str, Any], command: str
) -> tuple[str, ...]:
    """Return the warnings among findings (StageStoppedError with the errors, where there are any).

    Parameters
    ----------
    command:
        Command that reports the same findings.
    """
    errors = [each for each in found if each.severity is Severity.ERROR]
    if errors:
        text = "\n".join(f"  {finding_text(each, loaded.where(each.key))}" for each in errors)
        plural = "error" if len(errors) == 1 else "errors"
        again = f"{command}    # the same errors, with warnings and notes"
        raise StageStoppedError(f"{len(errors)} {plural}\n{text}", commands=[again], facts=facts)
    return tuple(finding_text(each, loaded.where(each.key)) for each in found if each.severity is Severity.WARNING)


def quoted(*words: str | Path) -> str:
    """Return words as a shell reads them."""
    return shlex.join(map(str, words))

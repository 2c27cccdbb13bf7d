"""The run directory: where everything of a run lies. The layout is a contract between all roles.

::

    <runs root>/<run>/
      recipe.yaml  cluster.yaml  plan.json    as resolved at submit
      run.json                                ids and provenance; written by submit and resume
      start-model/                            weights of another run that this one began with (submit --from)
      token                                   who has it is answered by the servers of the run (hpcrl.credentials)
      snapshots/0001/                         hpcrl, Python, packages and environment modules at each submit and resume
      restart.json                            where the next attempts begin; written by resume
      status.json                             state of the run and its roles; written by the supervisor
      metrics/<attempt>.jsonl                 one line an optimizer step; written by trainer rank 0
      events/<attempt>-<writer>.jsonl         what happened; one file a writer, merged by readers
      attempts/0001/endpoints.json            ports of this attempt
      attempts/0001/restore.json              the checkpoint it begins with; written by the trainer
      attempts/0001/save_requested.json       the supervisor wants a checkpoint; save_answered.json: it is there
      attempts/0001/ready/                    ready files of roles
      attempts/0001/failures/                 what roles say about their own failure
      attempts/0001/progress/                 what roles say about their progress
      attempts/0001/complaints/               engines that the orchestrator cannot use
      attempts/0001/dumps/                    stacks of roles that hung
      attempts/0001/logs/<role>/<replica>-<rank>.log
      excluded_nodes.json                     nodes that later attempts avoid; written by the supervisor
      attempts/latest                         symbolic link to the newest attempt
      submitit/                               pickles and logs of submitit and the supervisor
      weights/v000012/                        hand-offs
      checkpoints/step-000010/                joint checkpoints
      sft/                                    conversations of a supervised run as tokens; written by trainer rank 0
      rollouts/                               consumed rollouts, for people
      rollouts/ledger/  rollouts/payload/     what became of each finished rollout, and its arrays
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from hpcrl import lost_answers
from hpcrl.config.earlier import cluster_of_today
from hpcrl.credentials import ensure_token
from hpcrl.decoding import prepared
from hpcrl.errors import RunDirError
from hpcrl.fs import atomic_write, fsync_dir, make_directory

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe

__all__ = ["RunDir"]


class PlanNames(msgspec.Struct, frozen=True):
    """Names of the recipe and of the cluster profile that a plan was made of, and of the directory it was made for."""

    recipe: str
    cluster: str
    run_dir: str = ""


class RunDir:
    """Paths and resolved configuration of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record_path(self) -> Path:
        return self.path / "run.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def restart_path(self) -> Path:
        return self.path / "restart.json"

    @property
    def snapshots_dir(self) -> Path:
        return self.path / "snapshots"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def cluster_path(self) -> Path:
        return self.path / "cluster.yaml"

    @property
    def metrics_dir(self) -> Path:
        return self.path / "metrics"

    @property
    def metrics_path(self) -> Path:
        """Where runs of an earlier version have the records of all attempts."""
        return self.path / "metrics.jsonl"

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    @property
    def weights_dir(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    def attempt_dir(self, attempt: int) -> Path:
        return self.attempts_dir / f"{attempt:04d}"

    def attempts(self) -> list[int]:
        """Numbers of the attempts so far, ascending."""
        try:
            names = os.listdir(self.attempts_dir)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def log_path(self, attempt: int, role: str, replica: int, rank: int = 0) -> Path:
        return self.attempt_dir(attempt) / "logs" / role / f"{replica}-{rank}.log"

    def start_attempt(self) -> int:
        """Make the directory of the next attempt, point ``latest`` to it, and return its number.

        The directory survives a power failure: with a lower number than that of an attempt before it, the next one
        would be refused by the fence of every store.

        Raises
        ------
        OSError
            The filesystem refuses; there is no attempt.
        """
        make_directory(self.attempts_dir)
        number = (self.attempts() or [0])[-1] + 1
        path = self.attempt_dir(number)
        path.mkdir()
        try:
            for part in ("ready", "failures", "logs"):
                lost_answers.make_own_directory(path / part)
            ensure_token(self.path)  # of a run that was made before there were tokens
            link = self.attempts_dir / f".latest-{number}"
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            lost_answers.replace(link, self.attempts_dir / "latest")
            fsync_dir(self.attempts_dir)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)  # no attempt: the next try has its number
            raise
        return number

    def write_configuration(self, recipe: Recipe, cluster: ClusterProfile, plan: Plan) -> None:
        """Write what was resolved at submit."""
        for path, model in ((self.recipe_path, recipe), (self.cluster_path, cluster)):
            text = yaml.safe_dump(model.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
            atomic_write(path, text.encode())
        atomic_write(self.plan_path, plan.model_dump_json(indent=2).encode() + b"\n")

    def recipe(self) -> Recipe:
        """The resolved recipe (RunDirError where it cannot be read)."""
        from hpcrl.config.recipe import Recipe  # noqa: PLC0415 - not for lists of many runs

        return Recipe.model_validate_json(json.dumps(self._yaml(self.recipe_path)))

    def cluster(self) -> ClusterProfile:
        """The resolved cluster profile (RunDirError where it cannot be read)."""
        from hpcrl.config.cluster import cluster_from_json  # noqa: PLC0415 - not for lists of many runs

        return cluster_from_json(json.dumps(cluster_of_today(self._yaml(self.cluster_path))))

    def names(self) -> PlanNames:
        """What the plan is of, without checking all of it, for lists of many runs (RunDirError as `plan`)."""
        try:
            return msgspec.json.decode(self.plan_path.read_bytes(), type=prepared(PlanNames))
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is no run directory: it has no {self.plan_path.name}") from error
        except msgspec.DecodeError as error:
            raise RunDirError(f"{self.plan_path} cannot be read: {error}") from error

    def plan(self) -> Plan:
        """The plan (RunDirError where it cannot be read)."""
        from hpcrl.config.plan import Plan  # noqa: PLC0415 - not for lists of many runs

        try:
            return Plan.model_validate_json(self.plan_path.read_bytes())
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is no run directory: it has no {self.plan_path.name}") from error

    def _yaml(self, path: Path) -> object:
        try:
            return yaml.safe_load(path.read_bytes())
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is no run directory: it has no {path.name}") from error

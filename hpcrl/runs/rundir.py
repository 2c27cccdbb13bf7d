"""Run directory: the paths of all files of a run. The layout is a contract between all roles.

::

    <runs root>/<run>/
      recipe.yaml  cluster.yaml  plan.json    as resolved at submit
      run.json                                ids and provenance; written by submit and resume
      start-model/                            weights of another run that this one began with (submit --from)
      token                                   shared secret of the run's servers and clients (hpcrl.network.credentials)
      snapshots/0001/                         hpcrl, Python, packages and environment modules at each submit and resume
      restart.json                            where the next attempts begin; written by resume
      status.json                             state of the run and its roles; written by the supervisor
      metrics/<attempt>.jsonl                 one line an optimizer step; written by trainer rank 0, continued in
                                              <attempt>-0002.jsonl and so on (hpcrl.runs.metrics_files)
      events/<attempt>-<writer>.jsonl         events; one file per writer, merged by readers
      attempts/0001/endpoints.json            ports of this attempt
      attempts/0001/restore.json              the checkpoint it begins with; written by the trainer
      attempts/0001/save_requested.json       request of the supervisor for a checkpoint; save_answered.json
      attempts/0001/ready/                    ready files of roles
      attempts/0001/failures/                 failure records of roles
      attempts/0001/progress/                 progress of roles
      attempts/0001/complaints/               engines that the orchestrator cannot use
      attempts/0001/router_leaves_out.json    engines that a router of prefill and decode is started without
      attempts/0001/dumps/                    stacks of roles that hung
      attempts/0001/profile-trainer-3.json    request to profile a rank (hpcrl.runs.profile_request)
      attempts/0001/profiles/                 what `hpcrl profile` recorded
      attempts/0001/logs/<role>/<replica>-<rank>.log
      excluded_nodes.json                     nodes that later attempts avoid; written by the supervisor
      attempts/latest                         symbolic link to the newest attempt
      sinks/                                  logs and positions of metric sinks, log of the notifiers
      sinks/notices/<notifier>/               what became of each message
      submitit/                               pickles and logs of submitit and the supervisor
      weights/v000012/                        hand-offs
      checkpoints/step-000010/                joint checkpoints
      sft/                                    conversations of a supervised run as tokens; written by trainer rank 0
      rollouts/                               consumed rollouts, for people
      rollouts/ledger/  rollouts/payload/     outcome of each finished rollout, and its arrays; files of outcomes that
                                              have ended are compressed (hpcrl.dock.ledger.sealer)
      rollouts/ratios/                        log-ratios of tokens of a few rollouts; written by trainer rank 0
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from hpcrl.config.earlier import SCHEMA, FileKind, read_earlier, take_schema
from hpcrl.errors import RunDirError
from hpcrl.network.credentials import ensure_token
from hpcrl.storage import lost_replies
from hpcrl.storage.files import atomic_write, fsync_dir, make_directory
from hpcrl.storage.msgspec_types import prepared

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe

_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader in C, which is seven times faster; in Python where PyYAML was built without it."""


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
    def is_own(self) -> bool:
        """Return whether this user wrote the files that name programs of the run; those of others are not started."""
        paths = (self.path, self.plan_path, self.recipe_path, self.cluster_path)
        return all(path.stat().st_uid == os.geteuid() for path in paths)

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
        """Return the path of the records of all attempts of runs of an earlier version."""
        return self.path / "metrics.jsonl"

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    @property
    def sinks_dir(self) -> Path:
        return self.path / "sinks"

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
        """Return the numbers of the attempts so far, ascending."""
        try:
            names = os.listdir(self.attempts_dir)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def log_path(self, attempt: int, role: str, replica: int, rank: int = 0) -> Path:
        return self.attempt_dir(attempt) / "logs" / role / f"{replica}-{rank}.log"

    def start_attempt(self) -> int:
        """Make the directory of the next attempt, point ``latest`` to it, and return its number.

        The directory is durable across a power failure: an attempt with a lower number than an earlier one would be
        refused by the fence of every store.

        Raises
        ------
        OSError
            The filesystem refuses; the attempt does not exist.
        """
        make_directory(self.attempts_dir)
        number = (self.attempts() or [0])[-1] + 1
        path = self.attempt_dir(number)
        path.mkdir()
        try:
            for part in ("ready", "failures", "logs"):
                lost_replies.make_own_directory(path / part)
            ensure_token(self.path)  # the run may have been made by a version without tokens
            link = self.attempts_dir / f".latest-{number}"
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            lost_replies.replace(link, self.attempts_dir / "latest")
            fsync_dir(self.attempts_dir)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)  # not an attempt: the next one gets its number
            raise
        return number

    def write_configuration(self, recipe: Recipe, cluster: ClusterProfile, plan: Plan) -> None:
        """Write the configuration as resolved at submit."""
        for path, model in ((self.recipe_path, recipe), (self.cluster_path, cluster)):
            tree = {"schema": SCHEMA, **model.model_dump(mode="json")}
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
            atomic_write(path, text.encode())
        atomic_write(self.plan_path, plan.model_dump_json(indent=2).encode() + b"\n")

    def recipe(self) -> Recipe:
        """Return the resolved recipe.

        Raises
        ------
        RunDirError
            The recipe cannot be read.
        """
        from hpcrl.config.recipe import Recipe  # noqa: PLC0415 - not for lists of many runs

        return Recipe.model_validate_json(json.dumps(self.recipe_tree()))

    def recipe_tree(self) -> object:
        """Return the tree of the resolved recipe without validating it, for commands that need few of its values.

        Raises
        ------
        RunDirError
            As in `recipe`.
        """
        return self._yaml(self.recipe_path, "recipe")

    def cluster(self) -> ClusterProfile:
        """Return the resolved cluster profile.

        Raises
        ------
        RunDirError
            The profile cannot be read.
        """
        from hpcrl.config.cluster import cluster_from_json  # noqa: PLC0415 - not for lists of many runs

        return cluster_from_json(json.dumps(self._yaml(self.cluster_path, "cluster profile")))

    def names(self) -> PlanNames:
        """Return the names in the plan without validating all of it, for lists of many runs.

        Raises
        ------
        RunDirError
            As in `plan`.
        """
        try:
            return msgspec.json.decode(self.plan_path.read_bytes(), type=prepared(PlanNames))
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is not a run directory: it has no {self.plan_path.name}") from error
        except msgspec.DecodeError as error:
            raise RunDirError(f"{self.plan_path} cannot be read: {error}") from error

    def plan(self) -> Plan:
        """Return the plan.

        Raises
        ------
        RunDirError
            The plan cannot be read.
        """
        from hpcrl.config.plan import Plan  # noqa: PLC0415 - not for lists of many runs

        try:
            return Plan.model_validate_json(self.plan_path.read_bytes())
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is not a run directory: it has no {self.plan_path.name}") from error

    def _yaml(self, path: Path, kind: FileKind) -> object:
        """Return the tree of a resolved file in the current form."""
        try:
            tree = yaml.load(path.read_bytes(), Loader=_YamlLoader)
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is not a run directory: it has no {path.name}") from error
        if isinstance(tree, dict) and take_schema(tree, str(path)) is None:
            read_earlier(kind, tree)
        return tree

"""Start a run from the weights of another one: ``hpcrl submit RECIPE --from RUN[@STEP|@vVERSION]``.

The new run gets a start model of its own, ``start-model/`` in its directory: the weights of a joint checkpoint, or a
full version. Optimizer, random state, data order and counters are new.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.errors import CheckpointError, HandoffError, RunFailedError, UsageError
from hpcrl.runs.record import Origin, RunRecord
from hpcrl.runs.registry import Roots, find_run, reference
from hpcrl.runs.rundir import RunDir
from hpcrl.storage import lost_replies
from hpcrl.storage.files import fsync_dir
from hpcrl.weights.format.manifest import MANIFEST, Handoff
from hpcrl.weights.read.announced import announced_versions
from hpcrl.weights.store import HandoffStore

START_MODEL = "start-model"
_WANTED = re.compile(r"(?P<run>.+?)(?:@(?:(?P<step>\d+)|v(?P<version>\d+)))?")


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a start model.

    Attributes
    ----------
    origin:
        Origin for the record of the new run.
    run:
        The other run.
    config_dir:
        A directory with the model's configuration and tokenizer.
    """

    origin: Origin
    run: RunDir
    config_dir: Path


def find_source(text: str, root: Path, roots: Roots | None = None) -> ModelOrigin:
    """Return the checkpoint or version ``text``: ``RUN`` (its newest checkpoint), ``RUN@STEP`` or ``RUN@vVERSION``.

    Sizes of files are compared; data is read when the start model is made. `hpcrl.runs.registry.find_run` searches the
    run.

    Raises
    ------
    UsageError
        The run, checkpoint or version does not exist, or does not suffice for a model; the message has a hint.
    """
    match = _WANTED.fullmatch(text)
    if match is None:
        raise UsageError(f"--from {text!r} is not RUN, RUN@STEP or RUN@vVERSION\n    hint: --from my-run@120")
    run = find_run(match["run"], root, roots)
    if match["version"] is not None:
        return _version(run, int(match["version"]))
    return _checkpoint(run, None if match["step"] is None else int(match["step"]))


def _checkpoint(run: RunDir, step: int | None) -> ModelOrigin:
    ledger = CheckpointLedger(run.checkpoints_dir)
    steps = ledger.steps()
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        hint = f"    hint: there are checkpoints of steps {there}"
        versions = HandoffStore(run.weights_dir).versions()
        hint += f"; or a version: --from {reference(run)}@v{step}" if step in versions else ""
        raise UsageError(f"{run.name} has no checkpoint of step {step}\n{hint}")
    if step is None:
        choice = ledger.newest_verified(content=False)
        if choice.entry is None:
            reasons = "".join(f"\n  step {number}: {reason}" for number, reason in choice.skipped)
            raise UsageError(
                f"{run.name} has no valid checkpoint{reasons}\n"
                f"    hint: a full version, if there is one (hpcrl weights ls {reference(run)}): "
                f"--from {reference(run)}@vN"
            )
        step = choice.entry.step
    try:
        ledger.open(step).verify(content=False)
    except CheckpointError as error:
        raise UsageError(f"{error}\n    hint: another one: hpcrl checkpoint ls {reference(run)}") from error
    return ModelOrigin(
        origin=_origin(run, "checkpoint", step, ledger.path_of(step)), run=run, config_dir=Path(run.recipe().model.path)
    )


def _version(run: RunDir, version: int) -> ModelOrigin:
    store = HandoffStore(run.weights_dir)
    versions = store.versions()
    if version not in versions:
        newest = versions[-1] if versions else -1
        what = "was collected" if version < newest else "was never published, or was withdrawn"
        what = "is announced, not durable" if version in announced_versions(store.root) else what
        there = ", ".join(map(str, versions)) or "none"
        hint = f"there are {there}; or a checkpoint: --from {reference(run)}"
        raise UsageError(f"version {version} of {run.name} {what}\n    hint: {hint}")
    try:
        handoff = store.open(version)
        handoff.verify(content=False)
    except HandoffError as error:
        raise UsageError(f"{error}\n    hint: another one: hpcrl weights ls {reference(run)}") from error
    if handoff.manifest.kind != "full":
        raise UsageError(_not_whole(run, handoff))
    return ModelOrigin(origin=_origin(run, "version", version, handoff.path), run=run, config_dir=handoff.path)


def _not_whole(run: RunDir, handoff: Handoff) -> str:
    manifest = handoff.manifest
    what = {
        "delta": f"holds changes only and needs versions {', '.join(map(str, manifest.needs))}",
        "lora": "is an adapter, and no model",
        "fp8": "is quantised: weights to train from would have lost most of their digits",
    }[manifest.kind]
    return (
        f"version {manifest.version} of {run.name} {what}\n"
        f"    hint: a checkpoint: --from {reference(run)} (hpcrl checkpoint ls {reference(run)})\n"
        f"    hint: a version of kind full: hpcrl weights ls {reference(run)}"
    )


def _origin(run: RunDir, kind: str, number: int, path: Path) -> Origin:
    record = RunRecord.read(run)
    return Origin(
        run=record.name,
        run_id=record.run_id,
        run_dir=str(run.path),
        kind=kind,
        number=number,
        path=str(path),
        taken_at_s=time.time(),
        hpcrl_version=record.hpcrl_version,
        recipe_sha256=record.recipe_sha256,
    )


def write_start_model(source: ModelOrigin, target: Path) -> None:
    """Make the model directory ``target``, which must not exist. All bytes are compared with their manifest.

    A version is linked where that is possible: its files never change, and stay when it is collected. A checkpoint is
    exported by a process of its own, because that needs torch.

    Raises
    ------
    UsageError, RunFailedError, OSError
        It is damaged, or cannot be written; what was made is the caller's to remove.
    """
    if source.origin.kind == "checkpoint":
        command = [sys.executable, "-P", "-m", "hpcrl.trainer.state.export", str(source.run.path), str(target)]
        done = subprocess.run([*command, "--step", str(source.origin.number)], check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise RunFailedError(f"the weights of {source.origin} could not be exported; the reason is above")
        return
    try:
        handoff = Handoff.open(Path(source.origin.path))
        handoff.verify(content=True)
        lost_replies.make_own_directory(target)
        for name in handoff.manifest.files:
            if name != MANIFEST:
                _link(handoff.path / name, target / name)
    except (HandoffError, FileNotFoundError) as error:
        raise UsageError(f"{error}\n    hint: another version: hpcrl weights ls {reference(source.run)}") from error
    fsync_dir(target)


def _link(source: Path, target: Path) -> None:
    try:
        lost_replies.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as stream:
            os.fsync(stream.fileno())

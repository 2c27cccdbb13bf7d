"""Start of the next attempts of a run: the request of a person, and whether the run has checkpoints to lose.

``restart.json`` is written by ``hpcrl resume`` before the run is submitted, and read by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from hpcrl.checkpoints.history import read_saved
from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.errors import CheckpointError, NothingToRestoreError
from hpcrl.runs.events import read_events
from hpcrl.runs.registry import reference
from hpcrl.runs.role import restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared
from hpcrl.storage.quarantine import list_asides


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a person about where a run resumes.

    Attributes
    ----------
    begin:
        The newest good checkpoint; the start model; or the checkpoint of one ``step``.
    step:
        Step of that checkpoint.
    after_attempt:
        Newest attempt at the time of the request, which concerns later attempts.
    time_s, by:
        Time of the request (seconds since the epoch), and the user.
    """

    begin: Literal["newest", "scratch", "step"]
    after_attempt: int
    time_s: float
    by: str
    step: int | None = None

    def write(self, run: RunDir) -> None:
        """Replace the earlier request; durable on return."""
        write_json(run.restart_path, self)

    @classmethod
    def in_force(cls, run: RunDir) -> ResumeRequest | None:
        """Return the pending request: no attempt since it was made has saved a checkpoint. None for the newest."""
        try:
            request = msgspec.json.decode(run.restart_path.read_bytes(), type=prepared(cls))
        except FileNotFoundError:
            return None
        if request.begin == "newest" or request.after_attempt < _last_attempt_that_saved(run):
            return None
        return request


def ever_saved(run: RunDir) -> list[int]:
    """Return the steps of all joint checkpoints that the run ever had, removed ones included, ascending."""
    root = run.checkpoints_dir
    steps = {*CheckpointLedger(root).steps(), *(saved.step for saved in read_saved(root))}
    steps |= {aside.number for aside in list_asides(root, "step-")}
    saved = (event.data.get("step") for event in read_events(run, kind="trainer.checkpoint_saved"))
    steps |= {step for step in saved if isinstance(step, int)}
    return sorted(steps)


class ResumePoint(NamedTuple):
    """Checkpoint from which a resume continues, as far as it is known without reading data.

    Attributes
    ----------
    step:
        Step of the newest checkpoint whose files all exist; None where there is none.
    skipped:
        ``(step, reason)`` of newer entries that cannot be used.
    saved:
        Steps of all checkpoints that the run ever had.
    """

    step: int | None
    skipped: list[tuple[int, str]]
    saved: list[int]


def find_resume_point(run: RunDir) -> ResumePoint:
    """Return the newest checkpoint whose files all exist; the trainer compares their content with all of its ranks."""
    choice = CheckpointLedger(run.checkpoints_dir).newest_verified(content=False)
    return ResumePoint(choice.entry.manifest.step if choice.entry else None, choice.skipped, ever_saved(run))


def read_restored(run: RunDir, attempt: int) -> RestoreDecision | None:
    """Return the state with which an attempt began; None where its trainer has not recorded it yet."""
    try:
        return RestoreDecision.find(restore_path(run, attempt)) if attempt else None
    except (OSError, msgspec.DecodeError):
        return None


def nothing_to_restore(
    run: RunDir, saved: Sequence[int], skipped: Sequence[tuple[int, str]], *, wanted: int | None = None
) -> NothingToRestoreError:
    """Return the error of a run that cannot restore any of its checkpoints, or not the ``wanted`` one.

    Parameters
    ----------
    saved:
        See `ever_saved`.
    skipped:
        Step of each existing entry, and its problem.
    """
    what = "no checkpoint can be restored" if wanted is None else f"the checkpoint of step {wanted} cannot be restored"
    last = f"saved {len(saved)} of them, the last at step {saved[-1]}" if saved else "saved none"
    lines = [f"{what}. A run never restarts at step 0 by itself; this one {last}"]
    lines += [f"  step {step}: {reason}" for step, reason in skipped]
    there = {step for step, _ in skipped}
    gone = [step for step in saved if step not in there]
    if not skipped:
        lines.append(f"  no entry is left in {run.checkpoints_dir}")
    aside = sorted({entry.number for entry in list_asides(run.checkpoints_dir, "step-")} & set(gone))
    if aside:
        lines.append(f"  put aside, and can be taken with --from-step: {', '.join(map(str, aside))}")
    lines += [
        f"    hint: restart at step 0 with the start model; existing state is put aside: "
        f"hpcrl resume {reference(run)} --from-scratch",
        f"    hint: restore the files, then: hpcrl resume {reference(run)}",
        f"    hint: choose a step: hpcrl checkpoint ls {reference(run)}, then "
        f"hpcrl resume {reference(run)} --from-step STEP",
    ]
    return NothingToRestoreError("\n".join(lines))


def _last_attempt_that_saved(run: RunDir) -> int:
    ledger = CheckpointLedger(run.checkpoints_dir)
    attempts = [0, *(saved.attempt for saved in read_saved(ledger.root))]
    for step in ledger.steps():
        try:
            attempts.append(ledger.open(step).manifest.attempt)
        except CheckpointError:
            continue
    return max(attempts)

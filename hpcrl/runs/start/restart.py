"""Where the next attempts of a run begin: what a person asked for, and whether the run has anything to lose.

``restart.json`` is written by ``hpcrl resume`` before the run is handed over, and read by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from hpcrl.aside import list_asides
from hpcrl.checkpoints.history import read_saved
from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.decoding import prepared
from hpcrl.errors import CheckpointError, NothingToRestoreError
from hpcrl.fs import write_json
from hpcrl.runs.events import read_events
from hpcrl.runs.registry import reference
from hpcrl.runs.role import restore_path
from hpcrl.runs.rundir import RunDir

__all__ = ["RestartRequest", "ResumePoint", "ever_saved", "find_resume_point", "nothing_to_restore", "read_restored"]


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is to go on.

    Attributes
    ----------
    begin:
        The newest good checkpoint; the start model; or the checkpoint of one ``step``.
    step:
        Of that checkpoint.
    after_attempt:
        Newest attempt when it was asked for: it concerns the attempts after that one.
    time_s, by:
        When (seconds since the epoch), and who.
    """

    begin: Literal["newest", "scratch", "step"]
    after_attempt: int
    time_s: float
    by: str
    step: int | None = None

    def write(self, run: RunDir) -> None:
        """Replace what was asked for before; durable on return."""
        write_json(run.restart_path, self)

    @classmethod
    def in_force(cls, run: RunDir) -> RestartRequest | None:
        """What was asked for and not done yet: no attempt since then has saved a checkpoint. None for the newest."""
        try:
            request = msgspec.json.decode(run.restart_path.read_bytes(), type=prepared(cls))
        except FileNotFoundError:
            return None
        if request.begin == "newest" or request.after_attempt < _last_attempt_that_saved(run):
            return None
        return request


def ever_saved(run: RunDir) -> list[int]:
    """Steps of all joint checkpoints that the run is known to have had, ascending, whatever has become of them."""
    root = run.checkpoints_dir
    steps = {*CheckpointLedger(root).steps(), *(saved.step for saved in read_saved(root))}
    steps |= {aside.number for aside in list_asides(root, "step-")}
    saved = (event.data.get("step") for event in read_events(run, kind="trainer.checkpoint_saved"))
    steps |= {step for step in saved if isinstance(step, int)}
    return sorted(steps)


class ResumePoint(NamedTuple):
    """Where a resume goes on, as far as that is known without reading data.

    Attributes
    ----------
    step:
        Step of the newest checkpoint whose files are all there; None where there is none.
    skipped:
        ``(step, reason)`` of newer entries that cannot be used.
    saved:
        Steps of all checkpoints that the run ever had.
    """

    step: int | None
    skipped: list[tuple[int, str]]
    saved: list[int]


def find_resume_point(run: RunDir) -> ResumePoint:
    """The newest checkpoint whose files are all there; the trainer, with all of its ranks, compares their content."""
    choice = CheckpointLedger(run.checkpoints_dir).newest_verified(content=False)
    return ResumePoint(choice.entry.manifest.step if choice.entry else None, choice.skipped, ever_saved(run))


def read_restored(run: RunDir, attempt: int) -> RestoreDecision | None:
    """What an attempt began with; None where its trainer has not said it yet."""
    try:
        return RestoreDecision.find(restore_path(run, attempt)) if attempt else None
    except (OSError, msgspec.DecodeError):
        return None


def nothing_to_restore(
    run: RunDir, saved: Sequence[int], skipped: Sequence[tuple[int, str]], *, wanted: int | None = None
) -> NothingToRestoreError:
    """The error of a run that has saved checkpoints and can restore none; or not the one that was ``wanted``.

    Parameters
    ----------
    saved:
        See `ever_saved`.
    skipped:
        Step of each entry that is there, and what is wrong with it.
    """
    what = "no checkpoint can be restored" if wanted is None else f"the checkpoint of step {wanted} cannot be restored"
    last = f"saved {len(saved)} of them, the last at step {saved[-1]}" if saved else "saved none"
    lines = [f"{what}, and a run does not begin again by itself: this one {last}"]
    lines += [f"  step {step}: {reason}" for step, reason in skipped]
    there = {step for step, _ in skipped}
    gone = [step for step in saved if step not in there]
    if not skipped:
        lines.append(f"  no entry is left in {run.checkpoints_dir}")
    aside = sorted({entry.number for entry in list_asides(run.checkpoints_dir, "step-")} & set(gone))
    if aside:
        lines.append(f"  put aside, and can be taken with --from-step: {', '.join(map(str, aside))}")
    lines += [
        f"    hint: begin at step 0, with the start model; what is there is put aside: "
        f"hpcrl resume {reference(run)} --from-scratch",
        f"    hint: bring the files back, then: hpcrl resume {reference(run)}",
        f"    hint: a step of your choice: hpcrl checkpoint ls {reference(run)}, then "
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

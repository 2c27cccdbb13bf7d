"""Checkpoints of a run as rows and documents, and removing some of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.checkpoints import CheckpointEntry, CheckpointLedger
from hpcrl.checkpoints.checks import read_check, record_check
from hpcrl.checkpoints.pins import pins_of
from hpcrl.checkpoints.retention import removable_steps
from hpcrl.errors import CheckpointError
from hpcrl.runs.record import user_name
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.quarantine import list_asides

SCHEMA = "hpcrl.checkpoints/1"


def pinned_steps(run: RunDir) -> list[int]:
    """Return the steps of pinned checkpoints, ascending."""
    return sorted(pins_of(run.checkpoints_dir).numbers())


class CheckpointItem(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the ledger. A field that cannot be read is None or 0, and `problem` says why.

    Attributes
    ----------
    created_at_s:
        Seconds since the epoch by its writer's clock.
    bytes, files:
        Size of all files, and how many.
    save_s, blocked_s:
        Seconds that the save took, and those of them in which training was blocked.
    pin:
        Reason of its pin; None where it is not pinned.
    problem:
        Reason why it is unusable; empty where no problem is known.
    verified_at_s, verified_by:
        Time (seconds since the epoch) and user of the last successful comparison of every byte with the manifest; None
        and empty without one.
    """

    step: int
    path: str
    created_at_s: float | None = None
    bytes: int = 0
    files: int = 0
    attempt: int | None = None
    world_size: int | None = None
    save_s: float | None = None
    blocked_s: float | None = None
    pin: str | None = None
    problem: str = ""
    verified_at_s: float | None = None
    verified_by: str = ""

    @property
    def state(self) -> str:
        """Return the state of verification in words."""
        if self.problem:
            return f"damaged: {self.problem.partition(' is damaged: ')[2] or self.problem}"
        if self.verified_at_s is None:
            return "not verified yet"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.verified_at_s))
        return f"verified {when} by {self.verified_by}"

    @property
    def age_s(self) -> float | None:
        return None if self.created_at_s is None else max(0.0, time.time() - self.created_at_s)


def checkpoint_items(run: RunDir) -> list[CheckpointItem]:
    """Return all entries, ascending; sizes of files are compared, data is not read."""
    return _items(run, None, content=False)


def verify_checkpoints(run: RunDir, step: int | None, *, content: bool = True) -> list[CheckpointItem]:
    """Compare one entry, or all, with their manifests: every byte, or sizes only (CheckpointError: no such step).

    The result is recorded for `checkpoint_items`, where the run directory is writable.
    """
    ledger = CheckpointLedger(run.checkpoints_dir)
    items = []
    for number in _chosen(ledger, run, step):
        problem = _item(ledger, number, content=content, known=False).problem
        with contextlib.suppress(OSError):
            record_check(ledger, number, content=content, by=user_name(), problem=problem)
        item = _item(ledger, number, content=False)
        items.append(msgspec.structs.replace(item, problem=problem))
    return items


def checkpoint_details(run: RunDir, step: int | None) -> dict[str, Any]:
    """Return one entry with all known details; the newest by default.

    Raises
    ------
    CheckpointError
        The entry does not exist.
    """
    ledger = CheckpointLedger(run.checkpoints_dir)
    steps = ledger.steps()
    chosen = _chosen(ledger, run, steps[-1] if step is None and steps else step)[-1:]
    if not chosen:
        raise CheckpointError(f"{run.name} has no checkpoint")
    item = _item(ledger, chosen[0], content=False)
    details: dict[str, Any] = {"schema": SCHEMA, "run": run.name, **msgspec.to_builtins(item)}
    if not item.problem:
        entry = ledger.open(item.step)
        details["policy_version"] = entry.manifest.policy_version
        details["records"] = msgspec.to_builtins(entry.manifest.files)
        details["orchestrator"] = _orchestrator(entry)
    pin = pins_of(ledger.root).all().get(item.step)
    details["pin"] = None if pin is None else msgspec.to_builtins(pin)
    return details


def plan_prune(
    run: RunDir, *, keep_last: int, keep_every: int, steps: Sequence[int] = (), content: bool = True
) -> list[CheckpointItem]:
    """Return the checkpoints that `hpcrl checkpoint prune` would remove, by the retention rule or by ``steps``.

    The newest remaining entry must be intact when it is compared with its manifest.

    Parameters
    ----------
    content:
        Whether every byte of that entry is compared, or sizes only.

    Raises
    ------
    CheckpointError
        A named step does not exist or is pinned; or no intact entry would remain.
    """
    ledger = CheckpointLedger(run.checkpoints_dir)
    there, pinned = ledger.steps(), pins_of(ledger.root).numbers()
    if steps:
        for step in steps:
            _chosen(ledger, run, step)
            if step in pinned:
                raise CheckpointError(
                    f"the checkpoint of step {step} is pinned\n    hint: hpcrl checkpoint unpin {reference(run)} {step}"
                )
        doomed = sorted(set(steps))
    else:
        doomed = removable_steps(
            there, whole=ledger.whole_steps(keep_last), pinned=pinned, keep_last=keep_last, keep_every=keep_every
        )
    if doomed:
        _refuse_loss(ledger, run, [step for step in there if step not in doomed], content=content)
    return [_item(ledger, step, content=False) for step in doomed]


def remove_checkpoints(run: RunDir, items: Sequence[CheckpointItem]) -> None:
    """Remove entries that `plan_prune` has found."""
    ledger = CheckpointLedger(run.checkpoints_dir)
    for item in items:
        ledger.remove(item.step)


def items_document(run: RunDir, items: Sequence[CheckpointItem]) -> str:
    """Return the items as JSON (schema `SCHEMA`)."""
    aside = [{"step": entry.number, "path": str(entry.path)} for entry in list_asides(run.checkpoints_dir, "step-")]
    document = {"schema": SCHEMA, "run": run.name, "items": list(items), "put_aside": aside}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _refuse_loss(ledger: CheckpointLedger, run: RunDir, staying: list[int], *, content: bool) -> None:
    reasons = []
    for step in reversed(staying):
        try:
            ledger.open(step).verify(content=content)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return
    why = "; ".join(reasons) or "the run has no others"
    raise CheckpointError(
        f"no valid checkpoint of {run.name} would be left: {why}\n    hint: hpcrl checkpoint verify {reference(run)}"
    )


def _items(run: RunDir, step: int | None, *, content: bool) -> list[CheckpointItem]:
    ledger = CheckpointLedger(run.checkpoints_dir)
    return [_item(ledger, number, content=content) for number in _chosen(ledger, run, step)]


def _chosen(ledger: CheckpointLedger, run: RunDir, wanted: int | None) -> list[int]:
    steps = ledger.steps()
    if wanted is None:
        return steps
    if wanted not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
        raise CheckpointError(f"{wanted} is not a checkpoint of {run.name}\n    hint: {there}")
    return [wanted]


def _item(ledger: CheckpointLedger, step: int, *, content: bool, known: bool = True) -> CheckpointItem:
    """Return an entry; with ``known`` it includes the result of the last verification."""
    pin = pins_of(ledger.root).all().get(step)
    item = CheckpointItem(step=step, path=str(ledger.path_of(step)), pin=None if pin is None else pin.reason)
    try:
        entry = ledger.open(step)
        saved = entry.manifest
        item = msgspec.structs.replace(
            item,
            created_at_s=saved.created_at_s,
            bytes=saved.total_bytes,
            files=len(saved.files),
            attempt=saved.attempt,
            world_size=saved.world_size,
            save_s=saved.save_s,
            blocked_s=saved.blocked_s,
        )
        entry.verify(content=content)
    except CheckpointError as error:
        return msgspec.structs.replace(item, problem=str(error))
    check = read_check(ledger, step) if known else None
    if check is not None and check.problem:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(check.time_s))
        return msgspec.structs.replace(item, problem=f"{check.problem} (seen {when} by {check.by})")
    if check is not None and check.compared == "content":
        return msgspec.structs.replace(item, verified_at_s=check.time_s, verified_by=check.by)
    return item


def _orchestrator(entry: CheckpointEntry) -> dict[str, Any]:
    """Return counts of the state that the orchestrator resumes from.

    The format of its bytes belongs to `hpcrl.rollouts.ledger.state`; they are only counted here.
    """
    try:
        state = msgspec.msgpack.decode(entry.orchestrator_state())
        if state.get("kind") == "sft":
            # a supervised run has no orchestrator; its trainer stores the position in the data
            return {"epoch": state["epoch"] + 1, "conversations_per_step": state["conversations_per_step"]}
        # since format 3 the ledger of rollouts has them, and the state has only index, environment, prompt and count
        groups = [len(group["rollouts"]) for group in state["finished"]]
        groups += [count for _, _, _, count in state.get("logged", [])]
        return {
            "next_group": state["next_index"],
            "groups_to_restart": len(state["restart"]),
            "finished_groups": len(groups),
            "finished_rollouts": sum(groups),
        }
    except (msgspec.DecodeError, CheckpointError, LookupError, AttributeError, TypeError, ValueError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}

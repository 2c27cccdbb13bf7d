"""Saves joint checkpoints in parallel with training: copy, write in the background, commit, retain.

A save has three parts:

1. `CheckpointSaver.start`, at a step boundary: room is looked for, the orchestrator is asked for its state, and the
   trainer's state is copied to host memory (``checkpoint.mode: sync`` copies nothing and does the rest at once);
2. a thread of each rank writes the copy, in a process group of its own, so that nothing meets the collectives of the
   training;
3. when all ranks have written, rank 0 completes the ledger entry and removes what need not be kept.

Ranks agree about the outcome in part 3. A failed save leaves no entry: the failure of a periodic save is logged and
training continues, because earlier entries are still valid; the caller decides what a failure means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from hpcrl.checkpoints.ledger import TRAINER_DIR
from hpcrl.checkpoints.writer import CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.errors import CheckpointError, DeadlineError, FencedError
from hpcrl.storage.disk_space import find_shortage
from hpcrl.storage.files import FileRecord
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.state.checkpoint import REFERENCE, copy_to_host, state_bytes, trainer_state, write_state
from hpcrl.trainer.step.policy import TrainerPolicy

_log = logging.getLogger(__name__)

_FILES_PER_RANK = 1
_FILES_OF_AN_ENTRY = 8
"""Manifest, metadata, the orchestrator's file, directories, and temporary names."""
_MARGIN, _MARGIN_BYTES = 0.02, 1 << 20
"""Files of an entry in addition to the state: metadata of the parts, the manifest."""
_ROOM = (
    "\n    hint: free space there, or remove entries: hpcrl checkpoint prune RUN --keep-last 1"
    "\n    hint: a lower checkpoint.keep_last (one entry more than that exists during a save)"
)


class Emit(Protocol):
    """Records an event; does nothing on ranks other than 0."""

    def __call__(self, kind: str, **data: Any) -> None: ...


@dataclass
class _Save:
    """One save. ``error`` is set by its thread, before the thread ends."""

    step: int
    state: dict[str, Any]
    orchestrator_state: bytes
    started_at_s: float
    blocked_s: float = 0.0
    thread: threading.Thread | None = None
    error: Exception | None = None


class CheckpointSaver:
    """Saves of one attempt, one at a time. All ranks call every method together."""

    def __init__(self, writer: CheckpointWriter, ranks: Ranks, config: CheckpointConfig, emit: Emit) -> None:
        """Prepare; nothing is written.

        Parameters
        ----------
        writer:
            Writer of the ledger, the same on every rank.
        ranks:
            All of them.
        config:
            Checkpoint settings of the recipe.
        emit:
            For ``trainer.checkpoint_saved`` and ``trainer.checkpoint_failed``; called from a thread.
        """
        self._writer, self._all, self._config, self._emit = writer, ranks, config, emit
        # only saves use it; made at once, because making it is a collective of its own that must not meet others
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.save_timeout_s), group_desc="save")
        self._ranks = Ranks(group)
        self._last: _Save | None = None
        self._failures = 0

    def start(self, policy: TrainerPolicy, step: int, *, orchestrator_state: Callable[[], bytes]) -> None:
        """Begin to save the state after optimizer step ``step``; waits for the save before it.

        In mode ``sync`` the save has ended on return.

        Parameters
        ----------
        policy:
            Policy to save; it may be changed as soon as this returns.
        orchestrator_state:
            Asks the orchestrator for its state after ``step``; called on rank 0.

        Raises
        ------
        DeadlineError
            The save before this one hangs.
        FencedError
            The save before this one met a newer attempt: this process is a leftover.
        PeerLostError
            The orchestrator does not answer: without its state neither a checkpoint nor the run can continue.
        """
        self._join(self._config.save_timeout_s)
        started, started_at_s = time.monotonic(), time.time()
        answer = self._all.on_leader(orchestrator_state, f"asking for the orchestrator's state after step {step}")
        state = trainer_state(policy.model, policy.optimizer, step, base=policy.base)
        if policy.reference is not None and (held := policy.reference.state(step)) is not None:
            state[REFERENCE] = held
        save = self._last = _Save(step, state, answer, started_at_s)
        if not self._has_room(save):
            return
        sync = self._config.mode == "sync"
        if not sync:
            save.state = copy_to_host(state)
            save.blocked_s = time.monotonic() - started
        # a daemon: a write that hangs must not keep a process that has failed for another reason
        save.thread = threading.Thread(
            target=self._work, args=(save, started if sync else None), name=f"save-{step}", daemon=True
        )
        save.thread.start()
        if sync:
            self._join(self._config.save_timeout_s)

    def wait(self, timeout_s: float) -> Exception | None:
        """Wait for the save that is under way; why it failed, or None where it did not (or where there was none).

        Raises
        ------
        DeadlineError
            It did not end within ``timeout_s`` seconds.
        FencedError
            It met a newer attempt of the run: this process is a leftover.
        """
        self._join(timeout_s)
        return None if self._last is None else self._last.error

    def leave(self, timeout_s: float) -> None:
        """Let the save that is under way end before the process does; for a trainer that fails. Not collective."""
        if self._last is not None and self._last.thread is not None:
            self._last.thread.join(timeout_s)

    def _join(self, timeout_s: float) -> None:
        if self._last is None or self._last.thread is None:
            return
        last, thread = self._last, self._last.thread
        thread.join(timeout_s)

        def ended() -> str:
            if thread.is_alive():
                raise DeadlineError(
                    f"the save of step {last.step} did not end within {timeout_s:g} s\n"
                    "    hint: check the filesystem of the run; raise checkpoint.save_timeout_s"
                )
            return str(last.error) if isinstance(last.error, FencedError) else ""

        fenced = "".join(self._all.all_succeed(ended, f"waiting for the save of step {last.step}"))
        last.thread = None
        if fenced:
            raise FencedError(fenced)

    def _has_room(self, save: _Save) -> bool:
        """Return whether the filesystem has room for the checkpoint; mark the save as failed if it has not."""
        size = state_bytes(save.state) + len(save.orchestrator_state)
        needed_bytes = int(size * (1 + _MARGIN)) + _MARGIN_BYTES
        needed_files = self._ranks.size * _FILES_PER_RANK + _FILES_OF_AN_ENTRY

        def look() -> str:
            try:
                shortage = find_shortage(self._writer.root, size=needed_bytes, files=needed_files)
            except OSError as error:
                return str(error)
            return f"the next checkpoint needs {shortage}{_ROOM}" if shortage is not None else ""

        problem = self._all.on_leader(look, "looking for room")
        if problem:
            save.state, save.orchestrator_state = {}, b""
            self._failed(save, CheckpointError(problem))
        return not problem

    def _work(self, save: _Save, blocked_since: float | None) -> None:
        """Do parts 2 and 3 of a save; never raise."""
        try:
            removed = self._write(save, blocked_since)
        except Exception as error:  # noqa: BLE001 - an error of the save is not one of the training
            self._failed(save, error)
            return
        finally:
            save.state, save.orchestrator_state = {}, b""
        self._failures = 0
        seconds = time.time() - save.started_at_s
        self._emit(
            "trainer.checkpoint_saved",
            step=save.step,
            seconds=seconds,
            blocked_s=seconds if blocked_since is not None else save.blocked_s,
            removed=removed,
        )

    def _write(self, save: _Save, blocked_since: float | None) -> list[int]:
        step, ranks, writer = save.step, self._ranks, self._writer
        ranks.on_leader(lambda: writer.stage(step), f"preparing checkpoint {step}")
        try:
            own = write_state(writer.staged(step) / TRAINER_DIR, save.state, ranks.group)
            files: dict[str, FileRecord] = {}
            for records in ranks.gather(own):
                files |= {f"{TRAINER_DIR}/{name}": record for name, record in records.items()}

            def complete() -> list[int]:
                writer.commit(
                    step=step,
                    world_size=ranks.size,
                    files=files,
                    orchestrator_state=save.orchestrator_state,
                    started_at_s=save.started_at_s,
                    blocked_s=save.blocked_s if blocked_since is None else time.monotonic() - blocked_since,
                )
                try:
                    writer.collect_aside(step)
                    return writer.retain(keep_last=self._config.keep_last, keep_every=self._config.keep_every_steps)
                except OSError as error:  # the new entry is complete; only disk space is not freed yet
                    _log.warning("old checkpoints are not removed: %s", error)
                    return []

            return ranks.on_leader(complete, f"completing checkpoint {step}")
        except BaseException:
            if ranks.rank == 0:
                writer.discard(step)
                writer.fence.check()  # if a newer attempt has claimed the store, report that as the reason
            raise

    def _failed(self, save: _Save, error: Exception) -> None:
        save.error = error
        self._failures += 1
        steps = self._writer.ledger.steps() if self._ranks.rank == 0 else []
        _log.error("the checkpoint of step %d failed: %s", save.step, error)
        self._emit(
            "trainer.checkpoint_failed",
            step=save.step,
            reason=f"{type(error).__name__}: {error}",
            failures_in_a_row=self._failures,
            newest=max(steps, default=None),
        )

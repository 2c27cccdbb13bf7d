"""The writing side of the ledger: stage, commit, retain, behind a fence."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcrl.checkpoints.checks import forget_check
from hpcrl.checkpoints.history import FILE as HISTORY
from hpcrl.checkpoints.history import add_saved
from hpcrl.checkpoints.ledger import (
    MANIFEST,
    MAX_SAVE_S,
    ORCHESTRATOR_FILE,
    TRAINER_DIR,
    CheckpointEntry,
    CheckpointLedger,
    CheckpointManifest,
)
from hpcrl.checkpoints.pins import pins_of
from hpcrl.checkpoints.retention import removable_steps
from hpcrl.errors import CheckpointError
from hpcrl.storage import lost_replies
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import FileRecord, atomic_write, write_json
from hpcrl.storage.quarantine import QuarantinedEntry, collect_asides, put_aside, take_back

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointWriter:
    """The one writer of a ledger. Picklable, so that one rank claims for all.

    A save: one rank calls `stage`; all ranks write files below its directory, fsync them and keep their records;
    one rank calls `commit` with all records, then `retain`. A save that fails before `commit` returns makes no entry.
    """

    root: Path
    fence: Fence

    @classmethod
    def claim(cls, root: Path, attempt: int) -> CheckpointWriter:
        """Become the one writer; see `hpcrl.storage.fence.Fence.claim` (FencedError where a newer attempt was here)."""
        return cls(root, Fence.claim(root, attempt))

    @property
    def attempt(self) -> int:
        return self.fence.token

    @property
    def ledger(self) -> CheckpointLedger:
        return CheckpointLedger(self.root)

    def staged(self, step: int) -> Path:
        """Return the directory in which the entry of ``step`` is built."""
        return self.fence.path / _name(step)

    def stage(self, step: int) -> Path:
        """Make the empty directory in which the entry of ``step`` is built, with ``trainer/`` in it."""
        path = self.fence.create(_name(step))
        try:
            lost_replies.make_own_directory(path / TRAINER_DIR)
        except FileNotFoundError:
            self.fence.check()  # a newer attempt claimed the ledger between the two calls
            raise
        return path

    def discard(self, step: int) -> None:
        """Remove what was staged."""
        self.fence.discard(_name(step))

    def commit(
        self,
        *,
        step: int,
        world_size: int,
        files: Mapping[str, FileRecord],
        orchestrator_state: bytes,
        started_at_s: float,
        blocked_s: float = 0.0,
    ) -> CheckpointEntry:
        """Complete the staged entry; called by one rank after all ranks have written.

        Parameters
        ----------
        files:
            Files of the trainer, relative to the entry, with the hashes from writing; already durable. Only sizes are
            compared here, so that one rank does not read the files of all ranks.
        orchestrator_state:
            Taken at the same step boundary.
        started_at_s, blocked_s:
            Start of the save (epoch seconds), and seconds for which training stood still.

        Raises
        ------
        FencedError
            A newer attempt has claimed the ledger.
        CheckpointError
            A file differs from the record of its writer.
        OSError
            The filesystem refused. In all cases what was staged is removed and the ledger is as before.
        """
        path = self.staged(step)
        try:
            self.fence.check()
            for name, record in files.items():
                size = (path / name).stat().st_size
                if size != record.bytes:
                    raise CheckpointError(f"{path / name} has {size} bytes, its writer wrote {record.bytes}")
            atomic_write(path / ORCHESTRATOR_FILE, orchestrator_state)
            own = FileRecord(len(orchestrator_state), xxhash.xxh3_128_hexdigest(orchestrator_state))
            now = time.time()
            manifest = CheckpointManifest(
                step=step,
                policy_version=step,
                attempt=self.attempt,
                world_size=world_size,
                created_at_s=now,
                # a clock that was set during the save must not make an entry that readers refuse
                save_s=min(max(now - started_at_s, 0.0), MAX_SAVE_S),
                blocked_s=blocked_s,
                files={**files, ORCHESTRATOR_FILE: own},
            )
            write_json(path / MANIFEST, manifest)
            self.fence.commit(_name(step))
        except BaseException as error:
            self.discard(step)
            if isinstance(error, FileNotFoundError):
                self.fence.check()  # the most likely reason
            raise
        try:
            add_saved(self.root, step=step, attempt=self.attempt)
        except OSError as error:  # the entry is complete, and stays valid while it exists
            _log.warning("the checkpoint of step %d is not in %s: %s", step, HISTORY, error)
        return CheckpointEntry(self.root / _name(step), manifest)

    def put_aside_after(self, step: int) -> list[int]:
        """Take the entries above ``step`` out of the ledger and keep them (`hpcrl.storage.quarantine`); returns their
        steps.

                Raises
                ------
                FencedError
                    A newer attempt has claimed the ledger.
        """
        later = [number for number in reversed(self.ledger.steps()) if number > step]
        return sorted(number for number in later if put_aside(self.fence, _name(number)))

    def take_back(self, aside: QuarantinedEntry) -> None:
        """Make what was put aside an entry again."""
        take_back(self.fence, aside)

    def collect_aside(self, step: int) -> list[int]:
        """Delete what was put aside up to ``step``, which the run has saved again; pinned ones stay."""
        return collect_asides(self.root, "step-", up_to=step, keep=pins_of(self.root).numbers())

    def retain(self, *, keep_last: int, keep_every: int = 0) -> list[int]:
        """Remove entries that are not to be kept (`hpcrl.checkpoints.retention`); returns removed steps.

        An entry that cannot be removed stays, with a warning: room is lost, nothing else.

        Raises
        ------
        FencedError
            A newer attempt has claimed the ledger.
        """
        ledger = self.ledger
        doomed = removable_steps(
            ledger.steps(),
            whole=ledger.whole_steps(keep_last),
            pinned=pins_of(self.root).numbers(),
            keep_last=keep_last,
            keep_every=keep_every,
        )
        removed = []
        for step in doomed:
            try:
                if self._remove(step):
                    removed.append(step)
            except OSError as error:
                _log.warning("checkpoint of step %d cannot be removed: %s", step, error)
        return removed

    def _remove(self, step: int) -> bool:
        if not self.fence.hide(_name(step)):
            return False
        if step in pins_of(self.root).numbers():  # it was pinned during this call
            self.fence.restore(_name(step))
            return False
        self.fence.delete(_name(step))
        forget_check(self.ledger, step)
        return True


def _name(step: int) -> str:
    return f"step-{step:06d}"

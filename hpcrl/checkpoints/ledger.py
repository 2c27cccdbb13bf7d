"""The ledger of checkpoints: an entry joins trainer and orchestrator at one step, or it does not exist.

::

    checkpoints/step-000010/
      manifest.json          step, policy version, attempt, files with sizes and hashes
      trainer/               torch distributed checkpoint, written by all ranks
      orchestrator.msgpack   data position, accounting, finished rollouts not yet consumed
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import CheckpointError
from hpcrl.fs import FileRecord, NumberedDirectories, StagedDirectory, check_files, hash_file, write_json

__all__ = ["CheckpointEntry", "CheckpointLedger", "CheckpointManifest", "Choice"]

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
TRAINER_DIR = "trainer"
ORCHESTRATOR_FILE = "orchestrator.msgpack"


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry contains.

    Attributes
    ----------
    step:
        Optimizer steps done; equals the policy version.
    attempt:
        Attempt that wrote it.
    world_size:
        Trainer ranks that wrote it.
    created_at_s:
        Seconds since the epoch by the writer's clock.
    save_s:
        Seconds from the start of the save to the manifest.
    files:
        Records by path relative to the entry.
    """

    step: int
    attempt: int
    world_size: int
    created_at_s: float
    save_s: float
    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION


class CheckpointEntry:
    """A complete entry; its manifest is read and well formed."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self.path, self.manifest = path, manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def trainer_dir(self) -> Path:
        return self.path / TRAINER_DIR

    def orchestrator_state(self) -> bytes:
        """The orchestrator's bytes, as `hpcrl.dock.client.DockClient.snapshot` gave them."""
        return (self.path / ORCHESTRATOR_FILE).read_bytes()

    @classmethod
    def open(cls, path: Path) -> CheckpointEntry:
        """Read the manifest of an entry.

        Raises
        ------
        CheckpointError
            It is not a complete entry of a format this code knows.
        """
        try:
            manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=CheckpointManifest)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} has no {_MANIFEST}") from error
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path / _MANIFEST} cannot be read: {error}") from error
        if manifest.format_version != FORMAT_VERSION:
            raise CheckpointError(f"{path} has checkpoint format {manifest.format_version}, not {FORMAT_VERSION}")
        return cls(path, manifest)

    def verify(self) -> None:
        """Compare every byte with the manifest (CheckpointError names each file that differs)."""
        problems = list(check_files(self.path, self.manifest.files, content=True))
        if problems:
            raise CheckpointError(f"checkpoint {self.path} is damaged: " + "; ".join(problems))


class Choice(NamedTuple):
    """Which entry a resume takes, and what it passed over.

    ``skipped`` holds ``(step, reason)`` for every newer entry that cannot be used.
    """

    entry: CheckpointEntry | None
    skipped: list[tuple[int, str]]


class CheckpointLedger:
    """All entries of a run. One trainer writes; anyone reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories = NumberedDirectories(root, "step-")

    def path_of(self, step: int) -> Path:
        return self._directories.path_of(step)

    def steps(self) -> list[int]:
        """Steps with an entry, ascending."""
        return self._directories.numbers()

    def stage(self, step: int, *, token: str) -> StagedDirectory:
        """A staging directory for the entry of ``step``; all ranks write below its ``path / "trainer"``."""
        return self._directories.stage(step, token=token)

    def commit(
        self,
        stage: StagedDirectory,
        *,
        step: int,
        attempt: int,
        world_size: int,
        orchestrator_state: bytes,
        started_at_s: float,
    ) -> CheckpointEntry:
        """Complete a staged entry; called by one rank after all ranks have written.

        Files are hashed and fsynced here (writers need not). An entry of the same step, left by an earlier
        attempt that is being written again, is replaced.

        Raises
        ------
        OSError
            The filesystem refused; what was staged is removed, earlier entries are untouched.
        """
        try:
            (stage.path / ORCHESTRATOR_FILE).write_bytes(orchestrator_state)
            files: dict[str, FileRecord] = {}
            for path in sorted(p for p in stage.path.rglob("*") if p.is_file()):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
                files[str(path.relative_to(stage.path))] = hash_file(path)
            now = time.time()
            manifest = CheckpointManifest(
                step=step,
                attempt=attempt,
                world_size=world_size,
                created_at_s=now,
                save_s=now - started_at_s,
                files=files,
            )
            write_json(stage.path / _MANIFEST, manifest)
            self.remove(step)
            stage.commit()
        except BaseException:
            stage.discard()
            raise
        return CheckpointEntry(self.path_of(step), manifest)

    def newest_verified(self) -> Choice:
        """The newest entry whose every byte is right, and why newer ones were skipped."""
        skipped: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            try:
                entry = CheckpointEntry.open(self.path_of(step))
                entry.verify()
            except CheckpointError as error:
                skipped.append((step, str(error)))
                continue
            return Choice(entry, skipped)
        return Choice(None, skipped)

    def remove(self, step: int) -> None:
        """Remove an entry: hidden at once, then deleted."""
        self._directories.remove(step)

    def retain(self, *, keep_last: int) -> list[int]:
        """Remove all but the newest ``keep_last`` entries and unfinished ones; returns removed steps."""
        steps = self.steps()
        doomed = steps[: max(0, len(steps) - keep_last)]
        for step in doomed:
            self.remove(step)
        self._directories.sweep()
        return doomed

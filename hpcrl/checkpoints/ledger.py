"""The ledger of checkpoints: an entry joins trainer and orchestrator at one step, or it does not exist.

::

    checkpoints/step-000010/
      manifest.json          step, policy version, attempt, files with sizes and hashes
      trainer/               torch distributed checkpoint, written by all ranks
      orchestrator.msgpack   data position, accounting, finished rollouts not yet consumed
    checkpoints/step-000010.pin.json     kept until it is unpinned, and why

docs/checkpoints.md is the specification. Here is what anyone may do: list, open, verify, choose, pin, remove. Only
the trainer saves: `hpcrl.checkpoints.writer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from hpcrl.checkpoints.verify import damaged_files
from hpcrl.errors import CheckpointError
from hpcrl.storage.files import FileRecord, NumberedDirectories, decode_versioned

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TRAINER_DIR = "trainer"
ORCHESTRATOR_FILE = "orchestrator.msgpack"

_MEASURED_ENTRIES = 3
_MAX_STEP = 2**31 - 1
"""Steps are policy versions, which are int32."""
MAX_SAVE_S = 1e7
"""Maximum duration of a save, a hundred days: more is damage."""
_MAX_BYTES = 2**53
"""Maximum size of a file; JSON of other programs has no larger numbers."""
_MAX_LOOKS = 10


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint entry.

    Attributes
    ----------
    step:
        Optimizer steps done.
    policy_version:
        Version of the weights in it; equals ``step``.
    attempt:
        Attempt that wrote it.
    world_size:
        Trainer ranks that wrote it.
    created_at_s:
        Seconds since the epoch by the writer's clock; for people, never for decisions.
    save_s:
        Seconds from the start of the save to the manifest.
    blocked_s:
        Part of ``save_s`` in which the trainer could not train, in seconds.
    files:
        Records by path relative to the entry.
    """

    step: int
    policy_version: int
    attempt: int
    world_size: int
    created_at_s: float
    save_s: float
    blocked_s: float
    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files, the manifest itself excepted."""
        return sum(record.bytes for record in self.files.values())

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each number or name that cannot be one of an entry."""
        if not 0 <= self.step <= _MAX_STEP or self.attempt < 0 or self.world_size < 1:
            yield "its step, attempt or number of ranks is not valid"
        if not all(0.0 <= seconds <= MAX_SAVE_S for seconds in (self.save_s, self.blocked_s)):
            yield f"its duration of {self.save_s:g} s, or its pause of {self.blocked_s:g} s, is not valid"
        for name, record in self.files.items():
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or not name.isprintable() or name == MANIFEST:
                yield f"{name!r} is not a valid name of a file"
            if not 0 <= record.bytes <= _MAX_BYTES:
                yield f"{name!r} has a size that is not valid"


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
        """Return the orchestrator's verified bytes, as `hpcrl.dock.client.DockClient.snapshot` returned them.

        Raises
        ------
        CheckpointError
            The bytes differ from those that were saved.
        """
        self._refuse(damaged_files(self.path, {ORCHESTRATOR_FILE: self.manifest.files[ORCHESTRATOR_FILE]}))
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
            manifest = decode_versioned((path / MANIFEST).read_bytes(), CheckpointManifest, FORMAT_VERSION)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} has no {MANIFEST}") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
        if ORCHESTRATOR_FILE not in manifest.files:
            raise CheckpointError(f"{path} has no orchestrator state: it is not joint")
        if manifest.policy_version != manifest.step or path.name != f"step-{manifest.step:06d}":
            raise CheckpointError(
                f"{path} says step {manifest.step} and policy version {manifest.policy_version}: it is not joint"
            )
        if (problem := next(manifest.problems(), None)) is not None:
            raise CheckpointError(f"{path / MANIFEST} is wrong: {problem}")
        return cls(path, manifest)

    def verify(self, *, content: bool = True) -> None:
        """Compare the files with the manifest: every byte, or sizes only.

        Parameters
        ----------
        content:
            True reads the files.

        Raises
        ------
        CheckpointError
            Naming each file that differs.
        """
        self._refuse(damaged_files(self.path, self.manifest.files, content=content))

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointError(f"checkpoint {self.path} is damaged: " + "; ".join(problems))


class ResumeChoice(NamedTuple):
    """Entry that a resume uses, and the entries that it skipped.

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
        """Return the steps that have an entry, ascending."""
        return self._directories.numbers()

    def open(self, step: int) -> CheckpointEntry:
        """Open the entry of ``step`` (see `CheckpointEntry.open`)."""
        return CheckpointEntry.open(self.path_of(step))

    def newest_verified(self, *, content: bool = True) -> ResumeChoice:
        """Return the newest entry whose every byte (or size) is right, and the reasons why newer ones were skipped."""
        for _ in range(_MAX_LOOKS):
            choice, vanished = self._look(content=content)
            # the list may be so old that all of its entries were replaced by newer ones meanwhile
            if choice.entry is not None or not vanished:
                break
        return choice

    def _look(self, *, content: bool) -> tuple[ResumeChoice, bool]:
        """Return `newest_verified` of one listing, and whether an entry was removed during the check."""
        skipped: list[tuple[int, str]] = []
        vanished = False
        for step in reversed(self.steps()):
            try:
                entry = self.open(step)
                entry.verify(content=content)
            except CheckpointError as error:
                if step in self.steps():
                    skipped.append((step, str(error)))
                else:  # the entry itself is intact
                    vanished = True
                continue
            return ResumeChoice(entry, skipped), vanished
        return ResumeChoice(None, skipped), vanished

    def whole_steps(self, newest: int) -> list[int]:
        """Return the ``newest`` steps whose entry has all files in their sizes, ascending; contents are not read."""
        return sorted(islice((step for step in reversed(self.steps()) if self._is_whole(step)), newest))

    def _is_whole(self, step: int) -> bool:
        try:
            self.open(step).verify(content=False)
        except CheckpointError:
            return False
        return True

    def remove(self, step: int) -> None:
        """Remove an entry: hidden at once, then deleted. For people; the trainer removes through its fence."""
        self._directories.remove(step)


def expected_save_s(ledger: CheckpointLedger) -> float | None:
    """Return the expected duration in seconds of a save that is requested now, from the last measured saves.

    The estimate is twice the slowest save, because a save waits for one in progress. None where nothing was measured.
    """
    measured: list[float] = []
    for step in ledger.steps()[-_MEASURED_ENTRIES:]:
        try:
            measured.append(ledger.open(step).manifest.save_s)
        except CheckpointError:
            continue
    return 2.0 * max(measured) if measured else None

"""Remove versions that are not needed, without a race against a reader that is taking a lease.

The reader:     L  writes its lease (`Registration.lease`);   N  lists the root: has the version its name?
The collector:  H  hides the version (rename);                C  reads leases and pins;   D  restores it, or deletes it

Whatever the order, a reader that found the name in N reads a version that is not deleted. Suppose D deletes: then C
saw no lease, so L came after C, and C after H; so N, which comes after L, finds the version hidden, and the reader
takes another one. If C sees the lease, D restores, and a reader whose N came between H and D only lists again.

L, H and C are single directory entries, and both sides *list* (`N`, `C`), which a client of NFS revalidates. For a
server whose time stamps are coarse, `settle_s` passes between H and C, so that a listing cached in the same tick as a
change is not used. Hidden versions of a collector that died are decided again by the next, by C and D; what it was
deleting has another name and is never restored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import HandoffError
from hpcrl.storage import lost_replies
from hpcrl.storage.files import fsync_dir
from hpcrl.storage.quarantine import collect_asides
from hpcrl.weights.format.manifest import Handoff, WrongManifestError
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import read_pins
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.visibility import HIDDEN_PREFIX

_log = logging.getLogger(__name__)

_HIDDEN = re.compile(rf"{re.escape(HIDDEN_PREFIX)}v(\d{{6,}})")
_DOOMED_PREFIX = ".removed-"


class CollectReport(NamedTuple):
    """Result of a pass.

    Attributes
    ----------
    removed:
        Removed versions, ascending.
    kept:
        Reason why each of the others stays, by version.
    restored:
        Versions that were hidden and restored, because a reader had taken a lease meanwhile.
    """

    removed: list[int]
    kept: dict[int, str]
    restored: list[int]


class Collector:
    """Collector of one store. At most one process of a run has one: the orchestrator."""

    def __init__(
        self,
        store: HandoffStore,
        watch: ReaderWatch,
        *,
        keep_last: int,
        settle_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare; the store is not changed.

        Parameters
        ----------
        store:
            Store of the run.
        watch:
            Says which readers live. It must have watched for its expiry time before it may call a reader dead; it
            does so by itself.
        keep_last:
            Newest versions that always stay.
        settle_s:
            Time between hiding a version and the last look at leases.
        sleep:
            For tests.
        """
        self._store, self._watch = store, watch
        self._keep_last, self._settle_s, self._sleep = keep_last, settle_s, sleep
        self._needs: dict[int, tuple[int, ...]] = {}
        self._wrong: set[int] = set()

    def plan(self, in_use: Collection[int] = ()) -> dict[int, str]:
        """Return why each published version stays, by version; an empty reason means that it may be removed.

        Nothing is changed.

        Parameters
        ----------
        in_use:
            Versions that the caller itself knows to be in use.

        Raises
        ------
        HandoffError
            Readers, pins or the manifest of a kept version cannot be read, so that their needs are unknown.
        """
        versions = self._store.versions()
        reasons = dict.fromkeys(versions, "")
        for version in islice((v for v in reversed(versions) if not self._is_wrong(v)), self._keep_last):
            reasons[version] = f"one of the newest {self._keep_last}"
        for version in in_use:
            reasons[version] = "in use by an engine"
        reasons.update(self._held())
        reasons = {version: reason for version, reason in reasons.items() if version in versions}
        for version in sorted((v for v in versions if reasons[v]), reverse=True):
            for needed in self._needed_by(version):
                if reasons.get(needed) == "":
                    reasons[needed] = f"needed to reconstruct version {version}"
        return reasons

    def collect(self, in_use: Collection[int] = ()) -> CollectReport:
        """Remove unneeded versions, and the files of dead readers.

        Raises
        ------
        HandoffError
            See `plan`; or the filesystem refused. What was hidden has its name again, now or after the next pass.
        """
        try:
            return self._collect(in_use)
        except OSError as error:
            raise HandoffError(f"{self._store.root}: nothing else is removed now: {error}") from error

    def _collect(self, in_use: Collection[int]) -> CollectReport:
        self._watch.forget_dead()
        self._wrong.clear()
        self._needs.clear()  # a version may have been withdrawn and published again
        reasons = self.plan(in_use)
        for version, reason in reasons.items():
            if not reason:
                self._hide(version)
        restored: list[int] = []
        removed: list[int] = []
        hidden = self._hidden()
        if hidden:
            # a server with coarse time stamps could answer step C from a listing cached in the same tick as step H
            self._sleep(self._settle_s)
            try:
                wanted = self._wanted(hidden, in_use)
            except HandoffError:
                # the needs of readers are unknown: keep everything
                for version in hidden:
                    self._restore(version)
                raise
            restored, removed = self._decide(hidden, wanted)
        self._delete_doomed()
        if (newest := self._store.newest()) is not None:
            # versions that a restart had quarantined and the run has published again
            collect_asides(self._store.root, "v", up_to=newest, keep=set(read_pins(self._store.root)))
        kept = {version: reason for version, reason in reasons.items() if reason}
        kept |= dict.fromkeys(restored, "leased or pinned while it was being removed")
        return CollectReport(removed, dict(sorted(kept.items())), restored)

    # -- the steps of the protocol

    def _hide(self, version: int) -> None:
        """Rename a version so that no reader finds it (step H)."""
        with contextlib.suppress(FileNotFoundError):  # withdrawn by the trainer meanwhile
            lost_replies.rename(self._store.path_of(version), self._hidden_path(version))

    def _wanted(self, hidden: Collection[int], in_use: Collection[int]) -> set[int]:
        """Return the versions held now, with those that they need (step C). New versions count as well."""
        wanted = {*self._held(), *in_use, *self._store.versions()}
        for version in list(wanted):
            if version in hidden:
                with contextlib.suppress(HandoffError):  # its reader cannot read it either, so it holds nothing
                    wanted.update(Handoff.open(self._hidden_path(version)).manifest.needs)
            else:
                wanted.update(self._needed_by(version))
        return wanted

    def _decide(self, hidden: Iterable[int], wanted: Collection[int]) -> tuple[list[int], list[int]]:
        """Decide on all hidden versions (step D); return what was restored and what will be deleted."""
        restored, removed = [], []
        for version in sorted(hidden):
            if version in wanted and self._restore(version):
                restored.append(version)
            else:
                self._doom(version)
                removed.append(version)
        return restored, removed

    def _restore(self, version: int) -> bool:
        """Give a hidden version its name back; return False where a new version has the name."""
        try:
            lost_replies.rename(self._hidden_path(version), self._store.path_of(version))
        except OSError:
            if self._store.path_of(version).exists():
                return False
            raise
        fsync_dir(self._store.root)
        return True

    def _doom(self, version: int) -> None:
        """Mark a version as irrevocably removed, before it is deleted file by file."""
        with contextlib.suppress(FileNotFoundError):
            name = f"{_DOOMED_PREFIX}v{version:06d}-{uuid.uuid4().hex[:8]}"
            lost_replies.rename(self._hidden_path(version), self._store.root / name)

    def _delete_doomed(self) -> None:
        """Delete the versions marked as removed, also those of a collector that died meanwhile."""
        doomed = [name for name in self._names() if name.startswith(_DOOMED_PREFIX)]
        if doomed:
            # otherwise a power failure could bring back the hidden name, which may be restored, without all of its
            # files
            fsync_dir(self._store.root)
        for name in doomed:
            shutil.rmtree(self._store.root / name, ignore_errors=True)

    # -- what is held

    def _held(self) -> dict[int, str]:
        """Return the versions that readers or people hold, and why."""
        reasons = {version: f"pinned by {pin.by}: {pin.reason}" for version, pin in read_pins(self._store.root).items()}
        for record in self._watch.observe():
            if record.acknowledged is not None:
                reasons.setdefault(record.acknowledged, f"served by {record.reader}")
            for version in record.leases:
                reasons.setdefault(version, f"leased by {record.reader}")
        return reasons

    def _is_wrong(self, version: int) -> bool:
        """Return whether the manifest contradicts itself or its directory: no reader will ever have the version.

        HandoffError where it cannot be read now.
        """
        self._needed_by(version)
        return version in self._wrong

    def _needed_by(self, version: int) -> tuple[int, ...]:
        if version not in self._needs:
            try:
                self._needs[version] = self._store.open(version).manifest.needs
            except WrongManifestError as error:
                _log.warning("version %d is unreadable, so it needs nothing: %s", version, error)
                self._wrong.add(version)
                self._needs[version] = ()
            except HandoffError as error:
                if version not in self._store.versions():
                    return ()  # withdrawn meanwhile
                raise HandoffError(
                    f"version {version} stays, but what it needs is unknown, so nothing is removed: {error}"
                ) from error
        return self._needs[version]

    def _hidden_path(self, version: int) -> Path:
        return self._store.root / f"{HIDDEN_PREFIX}{self._store.path_of(version).name}"

    def _hidden(self) -> list[int]:
        return sorted(int(match[1]) for name in self._names() if (match := _HIDDEN.fullmatch(name)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._store.root)
        except FileNotFoundError:
            return []

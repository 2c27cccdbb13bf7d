"""Serving the newest versions from memory of the trainer's ranks, over Mooncake's transfer engine.

A failure here never fails a publication: the version is written to the share then, from which engines read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from hpcrl.config.handoff import HandoffConfig
from hpcrl.mooncake import TransferEngine
from hpcrl.network.interfaces import address_towards
from hpcrl.runs.role import RoleContext
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.weights.format.fabric_record import FabricPeer, Stretch, seal_header
from hpcrl.weights.format.manifest import Manifest
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, CANARY
from hpcrl.weights.write.fabric_records import FabricRecords
from hpcrl.weights.write.fabric_ring import FabricRing
from hpcrl.weights.write.handoff_writer import PreparedVersion, VersionCommitter
from hpcrl.weights.write.own_units import Digests

_log = logging.getLogger(__name__)

_COMPANIONS = ("config.json", ADAPTER_CONFIG, CANARY)
"""Small files that engines read of a version."""
_MOST_SKIPPED = 32
"""Maximum number of versions that are published between two tries to get memory."""


class FabricPlace(NamedTuple):
    """Address and token with which a rank serves.

    Attributes
    ----------
    secret:
        Token of the run.
    host:
        Returns the address at which engines reach this process; asked when the first version is served.
    """

    secret: str
    host: Callable[[], str]


def fabric_place(settings: HandoffConfig, context: RoleContext) -> FabricPlace | None:
    """Return where a rank of a run serves versions; None where engines read files only.

    Raises
    ------
    RunDirError
        The token cannot be read.
    """
    if settings.transport != "fabric":
        return None

    def host() -> str:
        # engines and orchestrator are on the same network
        return address_towards(urlsplit(context.endpoints().one("orchestrator")).hostname or "")

    return FabricPlace(context.credentials.token, host)


class ServedPart(NamedTuple):
    """Range of a file of a version that this rank serves: its first byte in the file, and its data."""

    file: str
    offset: int
    data: memoryview


class AnnouncedContent(NamedTuple):
    """Version that was announced before it is written.

    Attributes
    ----------
    digests:
        Hashed chunks of all ranks.
    prepared:
        Its manifest and small files, on rank 0.
    """

    digests: list[Digests]
    prepared: PreparedVersion | None


class _Filled(NamedTuple):
    """Answer of a rank to a version that it should serve.

    Attributes
    ----------
    peer:
        Where it serves; None where it does not.
    stretches:
        Its parts of files; None: those of the version before.
    why:
        Reason why it does not serve; empty if it does.
    has_ring:
        Whether it has registered memory.
    """

    peer: FabricPeer | None
    stretches: tuple[Stretch, ...] | None
    why: str
    has_ring: bool


class FabricServing:
    """Serves versions. All ranks call every method together, but for `announce` and `announce_early`."""

    def __init__(self, ranks: Ranks, output: VersionCommitter, settings: HandoffConfig, place: FabricPlace) -> None:
        """Prepare; no memory is taken yet.

        Parameters
        ----------
        ranks:
            Publishing ranks.
        output:
            Store of the versions.
        settings:
            Protocol, versions that are served at one time, and timeouts.
        place:
            Address and token.
        """
        self._ranks, self._output, self._settings, self._place = ranks, output, settings, place
        self._records = FabricRecords(
            output.fence, protocol=settings.fabric_protocol, timeout_s=settings.fabric_timeout_s
        )
        self._engine: TransferEngine | None = None
        self._ring: FabricRing | None = None
        # the same on all ranks, which have seen the answers of all: why one has no memory, the tries for it in a row,
        # and the versions that follow before the next try
        self._lack, self._tries, self._pause = "", 0, 0
        self._failed_before = 0
        self._own: tuple[Stretch, ...] | None = None
        self._all: list[tuple[Stretch, ...]] = [()] * ranks.size
        self._peers: list[FabricPeer] = []
        self._version = -1
        self.why = ""
        """Reason on rank 0 why the last version is not served; empty if it is."""

    @property
    def failures(self) -> int:
        """Return the number of versions in a row, up to the last one, that are not served; for rank 0."""
        return self._failed_before + 1 if self.why else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of registered memory of this rank."""
        return 0 if self._ring is None else self._ring.nbytes

    def fill(self, version: int, parts: Sequence[ServedPart], *, capacity: int) -> None:
        """Copy a version into registered memory. Nothing is announced, and failures are only remembered. Collective.

        Memory that one rank cannot get is asked for again after 1, 2, 4 and up to `_MOST_SKIPPED` versions, in which no
        rank copies anything.

        Parameters
        ----------
        parts:
            This rank's parts of the files of the version, hashed and written already.
        capacity:
            Maximum bytes of this rank's parts of any version.
        """
        if version != self._version:
            self._begin(version)
            if self._pause:
                self._pause -= 1
                self._note(self._lack)
                return
        elif self._lack:
            return  # it could not be announced for the same reason, and is written now
        if self._ranks.rank == 0:
            try:
                # what its memory is used for again is not announced any more
                self._records.keep_newest(self._settings.fabric_versions - 1)
            except OSError as error:
                _log.warning("old records of the fabric stay: %s", error)
        answers = self._ranks.gather(self._fill(version, parts, capacity))
        self._peers = [answer.peer for answer in answers if answer.peer is not None]
        for rank, answer in enumerate(answers):
            if answer.stretches is not None:
                self._all[rank] = answer.stretches
        failed = [f"rank {rank}: {answer.why}" for rank, answer in enumerate(answers) if answer.why]
        self.why, why = "", "; ".join(failed[:3])
        if all(answer.has_ring for answer in answers):
            self._lack, self._tries = "", 0
        else:
            self._lack, self._pause = why, min(1 << self._tries, _MOST_SKIPPED)
            self._tries += 1
        self._note(why)

    def _begin(self, version: int) -> None:
        """Begin with the next version; how the one before ended is known now."""
        if self._failed_before and not self.why and self._ranks.rank == 0:
            words = "version %d was served over the fabric again, after %d versions that were not"
            _log.info(words, self._version, self._failed_before)
        self._failed_before = self.failures
        self._version, self._peers, self.why = version, [], ""

    def _fill(self, version: int, parts: Sequence[ServedPart], capacity: int) -> _Filled:
        rank, fence = self._ranks.rank, self._output.fence
        parts = [part for part in parts if part.data.nbytes]
        size = sum(part.data.nbytes for part in parts)
        try:
            if self._ring is None:
                self._ring = self._new_ring(capacity)

            def seal(sequence: int, length: int) -> bytes:
                return seal_header(
                    self._place.secret,
                    nonce=fence.nonce,
                    attempt=fence.token,
                    version=version,
                    rank=rank,
                    sequence=sequence,
                    size=length,
                )

            peer = self._ring.fill([part.data for part in parts], seal)
        except Exception as error:  # noqa: BLE001 - other ranks wait for the answer, and the share has the version
            why = f"{len(parts)} parts of {size:,} bytes: {error}"
            return _Filled(None, None, why, has_ring=self._ring is not None)
        stretches, at = [], 0
        for part in parts:
            stretches.append(Stretch(part.file, part.offset, part.data.nbytes, rank, at))
            at += part.data.nbytes
        own = tuple(stretches)
        changed = own != self._own
        self._own = own
        return _Filled(peer, own if changed else None, "", has_ring=True)

    def _new_ring(self, capacity: int) -> FabricRing:
        settings = self._settings
        # it has threads and a port: one that has no memory yet is used by the next try
        if self._engine is None:
            self._engine = TransferEngine(self._place.host(), settings.fabric_protocol)
        return FabricRing(
            self._engine,
            slots=settings.fabric_versions,
            slot_bytes=capacity,
            read_only=settings.fabric_protocol == "tcp",
        )

    def announce(self, manifest: Manifest) -> None:
        """Record the version that `fill` was given last, so that engines find it; on rank 0, before it has its name."""
        if self.why or self._version != manifest.version:
            return
        try:
            self._records.write(manifest, self._peers, self._all)
        except OSError as error:
            self._note(f"its record cannot be written: {error}")

    def announce_early(self, manifest: Manifest, small: Mapping[str, bytes]) -> bool:
        """Announce the version that `fill` was given last, before it is durable; on rank 0.

        Parameters
        ----------
        manifest:
            Manifest of the version.
        small:
            Contents of its small files; engines get those that differ from the start model's.

        Returns
        -------
        bool
            Whether engines can have it; else the reason is noted.
        """
        if self.why or self._version != manifest.version:
            return False
        try:
            self._records.announce(manifest, {name: small[name] for name in _COMPANIONS if name in small})
        except OSError as error:
            self._note(f"its announcement cannot be written: {error}")
        else:
            self.announce(manifest)
        return not self.why

    def _note(self, why: str) -> None:
        # each version has its event; the log has the first one of a row
        if why and self._ranks.rank == 0 and not self._failed_before:
            _log.warning("version %d is not served over the fabric: %s", self._version, why)
        self.why = why

    def close(self) -> None:
        """Serve nothing more, for the way out. Local."""
        if self._ranks.rank == 0:
            self._records.clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._engine = None

"""A writer that serves versions of `handoff_lab` over the fabric, without torch; also as a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from handoff_lab import model_directory, publish, write_files

from hpcrl.mooncake import TransferEngine
from hpcrl.network.credentials import TOKEN_FILE, ensure_token, read_token
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter
from hpcrl.weights.format.fabric_record import Stretch, seal_header
from hpcrl.weights.write.fabric_records import FabricRecords
from hpcrl.weights.write.fabric_ring import FabricRing
from hpcrl.weights.write.handoff_writer import PreparedVersion

SPAWN = multiprocessing.get_context("spawn")


class FabricWriter:
    """Publishes versions, and serves each from ``ranks`` rings that take turns by ``piece`` bytes."""

    def __init__(
        self,
        root: Path,
        *,
        attempt: int = 1,
        ranks: int = 2,
        slots: int = 1,
        piece: int = 6000,
        timeout_s: float = 20.0,
        slot_bytes: int = 1 << 20,
    ) -> None:
        self.writer = VersionCommitter.claim(root, attempt)
        ensure_token(root)
        self.token = read_token(root / TOKEN_FILE)
        self.records = FabricRecords(self.writer.fence, protocol="tcp", timeout_s=timeout_s)
        self.ranks, self.slots, self.piece = ranks, slots, piece
        self.engine = TransferEngine("127.0.0.1", "tcp")
        self.announced: dict[int, PreparedVersion] = {}
        self.rings = [FabricRing(self.engine, slots=slots, slot_bytes=slot_bytes, read_only=True) for _ in range(ranks)]

    def publish(self, version: int, **shape: int) -> None:
        """Write a version to the share, and serve it."""
        publish(self.writer, version, model_directory(self.writer.root.parent / "model"), **shape)
        self.serve(version)

    def announce(self, version: int, **shape: int) -> None:
        """Serve a version whose files are in the stage, where no reader looks, and announce it."""
        model = model_directory(self.writer.root.parent / "model")
        results = write_files(self.writer, version, **shape)
        prepared = self.writer.prepare(version=version, shards=results, model_dir=model, producer="lab")
        self.announced[version] = prepared
        self.serve(version)

    def make_durable(self, version: int) -> None:
        """Give an announced version its name."""
        prepared = self.announced[version]
        self.writer.commit(version, lambda: prepared)
        del self.announced[version]

    def serve(self, version: int, *, corrupt: int | None = None) -> None:
        """Serve a version of the share or of the stage; with ``corrupt`` the byte of this number is another one."""
        if version in self.announced:
            handoff = Handoff(self.writer.staged(version), self.announced[version].manifest)
        else:
            handoff = HandoffStore(self.writer.root).open(version)
        parts: list[list[memoryview]] = [[] for _ in range(self.ranks)]
        stretches: list[list[Stretch]] = [[] for _ in range(self.ranks)]
        filled = [0] * self.ranks
        files = {piece.file for pieces in handoff.manifest.changes.values() for piece in pieces}
        count = 0
        for path in [*handoff.shards, *(handoff.path / name for name in sorted(files))]:
            data = bytearray(path.read_bytes())
            if corrupt is not None and 0 <= corrupt < len(data):
                data[corrupt] ^= 1
            corrupt = None if corrupt is None else corrupt - len(data)
            for offset in range(0, len(data), self.piece):
                rank, size = count % self.ranks, min(self.piece, len(data) - offset)
                count += 1
                parts[rank].append(memoryview(data)[offset : offset + size])
                stretches[rank].append(Stretch(path.name, offset, size, rank, filled[rank]))
                filled[rank] += size
        self.records.keep_newest(self.slots - 1)
        fence = self.writer.fence
        peers = []
        for rank, ring in enumerate(self.rings):

            def seal(sequence: int, size: int, rank: int = rank) -> bytes:
                return seal_header(
                    self.token,
                    nonce=fence.nonce,
                    attempt=fence.token,
                    version=version,
                    rank=rank,
                    sequence=sequence,
                    size=size,
                )

            peers.append(ring.fill(parts[rank], seal))
        if version in self.announced:
            self.records.announce(handoff.manifest, {"config.json": self.announced[version].small["config.json"]})
        self.records.write(handoff.manifest, peers, [tuple(own) for own in stretches])


def _serve(
    connection: Connection,
    root: Path,
    settings: dict[str, Any],
    versions: dict[int, dict[str, Any]],
    announced: dict[int, dict[str, Any]],
) -> None:
    writer = FabricWriter(root, **settings)
    for version, shape in versions.items():
        writer.publish(version, **shape)
    for version, shape in announced.items():
        writer.announce(version, **shape)
    connection.send("served")
    while (order := connection.recv()) is not None:
        version, changes = order
        writer.serve(version, **changes)
        connection.send("served")
    os._exit(0)  # threads of the engine would be waited for


class WriterProcess:
    """A `FabricWriter` in a process of its own, which can be stopped and killed."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self._connection = process, connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def serve(self, version: int, **changes: Any) -> None:
        """Let it serve a version, as `FabricWriter.serve` does."""
        self._connection.send((version, changes))
        assert self._connection.recv() == "served"


@contextmanager
def writer_process(
    root: Path,
    versions: dict[int, dict[str, Any]],
    announced: dict[int, dict[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[WriterProcess]:
    """Start a process that publishes ``versions`` (with their shapes), and announces others; kill it at the end."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(there, root, settings, versions, announced or {}), daemon=True)
    process.start()
    there.close()
    try:
        assert here.recv() == "served"
        yield WriterProcess(process, here)
    finally:
        process.kill()
        process.join()

"""Versions pulled over the fabric while something goes wrong at a random transfer: right bytes, always.

Half of the versions are announced and not durable. Of these a reader gets the right bytes, or those of the newest
durable version.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fabric_lab import FabricWriter, writer_process
from handoff_lab import check_content

from hpcrl.errors import HandoffError
from hpcrl.mooncake import TransferEngine, shared_engine
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

SHAPE = {"tensors": 4, "words": 3000}
DATA = 4 * 8 * 3000
SETTINGS = ReaderSettings(segment_bytes=16 << 10, pace=Pace(120.0, 1 << 20), streams=2)
#: transfers of a whole version: of each segment, for each rank, a header, data, and the header again
TRANSFERS = 36
FAULTS = ("none", "byte", "header", "overwrite", "mixed", "unregister", "record", "attempt", "durable")
#: of a version that is announced: what reading it may end in
OUTCOMES = ("fabric", "share", "older")


class FaultyReads:
    """Reads of a transfer engine; one of them, by its number, meets a fault: before it, behind it, or meanwhile."""

    def __init__(self, engine: TransferEngine, at: int, when: str, fault: Callable[[], None]) -> None:
        self._read, self._at, self._when, self._fault = engine.read, at, when, fault
        self._lock, self._count, self._over = threading.Lock(), 0, threading.Event()
        self.happened = False

    def __call__(self, endpoint: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> None:
        with self._lock:
            number, self._count = self._count, self._count + 1
            if number == self._at:
                self.happened = True
        if number != self._at:
            return self._read(endpoint, local, remote, sizes)
        thread = threading.Thread(target=self._do_fault)
        if self._when == "behind":
            try:
                return self._read(endpoint, local, remote, sizes)
            finally:
                self._do_fault()
        thread.start()
        if self._when == "before":
            thread.join()
        self._read(endpoint, local, remote, sizes)
        thread.join()
        return None

    def _do_fault(self) -> None:
        try:
            self._fault()
        finally:
            self._over.set()

    def end(self) -> None:
        """Let no fault begin any more, and wait for one that did: a reader may give a transfer up meanwhile."""
        with self._lock:
            self._at = -1
        assert not self.happened or self._over.wait(60), "the fault did not end within 60 s"


class FabricTrials:
    """Trials in one store, with a writer in this process.

    Attributes
    ----------
    counts:
        Trials, and by fault: how often the version came whole over the fabric, how often the share had to help, and (of
        versions that are only announced) how often an older version was taken.
    problems:
        Trials in which a wrong byte was served, or nothing.
    """

    def __init__(self, directory: Path, *, seed: int) -> None:
        self.root, self.counts, self.problems = directory / "weights", Counter[str](), []
        self._random, self._seed, self._attempt, self._version = random.Random(seed), seed, 0, 0
        self._writer = self._new_writer()

    def _new_writer(self) -> FabricWriter:
        self._attempt += 1
        return FabricWriter(self.root, attempt=self._attempt, timeout_s=60.0, slot_bytes=DATA)

    def close(self) -> None:
        """Give memory back."""
        for ring in self._writer.rings:
            ring.close()

    def trial(self) -> None:
        """Publish a version, read it while a fault happens, and compare every byte."""
        kind, early = self._random.choice(FAULTS), self._random.random() < 0.5
        when, at = self._random.choice(("before", "behind", "meanwhile")), self._random.randrange(TRANSFERS)
        self._version += 1
        version = self._version
        if early and HandoffStore(self.root).versions():
            self._writer.announce(version, **SHAPE)
        else:
            self._writer.publish(version, **SHAPE)
        engine = shared_engine("127.0.0.1", "tcp")
        reads = FaultyReads(engine, at, when, lambda: self._injure(kind, version))
        engine.read = reads  # type: ignore[method-assign]
        try:
            self._read(version, kind, f"{kind} {when} transfer {at}")
        finally:
            del engine.read
            reads.end()
        # some versions become durable late, others never
        if version in self._writer.announced and kind != "attempt" and self._random.random() < 0.5:
            self._writer.make_durable(version)
        if kind in ("unregister", "attempt") and reads.happened:
            if kind == "attempt":
                self.close()
            self._writer = self._new_writer()

    def _read(self, version: int, kind: str, what: str) -> None:
        was_durable = version in HandoffStore(self.root).versions()
        with Subscriber(self.root, None, SETTINGS) as reader:
            outcome = "nothing"
            try:
                result = reader.load_newest(check_content, at_most=version)
                older = result.version != version
                # a durable version is always had, and of others the newest durable one
                right = result.value == DATA and (not older or not was_durable)
                outcome = "older" if older else "share" if reader.share.bytes_read else "fabric"
            except (AssertionError, HandoffError) as error:
                right, what = False, f"{what}: {error}"
            if not right:
                self.problems.append(f"seed {self._seed}, trial {self.counts['trials']}: {what}: {outcome}")
            self.counts["trials"] += 1
            self.counts["announced"] += not was_durable
            self.counts[f"{kind}: {outcome}"] += 1

    def _injure(self, kind: str, version: int) -> None:
        ring = self._random.choice(self._writer.rings)
        if kind == "byte":
            ring._memory[self._random.randrange(ring._memory.nbytes)] ^= 1 << self._random.randrange(8)
        elif kind == "header":
            ring._memory[:64] = 0
        elif kind == "overwrite":
            served = max(HandoffStore(self.root).versions())
            self._writer.serve(served, corrupt=self._random.randrange(DATA))
        elif kind == "mixed":  # the header stays, as of memory that others write
            begin = self._random.randrange(4096, ring._memory.nbytes)
            ring._memory[begin : begin + self._random.randrange(1, 20_000)] ^= 0x5A
        elif kind == "unregister":
            for each in self._writer.rings:
                each.close()
        elif kind == "record":
            self._writer.records.clear()
        elif kind == "durable" and version in self._writer.announced:
            self._writer.make_durable(version)
        elif kind == "attempt":
            VersionCommitter.claim(self.root, self._attempt + 1)
            self._attempt += 1

    def kill(self) -> None:
        """Kill the process of a writer at a random transfer of a reader, also between announcement and write."""
        root = self.root.with_name(f"killed-{sum(self.counts[f'kill: {outcome}'] for outcome in OUTCOMES)}")
        announced = {2: SHAPE} if self._random.random() < 0.5 else {}
        with writer_process(root, {1: SHAPE}, announced, timeout_s=60.0, slot_bytes=DATA) as process:
            engine = shared_engine("127.0.0.1", "tcp")
            when, at = self._random.choice(("before", "behind", "meanwhile")), self._random.randrange(TRANSFERS)
            reads = FaultyReads(engine, at, when, process.process.kill)
            engine.read = reads  # type: ignore[method-assign]
            own, self.root = self.root, root
            try:
                self._read(2 if announced else 1, "kill", f"kill {when} transfer {at}")
            finally:
                self.root = own
                del engine.read
                reads.end()
        assert HandoffStore(root).versions() == [1]

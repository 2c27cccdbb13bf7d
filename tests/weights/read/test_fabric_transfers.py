"""Waiting for transfers of the fabric, and the memory that they write to."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fabric_lab import FabricWriter
from handoff_lab import check_content

from hpcrl import mooncake
from hpcrl.mooncake import PendingTransferError, TransferEngine, shared_engine
from hpcrl.weights.read import fabric_reader
from hpcrl.weights.read.pull_buffers import PullBuffer, PullBuffers
from hpcrl.weights.read.segment_memory import FileMemory, OwnMemory
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

SHAPE = {"tensors": 6, "words": 5000}
DATA = 6 * 8 * 5000
SETTINGS = ReaderSettings(segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20))


class StandInEngine:
    """The transfer engine's calls, with transfers that end after given numbers of looks.

    Attributes
    ----------
    looks:
        Of each transfer, by the address here: looks until it ends, and the state in which it ends.
    """

    def __init__(
        self,
        looks: dict[int, tuple[int, int]],
        refused: tuple[int, ...] = (),
        refusal_s: float = 0.0,
        silence_s: float = 0.0,
    ) -> None:
        self.looks, self._refused, self._refusal_s, self._silence_s = dict(looks), refused, refusal_s, silence_s
        self.now_s = 0.0
        self.calls: list[str] = []

    def batch_transfer_async_read(self, endpoint: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        (address,) = local
        if address not in self._refused:
            return address
        self.now_s += self._silence_s
        return 0

    def batch_transfer_sync_read(self, endpoint: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        self.calls.append(f"sync {local[0]}")
        self.now_s += self._refusal_s
        return -1

    def transfer_check_status(self, transfer: int) -> int:
        self.calls.append(f"look {transfer}")
        left, state = self.looks[transfer]
        self.looks[transfer] = (left - 1, state)
        return state if left <= 1 else 0


EngineOver = Callable[[StandInEngine], TransferEngine]


class Clock:
    """A clock that moves with pauses alone."""

    def __init__(self, engine: StandInEngine) -> None:
        self._engine = engine

    def monotonic(self) -> float:
        return self._engine.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self._engine.calls.append("pause")
        self._engine.now_s += seconds


@pytest.fixture
def engine_over(monkeypatch: pytest.MonkeyPatch) -> EngineOver:
    def make(stand_in: StandInEngine) -> TransferEngine:
        engine = TransferEngine.__new__(TransferEngine)
        engine._engine = stand_in
        monkeypatch.setattr(mooncake, "time", Clock(stand_in))
        return engine

    return make


def read_all(engine: TransferEngine, addresses: tuple[int, ...]) -> None:
    engine.read("peer:1", addresses, [7] * len(addresses), [100] * len(addresses))


def test_each_look_at_a_transfer_follows_a_pause(engine_over: EngineOver) -> None:
    stand_in = StandInEngine({1: (40, 1)})
    read_all(engine_over(stand_in), (1,))
    assert stand_in.calls == ["look 1", *["pause", "look 1"] * 39]


def test_a_read_that_fails_waits_for_its_other_stretches(engine_over: EngineOver) -> None:
    stand_in = StandInEngine({1: (1, -1), 2: (9, 1)})
    with pytest.raises(OSError, match="peer:1 did not give 200 bytes"):
        read_all(engine_over(stand_in), (1, 2))
    # the second one had ended before the memory was free for another read
    first_try = stand_in.calls[: stand_in.calls.index("look 1", 1)]
    assert first_try.count("look 2") == 9


def test_a_stretch_that_cannot_begin_fails_behind_those_that_have(engine_over: EngineOver) -> None:
    stand_in = StandInEngine({1: (3, 1)}, refused=(2,))
    with pytest.raises(OSError, match="peer:1 did not give"):
        read_all(engine_over(stand_in), (1, 2))
    assert stand_in.calls[0] == "sync 2"
    assert stand_in.calls.count("look 1") >= 3


@pytest.mark.parametrize("refusal_s", [5.0, 31.0])
def test_a_transfer_that_the_engine_itself_has_given_up_may_write_at_any_time(
    engine_over: EngineOver, refusal_s: float
) -> None:
    stand_in = StandInEngine({}, refused=(1,), refusal_s=refusal_s)
    with pytest.raises(PendingTransferError) as caught:
        read_all(engine_over(stand_in), (1,))
    assert caught.value.is_pending()
    assert stand_in.calls == ["sync 1"]


def test_a_peer_that_is_silent_from_the_beginning_takes_no_memory_away(engine_over: EngineOver) -> None:
    """A stopped process has its connections made by the kernel; no transfer begins, however long that takes."""
    stand_in = StandInEngine({}, refused=(1,), silence_s=60.0)
    with pytest.raises(OSError, match="peer:1 did not give 100 bytes") as caught:
        read_all(engine_over(stand_in), (1,))
    assert not isinstance(caught.value, PendingTransferError)
    # the other call, which would take as long again, was left out
    assert not stand_in.calls


@pytest.mark.parametrize("state", [0, -2])
def test_a_transfer_that_may_still_write_is_named(engine_over: EngineOver, state: int) -> None:
    stand_in = StandInEngine({1: (1, state)})
    with pytest.raises(PendingTransferError, match="in 30 s") as caught:
        read_all(engine_over(stand_in), (1,))
    assert caught.value.is_pending()
    stand_in.looks[1] = (1, -1)
    assert not caught.value.is_pending()
    assert not caught.value.is_pending()


# -- memory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def writer(root: Path) -> Iterator[FabricWriter]:
    made = FabricWriter(root)
    made.publish(1, **SHAPE)
    yield made
    for ring in made.rings:
        ring.close()


def test_a_peer_with_the_name_of_an_old_one_is_looked_up_again(
    writer: FabricWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine has remembered of a name is wrong once another process has it, and stays wrong."""
    old = shared_engine("127.0.0.1", "tcp")

    def refuse(endpoint: str, *_: object) -> None:
        raise OSError(f"{endpoint} did not give it")

    monkeypatch.setattr(old, "read", refuse)
    with Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert reader.fabric.failures >= 1
        assert shared_engine("127.0.0.1", "tcp") is not old
        before = reader.fabric.bytes_read
        writer.publish(2, **SHAPE)
        with reader.reading(2) as reading:
            assert check_content(reading) == DATA
        assert reader.fabric.bytes_read >= before + DATA


def test_others_cannot_write_into_what_is_pulled_over_tcp(writer: FabricWriter, root: Path) -> None:
    stranger, room = TransferEngine("127.0.0.1", "tcp"), mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    stranger.register(address, len(room))
    with Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        buffer = reader.fabric.buffers.take(1 << 14, "tcp")
        assert buffer is not None
        own = shared_engine("127.0.0.1", "tcp").endpoint
        for at in (0, 4096, 8000):
            assert stranger._engine.transfer_sync_write(own, address, buffer.address + at, 512) != 0
        assert bytes(buffer.data(64)) != bytes(room[:64]) or not any(buffer.data(64))


def test_a_buffer_that_a_transfer_may_still_write_to_is_not_used_again(writer: FabricWriter, root: Path) -> None:
    pending = [True]
    error = PendingTransferError("slow", lambda: pending[0])
    with Subscriber(root, "r", SETTINGS) as reader:
        buffers, streams = reader.fabric.buffers, SETTINGS.streams
        taken = take_all(buffers)
        for buffer in taken:
            buffers.give_back(buffer, error)
        assert buffers.take(100, "tcp", timeout_s=600.0) is None
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert (reader.fabric.bytes_read, reader.fabric.failures) == (0, 0)
        pending[0] = False
        again = [buffers.take(100, "tcp") for _ in range(streams + 1)]
        assert again[-1] is None
        assert set(again[:-1]) == set(taken)


def take_all(buffers: PullBuffers) -> list[PullBuffer]:
    taken = [buffer for _ in range(SETTINGS.streams) if (buffer := buffers.take(100, "tcp"))]
    assert len(taken) == SETTINGS.streams
    assert buffers.take(100, "tcp") is None
    return taken


def test_a_pull_waits_for_a_buffer_of_another_one(
    writer: FabricWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Subscriber(root, "r", SETTINGS) as reader:
        buffers, waits = reader.fabric.buffers, threading.Event()
        wait_for = buffers._changed.wait_for

        def announced_wait(*arguments: Any) -> Any:
            waits.set()
            return wait_for(*arguments)

        taken = take_all(buffers)
        monkeypatch.setattr(buffers._changed, "wait_for", announced_wait)
        with reader.reading(1) as reading, ThreadPoolExecutor(1) as pool:
            read = pool.submit(check_content, reading)
            assert waits.wait(60)
            for buffer in taken:
                buffers.give_back(buffer)
            assert read.result(60) == DATA
        assert (reader.share.bytes_read, reader.fabric.failures) == (0, 0)


def test_pulls_that_take_too_long_are_not_waited_for() -> None:
    buffers = PullBuffers(streams=2, segment_bytes=4096)
    first, second = buffers.take(10, "tcp"), buffers.take(10, "tcp")
    assert first is not None
    assert second is not None
    for buffer in (first, second):
        buffers.give_up(buffer)
    assert buffers.take(10, "tcp", timeout_s=600.0) is None
    buffers.give_back(second)
    assert buffers.take(10, "tcp") is second


def test_a_segment_that_is_read_is_in_memory_that_no_pull_uses() -> None:
    buffers = PullBuffers(streams=1, segment_bytes=4096)
    buffer = buffers.take(3, "tcp")
    assert buffer is not None
    buffer.data(3)[:] = b"abc"
    view = buffers.lend(buffer, 3)
    part = view[1:]
    other = buffers.take(3, "tcp")
    assert other is not None
    assert other is not buffer
    buffers.give_back(other)
    del view
    assert bytes(part) == b"bc"
    assert buffers.take(3, "tcp") is other
    buffers.give_back(other)
    buffers._free.clear()
    del part
    assert buffers.take(3, "tcp") is buffer  # it came back with the last view


def test_buffers_of_another_size_or_protocol_are_replaced() -> None:
    buffers = PullBuffers(streams=1, segment_bytes=10)
    for size, protocol in ((10, "tcp"), (20, "tcp"), (5, "rdma"), (5, "tcp")):
        buffer = buffers.take(size, protocol)
        assert buffer is not None
        assert (buffer.size >= size, buffer.protocol) == (True, protocol)
        buffers.give_back(buffer)
    buffers.close()
    assert buffers.take(5, "tcp") is None


class Registrations:
    """The memory that is registered with an engine, by its address."""

    forgotten = False

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def register(self, address: int, size: int) -> None:
        assert address not in self.sizes
        self.sizes[address] = size

    def unregister(self, address: int) -> None:
        del self.sizes[address]


def test_a_forgotten_engine_keeps_no_memory() -> None:
    buffer = PullBuffer(10, "rdma")
    engines: list[Any] = [Registrations() for _ in range(3)]
    for engine in (engines[0], engines[1], engines[0]):
        buffer.register(engine)
    assert [len(engine.sizes) for engine in engines] == [1, 1, 0]
    mooncake.forget_engine(engines[0])
    buffer.register(engines[2])
    assert [len(engine.sizes) for engine in engines] == [0, 1, 1]
    assert buffer.registered == {engines[1], engines[2]}


@pytest.mark.parametrize("cached", [False, True])
def test_registered_buffers_are_compared_behind_a_copy(
    writer: FabricWriter, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    tcp = shared_engine("127.0.0.1", "tcp")
    monkeypatch.setattr(fabric_reader, "_engine_towards", lambda endpoint, protocol: tcp)
    writer.records._protocol = "rdma"
    settings = ReaderSettings(
        segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20), cache_dir=tmp_path / "node" if cached else None
    )
    writer.serve(1)
    with Subscriber(root, "r", settings) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert (reader.share.bytes_read, reader.fabric.failures) == (0, 0)
        assert all(buffer.registered for buffer in reader.fabric.buffers._free)
    put = OwnMemory.put if not cached else FileMemory.put

    def put_and_change(self: Any, data: memoryview) -> None:
        """Let another process write into the registered buffer, before it is copied."""
        data[5] ^= 1
        put(self, data)

    monkeypatch.setattr(OwnMemory if not cached else FileMemory, "put", put_and_change)
    with Subscriber(root, "s", settings) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert "other content than the manifest says" in reader.fabric.problem
        assert reader.fabric.bytes_read == 0
        assert reader.share.bytes_read > 0


def test_a_full_cache_does_not_end_the_fabric(
    writer: FabricWriter, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = ReaderSettings(segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20), cache_dir=tmp_path / "node")
    monkeypatch.setattr(os, "pwrite", refuse)
    with Subscriber(root, "r", settings) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert "cannot be used: [Errno 28]" in caplog.text
        assert (reader.fabric.failures, reader.share.bytes_read) == (0, 0)


def test_memory_that_is_kept_is_not_copied() -> None:
    data, kept, copied = memoryview(bytearray(b"12345678")), OwnMemory(8), OwnMemory(8)
    kept.keep(data)
    copied.put(data)
    data[0] = ord("9")
    assert (bytes(kept.room()), bytes(copied.room())) == (b"92345678", b"12345678")


def test_a_file_has_what_was_put_and_what_was_filled(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        memory = FileMemory(fd, 6)
        memory.put(memoryview(b"abcdef"))
        assert path.read_bytes() == b"abcdef"
        room = memory.room()
        assert bytes(room) == b"abcdef"
        room[:3] = b"xyz"
        assert path.read_bytes() == b"xyzdef"
    finally:
        os.close(fd)

"""How a rank waits for blocks of others, and what it leaves to them: in one process, with a clock of the test."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warehouse_testing import Disk

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.warehouse.sharing import SharedBlocks, Sharing


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "payload")


def loader(disk: Disk, loaded: list[str]) -> Callable[[PayloadPlace, memoryview], None]:
    def load(place: PayloadPlace, memory: memoryview) -> None:
        loaded.append(key_of(place))
        memory[:] = read_payload(disk.directory, place)

    return load


class Clock:
    """Sleeping takes no time, and is counted; ``until`` is called before each sleep.

    A wait of more than 10,000 pauses fails: no deadline of these tests has as many.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: Callable[[int], None]) -> None:
        self.now_s, self.pauses = 1000.0, list[float]()
        self._until = until
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self._until(len(self.pauses))
        assert len(self.pauses) < 10_000, "a deadline that does not come"
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture
def held(base: Path, disk: Disk) -> tuple[SharedBlocks, PayloadPlace, int]:
    """A block that another rank fetches: the lock of its part."""
    place, _ = disk.write(1)
    blocks = SharedBlocks(base, "0" * 32, limit_bytes=1 << 20)
    blocks.begin(1)
    fd = os.open(f"{blocks.directory}/000001/{key_of(place)}.part", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return blocks, place, fd


def test_who_waits_looks_less_and_less_often(
    held: tuple[SharedBlocks, PayloadPlace, int], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, place, fd = held
    loaded: list[str] = []

    def until(pauses: int) -> None:
        if pauses == 9:  # the other one ends without the block
            os.close(fd)

    clock = Clock(monkeypatch, until)
    found = blocks.read(place, loader(disk, loaded))
    assert (found.own, loaded) == (True, [key_of(place)])
    assert clock.pauses == [0.002, 0.004, 0.008, 0.016, 0.032, *[0.05] * 5]


def test_missing_peers_are_waited_for_with_a_timeout(
    held: tuple[SharedBlocks, PayloadPlace, int], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes, and a second more for each 20 MB of the block."""
    blocks, place, fd = held
    clock, began_s = Clock(monkeypatch, lambda pauses: None), 1000.0
    with pytest.raises(TimeoutError, match="does not finish"):
        blocks.read(place, loader(disk, []))
    assert 120.0 <= clock.now_s - began_s <= 120.2
    clock.now_s = began_s = 5000.0
    clock.pauses.clear()
    large = PayloadPlace("another", 0, 200_000_000, "")
    part = os.open(f"{blocks.directory}/000001/{key_of(large)}.part", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(part, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError):
        blocks.read(large, loader(disk, []))
    assert 130.0 <= clock.now_s - began_s <= 130.2
    os.close(part)
    os.close(fd)


def test_a_rank_that_keeps_the_room_locked_is_waited_for_ten_seconds(
    base: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = disk.write(1)
    blocks = SharedBlocks(base, "0" * 32, limit_bytes=1 << 20)
    blocks.begin(1)
    fd = os.open(blocks.directory / "room", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    clock = Clock(monkeypatch, lambda pauses: None)
    with pytest.raises(TimeoutError, match="room locked"):
        blocks.read(place, loader(disk, []))
    assert 10.0 <= clock.now_s - 1000.0 <= 10.1
    os.close(fd)
    assert blocks.read(place, loader(disk, [])).own


@pytest.mark.parametrize(("less", "fits"), [(0, True), (1, False)])
def test_blocks_may_take_all_of_the_limit(base: Path, disk: Disk, less: int, fits: bool) -> None:
    places = [disk.write(seed)[0] for seed in range(2)]
    blocks = SharedBlocks(base, "0" * 32, limit_bytes=sum(place.bytes for place in places) - less)
    blocks.begin(1)
    assert blocks.read(places[0], loader(disk, [])).own
    if fits:
        assert blocks.read(places[1], loader(disk, [])).own
    else:
        with pytest.raises(OSError, match="would take more than"):
            blocks.read(places[1], loader(disk, []))


def test_a_step_that_cannot_be_removed_costs_nothing(base: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank removes it too, or a server forgets the directory."""
    blocks = SharedBlocks(base, "0" * 32, limit_bytes=1 << 20)
    for step in (1, 2):
        blocks.begin(step)
    assert {path.name for path in blocks.directory.iterdir()} >= {"000001", "000002"}

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(16, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        blocks.begin(3)
    assert {path.name for path in blocks.directory.iterdir()} >= {"000001", "000002", "000003"}
    blocks.begin(3)
    names = {path.name for path in blocks.directory.iterdir() if path.name.isdecimal()}
    assert names == {"000002", "000003"}


def test_a_block_that_cannot_be_fetched_ahead_is_an_error_where_it_is_read(base: Path, disk: Disk) -> None:
    """What is fetched ahead is fetched for others: who reads it says why not."""
    places = [disk.write(seed)[0] for seed in range(3)]
    blocks = SharedBlocks(base, "0" * 32, limit_bytes=1 << 20)
    blocks.begin(1)

    def load(place: PayloadPlace, memory: memoryview) -> None:
        if place == places[0]:
            raise ValueError("it has another content")
        if place == places[1]:
            raise OSError(5, "Input/output error")
        memory[:] = read_payload(disk.directory, place)

    blocks.fetch(places, load)
    assert [path.name for path in (blocks.directory / "000001").iterdir()] == [key_of(places[2])]
    with pytest.raises(ValueError, match="another content"):
        blocks.read(places[0], load)
    with pytest.raises(OSError, match="Input/output error"):
        blocks.read(places[1], load)
    assert blocks.read(places[2], load).own


def test_a_block_is_fetched_again_thrice_where_it_is_damaged_in_memory(base: Path, disk: Disk) -> None:
    place, _ = disk.write(1)
    blocks, loaded = SharedBlocks(base, "0" * 32, limit_bytes=1 << 20), list[str]()
    blocks.begin(1)

    def load(place: PayloadPlace, memory: memoryview) -> None:
        loader(disk, loaded)(place, memory)
        memory[0] ^= 1
        blocks._own.clear()  # as another rank, which looks at it

    class Others(dict[str, memoryview]):
        """Nothing that this rank has fetched is its own."""

        def __setitem__(self, key: str, value: memoryview) -> None:
            """Forget it."""

    blocks._own = Others()
    with pytest.raises(ValueError, match="is not what was written"):
        blocks.read(place, load)
    assert len(loaded) == 3


def test_what_this_node_has_in_memory_is_not_shared_once_more(tmp_path: Path, base: Path, disk: Disk) -> None:
    (tmp_path / "memory").mkdir()
    warehouse = EmbeddedWarehouse(tmp_path / "memory", limit_bytes=1 << 20)
    place, block = disk.write(1)
    assert warehouse.put(place, block)
    sharing = Sharing(base, limit_bytes=1 << 20)
    reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
    reader.share(sharing, 1)
    reader.prepare([place])
    assert bytes(reader.read(place)) == b"".join(block)
    assert (dict(reader.sources), list(base.iterdir())) == ({"node": 1}, [])
    # nor is what comes from no warehouse at all
    reader = BlockReader(None, disk.directory)
    reader.share(sharing, 1)
    assert bytes(reader.read(place)) == b"".join(block)
    assert (dict(reader.sources), list(base.iterdir())) == ({"disk": 1}, [])
    # of another node's warehouse it is
    shutil.rmtree(warehouse.directory)
    reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
    reader.share(sharing, 1)
    reader.prepare([place])
    assert len(list(base.glob("*/000001/*"))) == 1
    assert bytes(reader.read(place)) == b"".join(block)
    sharing.close()

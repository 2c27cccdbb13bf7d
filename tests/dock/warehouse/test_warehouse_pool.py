"""The warehouse in Mooncake Store, with a real master: blocks are verified, and what is lost is read from disk."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from free_ports import free_blocks
from patience import wait_for
from warehouse_testing import Disk

from hpcrl.config.rollouts import WarehouseConfig
from hpcrl.dock.ledger.entries import Finished, PayloadPlace, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.warehouse import mooncake_payloads as module
from hpcrl.dock.warehouse.interface import Pool, key_of
from hpcrl.dock.warehouse.mooncake_payloads import MooncakeWarehouse, leave_pools
from hpcrl.dock.warehouse.pool_master import PoolMaster
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.errors import HpcrlError, MissingExtraError
from hpcrl.mooncake import load_client, program_of_master
from hpcrl.rollouts.batches.warehouse import make_warehouse

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="mooncake is not installed: hpcrl[store-cpu]"
)
LIMIT = 32 << 20


@pytest.fixture(scope="module")
def warehouse() -> Iterator[MooncakeWarehouse]:
    (port,) = free_blocks([2])
    warehouse = MooncakeWarehouse(Pool("127.0.0.1", port, "tcp"), limit_bytes=LIMIT)
    yield warehouse
    leave_pools()
    warehouse.close()
    assert warehouse.master.pid is None


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    # names of blocks are those of files: each test has its own
    return Disk(tmp_path / "payload", writer=1 + sum(request.node.name.encode()))


def test_ranks_read_what_was_put_and_what_is_released_is_gone(warehouse: MooncakeWarehouse, disk: Disk) -> None:
    blocks = [disk.write(seed, numbers=2000 * seed) for seed in (1, 2, 3)]
    assert all(warehouse.put(*each) for each in blocks)
    places = [place for place, _ in blocks]
    reader = BlockReader(warehouse.location, Path("/nowhere"))
    reader.prepare(places[:2])
    assert [reader.read(place) for place in places] == [b"".join(block) for _, block in blocks]
    assert reader.read(places[0]).readonly
    assert reader.sources == {"pool": 4}
    assert warehouse.figures()[:2] == (3, sum(place.bytes for place in places))
    warehouse.release(places)  # also those that were just read
    assert warehouse.figures()[:2] == (0, 0)
    wait_for(lambda: warehouse._store.is_exist(key_of(places[2])) == 0, 10.0, "removed objects")
    again = BlockReader(warehouse.location, disk.directory)
    assert [again.read(place) for place in places] == [b"".join(block) for _, block in blocks]
    assert again.sources == {"disk": 3}
    assert again.problems[0] == f"{key_of(places[0])}: the pool does not have it"


@pytest.mark.parametrize("damage", ["changed", "cut", "longer"])
def test_what_is_damaged_in_the_pool_is_read_from_disk_and_reported(
    warehouse: MooncakeWarehouse, disk: Disk, damage: str
) -> None:
    (place, block), (other, other_block) = disk.write(1), disk.write(2)
    assert warehouse.put(place, block)
    assert warehouse.put(other, other_block)
    whole = b"".join(block)
    told = {"changed": whole[:-1] + b"\xff", "cut": whole[: len(whole) // 2], "longer": whole + b"more"}[damage]
    client = load_client()
    assert warehouse._store.remove(key_of(place), True) == 0
    assert warehouse._store.put(key_of(place), told, client.ReplicateConfig()) == 0
    reader = BlockReader(warehouse.location, disk.directory)
    reader.prepare([place, other])
    assert reader.read(place) == whole
    assert reader.read(other) == b"".join(other_block)
    assert reader.sources == {"disk": 1, "pool": 1}
    (problem,) = reader.problems
    assert {"changed": "is not what was written", "cut": f"gave {len(whole) // 2} of", "longer": "with code"}[
        damage
    ] in problem
    (disk.directory / place.file).unlink()
    with pytest.raises(FileNotFoundError):
        reader.read(place)
    warehouse.release([place, other])


def test_a_full_store_is_reported_and_loses_nothing(warehouse: MooncakeWarehouse, disk: Disk) -> None:
    blocks = [disk.write(seed, numbers=(12 << 20) // 8) for seed in range(3)]
    assert [warehouse.put(*each) for each in blocks] == [True, True, False]
    assert warehouse.full
    assert warehouse.figures().refused >= 1
    assert warehouse.figures().held_bytes <= LIMIT
    reader = BlockReader(warehouse.location, disk.directory)
    assert [reader.read(place) for place, _ in blocks] == [b"".join(block) for _, block in blocks]
    assert reader.sources == {"pool": 2, "disk": 1}
    warehouse.release([place for place, _ in blocks[:1]])
    assert not warehouse.full
    wait_for(lambda: warehouse.put(*blocks[2]), 10.0, "room")
    warehouse.release([place for place, _ in blocks[1:]])


def test_a_killed_master_costs_reads_from_disk_until_it_is_back(
    warehouse: MooncakeWarehouse, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.5)
    (place, block), (late, late_block) = disk.write(1), disk.write(2)
    assert warehouse.put(place, block)
    reader = BlockReader(warehouse.location, disk.directory)
    assert reader.read(place) == b"".join(block)
    first = warehouse.master.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: warehouse.master.pid not in (first, None), 20.0, "another master")
    assert reader.read(place) == b"".join(block)
    assert reader.sources == {"pool": 1, "disk": 1}
    wait_for(lambda: warehouse.put(late, late_block), 30.0, "a put into the pool of another master")
    assert not warehouse.full
    assert reader.read(late) == b"".join(late_block)
    assert reader.sources == {"pool": 2, "disk": 1}
    warehouse.release([place, late])
    assert warehouse.figures()[:2] == (0, 0)


@pytest.mark.campaign  # 30 s, as long as Mooncake waits
def test_a_master_that_hangs_is_waited_for_once(
    warehouse: MooncakeWarehouse, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place, block), (other, other_block) = disk.write(1), disk.write(2)
    assert warehouse.put(place, block)
    assert warehouse.put(other, other_block)
    leave_pools()
    reader = BlockReader(warehouse.location, disk.directory)
    assert reader.read(place) == b"".join(block)
    master = warehouse.master.pid
    assert master is not None
    os.kill(master, signal.SIGSTOP)
    # its threads may answer until one of them has seen the signal
    wait_for(lambda: psutil.Process(master).status() == psutil.STATUS_STOPPED, 20.0, "a stopped master")
    try:
        assert reader.read(place) == b"".join(block)
        asked: list[object] = []
        monkeypatch.setattr(module, "_join", lambda *_, **__: asked.append(1))
        monkeypatch.setattr(module, "_joined", {})
        assert reader.read(other) == b"".join(other_block)
    finally:
        os.kill(master, signal.SIGCONT)
    assert asked == []
    assert reader.sources == {"pool": 1, "disk": 2}
    assert "answered with code -901" in reader.problems[0]
    assert "did not answer: it is asked again after 120 s" in reader.problems[1]
    warehouse.release([place, other])


@pytest.mark.campaign  # 30 s, as long as Mooncake waits
def test_a_writer_waits_once_for_a_master_that_hangs_and_entries_are_durable_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warehouse of its own: the pool forgets a client whose master was silent for so long."""
    (port,) = free_blocks([2])
    warehouse = MooncakeWarehouse(Pool("127.0.0.1", port, "tcp"), limit_bytes=LIMIT)
    calls: list[int] = []
    store = warehouse._store

    class Counted:
        def put_from(self, *arguments: object) -> int:
            calls.append(len(list(read_entries(log.ledger_dir))))
            return int(store.put_from(*arguments))

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    monkeypatch.setattr(warehouse, "_store", Counted())
    log = RolloutLog(tmp_path, attempt=1, restored=0, limit_s=5.0, warehouse=warehouse)
    arrays = {"token_ids": np.arange(5, dtype=np.int32)}
    master = warehouse.master.pid
    assert master is not None
    os.kill(master, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(master).status() == psutil.STATUS_STOPPED, 20.0, "a stopped master")
    try:
        for member in range(4):
            log.finish(b"", arrays, partial(finished, member)).result(120.0)
    finally:
        os.kill(master, signal.SIGCONT)
    # the entries that were on disk when the pool was asked: that of the beginning, and the rollout's own
    assert calls == [2]
    assert warehouse.figures().refused == 4
    assert caplog.text.count("did not answer: it is asked again after 120 s") == 1
    log.close()
    warehouse.close()


def test_a_master_that_cannot_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its program is away, as on a file system that is."""
    program = tmp_path / "master"
    program.symlink_to(program_of_master())
    monkeypatch.setattr("hpcrl.dock.warehouse.pool_master.bound_command", lambda command: [str(program), *command[1:]])
    monkeypatch.setattr("hpcrl.dock.warehouse.pool_master._AGAIN_S", 0.05)
    (port,) = free_blocks([2])
    master = PoolMaster(Pool("127.0.0.1", port, "tcp"))
    first = master.pid
    assert first is not None
    program.rename(tmp_path / "away")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: "cannot be started" in caplog.text, 20.0, "a start that fails")
    (tmp_path / "away").rename(program)
    wait_for(lambda: master.pid not in (first, None), 20.0, "another master")
    assert caplog.text.count("cannot be started") == 1
    master.close()
    assert master.pid is None


def finished(member: int, place: PayloadPlace) -> Finished:
    return Finished(
        group=0,
        member=member,
        environment="words",
        prompt_index=0,
        reward=1.0,
        tokens=5,
        sampled_tokens=5,
        first_version=0,
        last_version=0,
        ended_s=0.0,
        payload=place,
    )


def test_where_mooncake_is_missing_a_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"hint: .* -m pip install '.*\[store\]'"):
        make_warehouse(WarehouseConfig(backend="mooncake"), url="http://127.0.0.1:9")


def test_where_its_port_is_taken_a_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else listens there, who is not a master."""
    monkeypatch.setattr("hpcrl.dock.warehouse.mooncake_payloads.half_at_most", lambda *_: 1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1] - 1}"
        with pytest.raises(HpcrlError, match=r"(?s)port .* is taken.*hint: "):
            make_warehouse(WarehouseConfig(backend="mooncake"), url=url)

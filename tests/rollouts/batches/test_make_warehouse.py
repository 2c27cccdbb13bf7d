"""Which warehouse of rollouts a recipe gets, and where its readers find it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.rollouts import WarehouseConfig
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, Pool
from hpcrl.errors import HpcrlError
from hpcrl.rollouts.batches import warehouse as module
from hpcrl.rollouts.batches.warehouse import WarehouseProcess, make_warehouse
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir

GIB = 1 << 30


class Joined:
    """Stands for a warehouse in Mooncake's pool, which needs the package."""

    def __init__(self, pool: Pool, *, limit_bytes: int) -> None:
        self.pool, self.limit_bytes, self.location = pool, limit_bytes, Location("", pool=pool)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_a_pool_has_the_port_behind_that_of_the_orchestrator(monkeypatch: pytest.MonkeyPatch, protocol: Any) -> None:
    monkeypatch.setattr(module, "MooncakeWarehouse", Joined)
    config = WarehouseConfig(backend="mooncake", protocol=protocol, limit_gib=0.5)
    made = make_warehouse(config, url="http://node-7:5000")
    assert isinstance(made, Joined)
    assert (made.pool, made.limit_bytes) == (Pool("node-7", 5001, protocol), GIB // 2)


def test_a_pool_that_cannot_be_joined_ends_the_start_and_names_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pool: Pool, *, limit_bytes: int) -> Any:
        raise OSError("no device of this name")

    monkeypatch.setattr(module, "MooncakeWarehouse", refuse)
    with pytest.raises(HpcrlError, match=r"no device of this name\n    hint: .*embedded needs no pool"):
        make_warehouse(WarehouseConfig(backend="mooncake"), url="http://node-7:5000")


def test_files_lie_in_the_directory_of_the_recipe_and_take_what_it_says(tmp_path: Path) -> None:
    config = WarehouseConfig(directory=str(tmp_path), limit_gib=3 / 1024)
    made = make_warehouse(config, url="http://node-7:5000")
    assert isinstance(made, EmbeddedWarehouse)
    assert made.directory.parent == tmp_path
    assert made.figures().limit_bytes == 3 << 20
    made.close()


def test_without_a_directory_there_is_none() -> None:
    assert make_warehouse(WarehouseConfig(directory=None), url="http://node-7:5000") is None


def test_where_the_directory_cannot_be_used_a_run_starts_without_a_warehouse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "missing"
    assert make_warehouse(WarehouseConfig(directory=str(missing)), url="http://node-7:5000") is None
    assert str(missing) in caplog.text
    assert "ranks read rollouts from the shared filesystem\n    hint: rollouts.warehouse.directory" in caplog.text


def process_of(run_dir: Path, warehouse: Any, *, url: str) -> tuple[WarehouseProcess, Coroutine[Any, Any, None]]:
    """Make the process of a warehouse, and return what it would run."""
    context = RoleContext(RunDir(run_dir), attempt=2, role="orchestrator", replica=0, rank=0)
    context.run.attempt_dir(2).mkdir(parents=True)
    Endpoints(urls={"orchestrator": [url]}, servers={}).write(context.run, 2)
    spawned: list[Coroutine[Any, Any, None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        spawned.append(work)
        return asyncio.get_running_loop().create_task(asyncio.sleep(0))

    return WarehouseProcess(context, warehouse, spawn=spawn), spawned[0]


async def test_files_are_found_by_readers_of_the_node_before_a_server_runs(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    warehouse = EmbeddedWarehouse(tmp_path / "memory", limit_bytes=1 << 20)
    process, work = process_of(tmp_path, warehouse, url="http://node-7:5000")
    assert process.locate() == Location(str(warehouse.directory), "node-7", 0)
    work.close()
    warehouse.close()


async def test_a_pool_is_found_by_its_master_and_nothing_else_is_served(tmp_path: Path) -> None:
    pool = Pool("node-7", 5001, "tcp")
    joined = object.__new__(module.MooncakeWarehouse)
    joined.location = Location("", pool=pool)
    process, work = process_of(tmp_path, joined, url="http://node-7:5000")
    assert process.locate() == Location("", pool=pool)
    await work  # ends at once
    assert process.pid is None


async def test_without_a_warehouse_nothing_is_found_and_nothing_is_served(tmp_path: Path) -> None:
    process, work = process_of(tmp_path, None, url="http://node-7:5000")
    assert process.locate() is None
    await work


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_who_is_on_the_same_machine_maps_the_files_and_is_served_nothing(tmp_path: Path, host: str) -> None:
    (tmp_path / "memory").mkdir()
    warehouse = EmbeddedWarehouse(tmp_path / "memory", limit_bytes=1 << 20)
    process, work = process_of(tmp_path, warehouse, url=f"http://{host}:5000")
    await work
    assert process.pid is None
    warehouse.close()

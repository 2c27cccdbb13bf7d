"""Warehouses: a block is read from the node's memory, from a server, or from the durable file, and always verified."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from patience import patience
from warehouse_testing import Disk

from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.frames import HEAD, Answer, Request, frame
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.network.credentials import Credentials, ensure_token
from hpcrl.processes.interpreter import module_command


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def warehouse(base: Path) -> Iterator[EmbeddedWarehouse]:
    warehouse = EmbeddedWarehouse(base, limit_bytes=1 << 20)
    yield warehouse
    warehouse.close()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "payload")


def test_a_rank_of_the_same_node_maps_what_was_put(warehouse: EmbeddedWarehouse, disk: Disk) -> None:
    place, block = disk.write(1)
    assert warehouse.put(place, block)
    (disk.directory / place.file).unlink()
    reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
    assert reader.read(place) == b"".join(block)
    assert reader.sources == {"node": 1}
    assert warehouse.figures()[0::2] == (1, 1 << 20)
    assert warehouse.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in warehouse.directory.iterdir()} == {0o600}


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "link"])
def test_what_is_damaged_in_memory_is_read_from_disk_and_reported(
    warehouse: EmbeddedWarehouse, disk: Disk, damage: str
) -> None:
    (place, block), (other, other_block) = disk.write(1), disk.write(2)
    assert warehouse.put(place, block)
    assert warehouse.put(other, other_block)
    path = warehouse.directory / key_of(place)
    if damage == "changed":
        with path.open("r+b") as file:
            file.seek(place.bytes - 1)
            file.write(b"\xff")
    elif damage == "cut":
        os.truncate(path, 100)
    elif damage == "missing":
        path.unlink()
    else:
        path.unlink()
        path.symlink_to(warehouse.directory / key_of(other))
    reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
    assert reader.read(place) == b"".join(block)
    assert reader.read(other) == b"".join(other_block)
    assert reader.sources == {"disk": 1, "node": 1}
    assert [problem.partition(":")[0] for problem in reader.problems] == [key_of(place)]
    (disk.directory / place.file).write_bytes(b"")
    with pytest.raises(ValueError, match="bytes before the end of a rollout"):
        reader.read(place)


def test_a_full_store_is_reported_and_loses_nothing(base: Path, disk: Disk) -> None:
    blocks = [disk.write(seed) for seed in range(4)]
    warehouse = EmbeddedWarehouse(base, limit_bytes=100_000)  # two blocks of 40 kB
    assert [warehouse.put(*each) for each in blocks[:3]] == [True, True, False]
    assert warehouse.full
    assert warehouse.figures().refused == 1
    assert warehouse.figures().held_bytes <= 100_000
    reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
    assert [bytes(reader.read(place)) for place, _ in blocks[:3]] == [b"".join(block) for _, block in blocks[:3]]
    assert reader.sources == {"node": 2, "disk": 1}
    warehouse.release([blocks[0][0]])
    assert not warehouse.full
    held = warehouse.figures().held_bytes
    assert warehouse.put(*blocks[3])
    assert warehouse.figures().held_bytes == held  # the pages of the block that was released
    assert bytes(reader.read(blocks[3][0])) == b"".join(blocks[3][1])
    # a large block takes the room of files that are kept for small ones
    warehouse.release([blocks[1][0], blocks[3][0]])
    large, block = disk.write(9, numbers=12_000)
    assert warehouse.put(large, block)
    assert warehouse.figures().held_bytes <= 100_000
    warehouse.close()
    assert not warehouse.directory.exists()
    assert not warehouse.put(*blocks[0])


def test_half_of_what_is_free_is_left_to_others(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = shutil.disk_usage(base).free
    warehouse = EmbeddedWarehouse(base, limit_bytes=free)
    limit = warehouse.figures().limit_bytes
    warehouse.close()
    assert 0.4 * free < limit < 0.6 * free
    assert "half of what is free" in caplog.text


def test_a_successor_removes_what_the_dead_left_and_nothing_else(base: Path, warehouse: EmbeddedWarehouse) -> None:
    code = (
        "import os, sys; from pathlib import Path; from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse\n"
        "print(EmbeddedWarehouse(Path(sys.argv[1]), limit_bytes=1).directory, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    dead = Path(subprocess.run([sys.executable, "-c", code, base], capture_output=True, text=True).stdout.strip())  # noqa: PLW1510
    assert dead.is_dir()
    EmbeddedWarehouse(base, limit_bytes=1).close()
    assert list(base.iterdir()) == [warehouse.directory]


@pytest.fixture
def served(warehouse: EmbeddedWarehouse, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Location]]:
    """A server, and the warehouse as another node sees it."""
    ensure_token(tmp_path)
    token = ["--token-file", f"{tmp_path}/token", "--attempt", "3"]
    options = ["--directory", str(warehouse.directory), "--host", "127.0.0.1", *token]
    command = module_command(sys.executable, "hpcrl.dock.warehouse.server", *options)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Location("/nowhere", "127.0.0.1", int(process.stdout.readline()))
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_another_node_is_served_and_a_killed_server_costs_nothing(
    warehouse: EmbeddedWarehouse, disk: Disk, served: tuple[subprocess.Popen[str], Location], tmp_path: Path
) -> None:
    process, location = served
    blocks = [disk.write(seed) for seed in range(4)]
    for each in blocks[:3]:
        assert warehouse.put(*each)
    own = Credentials.of_run(tmp_path, 3).headers["Authorization"]
    reader = BlockReader(location, disk.directory, authorization=own)
    for place, block in blocks[:2]:
        assert reader.read(place) == b"".join(block)
    assert reader.read(blocks[3][0]) == b"".join(blocks[3][1])  # was not put
    assert reader.sources == {"server": 2, "disk": 1}
    for other in ("", Credentials.of_run(tmp_path, 2).headers["Authorization"], "Bearer " + "0" * 64 + ".3"):
        stranger = BlockReader(location, disk.directory, authorization=other)
        assert stranger.read(blocks[0][0]) == b"".join(blocks[0][1])
        assert stranger.sources == {"disk": 1}
        assert "answered 40" in stranger.problems[0]
    process.kill()
    process.wait(10.0 * patience())
    assert reader.read(blocks[2][0]) == b"".join(blocks[2][1])
    assert reader.sources["disk"] == 2


def ask_server(location: Location, request: Request) -> tuple[Answer, bytes]:
    """Send one request over a connection that asks for nothing else; return the answer and the bytes behind it."""
    with socket.create_connection((location.host, location.port), 20.0 * patience()) as connection:
        connection.sendall(frame(request))
        connection.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    (length,) = HEAD.unpack(data[: HEAD.size])
    end = HEAD.size + length
    return msgspec.msgpack.decode(data[HEAD.size : end], type=Answer), data[end:]


def test_only_blocks_are_served_and_only_bytes_that_they_have(
    warehouse: EmbeddedWarehouse, disk: Disk, served: tuple[subprocess.Popen[str], Location], tmp_path: Path
) -> None:
    _, location = served
    place, block = disk.write(1)
    assert warehouse.put(place, block)
    own = Credentials.of_run(tmp_path, 3).headers["Authorization"]
    for name in ("note", f"{key_of(place)}.part"):
        (warehouse.directory / name).write_bytes(b"not a block")
        (warehouse.directory / name).chmod(0o600)
        assert ask_server(location, Request(own, name, 0, 4)) == (
            Answer(400, "no block can have this name, or these bytes"),
            b"",
        )
    outside = f"../{warehouse.directory.name}/{key_of(place)}"
    for key, offset, length in ((outside, 0, 4), (key_of(place), -1, 4), (key_of(place), 0, 0)):
        assert ask_server(location, Request(own, key, offset, length))[0].status == 400
    whole = b"".join(block)
    assert ask_server(location, Request(own, key_of(place), 3, 4)) == (Answer(200), whole[3:7])
    assert ask_server(location, Request(own, key_of(place), 0, 1 << 30))[0].status == 404


def test_the_server_ends_with_who_started_it(served: tuple[subprocess.Popen[str], Location]) -> None:
    process, _ = served
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10.0 * patience()) == 0


def test_a_server_of_blocks_says_what_it_must_be_given() -> None:
    found = subprocess.run(
        module_command(sys.executable, "hpcrl.dock.warehouse.server"),
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert found.returncode == 2
    assert "the following arguments are required: --directory, --host" in found.stderr

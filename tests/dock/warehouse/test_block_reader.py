"""What a reader of another node's warehouse does with each answer of its server: the durable file has every block."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from warehouse_testing import Block, Disk

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse import reading
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.frames import HEAD, LONGEST, Answer, Request, frame
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.storage.msgspec_types import decode_msgpack

Reply = Callable[[socket.socket], object]


class Server:
    """Stands in for the server of a warehouse: each connection is answered by the next of ``replies``, then closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.location = Location("/nowhere", "127.0.0.1", self._listener.getsockname()[1])
        self.replies: list[list[Reply]] = []
        self.requests: list[list[Request]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            asked: list[Request] = []
            self.requests.append(asked)
            with connection:
                for reply in self.replies.pop(0):
                    if not (head := connection.recv(HEAD.size, socket.MSG_WAITALL)):
                        break
                    (length,) = HEAD.unpack(head)
                    asked.append(decode_msgpack(connection.recv(length, socket.MSG_WAITALL), Request))
                    reply(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60.0)


def give(block: Block, *, piece: int = 1 << 20) -> Reply:
    """Answer with a block, some bytes at a time."""

    def reply(connection: socket.socket) -> None:
        data = frame(Answer(200)) + b"".join(block)
        for begin in range(0, len(data), piece):
            connection.sendall(data[begin : begin + piece])

    return reply


def say(data: bytes) -> Reply:
    return lambda connection: connection.sendall(data)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def reader(server: Server, disk: Disk) -> Iterator[BlockReader]:
    with closing(BlockReader(server.location, disk.directory, authorization="Bearer x")) as reader:
        yield reader


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "payload")


@pytest.fixture
def blocks(disk: Disk) -> list[tuple[PayloadPlace, Block]]:
    return [disk.write(seed) for seed in range(3)]


def test_a_connection_serves_one_block_after_the_other(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]]
) -> None:
    server.replies = [[give(block, piece=7001) for _, block in blocks]]
    for place, block in blocks:
        found = reader.read(place)
        assert found == b"".join(block)
        assert found.readonly
    assert (reader.sources, reader.problems, reader.unshared) == ({"server": 3}, [], [])
    assert server.requests == [[Request("Bearer x", key_of(place), 0, place.bytes) for place, _ in blocks]]


def test_a_server_may_take_longer_to_answer_than_to_connect(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CONNECT_S", 0.05)
    place, block = blocks[0]

    def late(connection: socket.socket) -> None:
        time.sleep(0.2)
        give(block)(connection)

    server.replies = [[late]]
    assert reader.read(place) == b"".join(block)
    assert (reader.sources, reader.problems) == ({"server": 1}, [])


def test_a_server_that_says_nothing_is_not_waited_for_without_end(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RECEIVE_S", 0.05)
    ended = threading.Event()
    server.replies = [[lambda _: ended.wait(60.0)]]
    place, block = blocks[0]
    assert reader.read(place) == b"".join(block)
    ended.set()
    assert (reader.sources, reader.problems) == ({"disk": 1}, [f"{key_of(place)}: timed out"])


#: what a server says, and what is said of it
BAD_ANSWERS = {
    "nothing": (b"", "the server of the warehouse closed the connection"),
    "half a head": (b"\0\0", "the server of the warehouse closed the connection"),
    "too long": (HEAD.pack(LONGEST + 1), "the server of a warehouse sent 4097 bytes as an answer"),
    "half an answer": (frame(Answer(404, "gone"))[:-1], "the server of the warehouse closed the connection"),
    "no block": (frame(Answer(404, "gone")), "the server of the warehouse answered 404: gone"),
    "half a block": (frame(Answer(200)) + b"half", "the server of the warehouse closed the connection"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_after_a_bad_answer_the_block_is_read_from_disk_and_the_next_is_asked_for_again(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]], name: str
) -> None:
    data, problem = BAD_ANSWERS[name]
    (place, block), (other, other_block), _ = blocks
    server.replies = [[say(data)], [give(other_block)]]
    assert reader.read(place) == b"".join(block)
    assert reader.problems == [f"{key_of(place)}: {problem}"]
    assert reader.read(other) == b"".join(other_block)
    assert reader.sources == {"disk": 1, "server": 1}
    assert len(server.requests) == 2


def test_an_answer_may_be_as_long_as_the_limit(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]]
) -> None:
    answer = frame(Answer(404, "x" * (LONGEST - 10)))
    answer = frame(Answer(404, "x" * (2 * LONGEST - 10 - (len(answer) - HEAD.size))))
    assert len(answer) == HEAD.size + LONGEST
    server.replies = [[say(answer)]]
    reader.read(blocks[0][0])
    assert "answered 404: xxx" in reader.problems[0]


def test_a_block_with_another_content_is_read_from_disk(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]]
) -> None:
    (place, block), (_, other_block), _ = blocks
    assert sum(map(len, block)) == sum(map(len, other_block))
    server.replies = [[give(other_block)]]
    assert reader.read(place) == b"".join(block)
    assert reader.sources == {"disk": 1}
    assert len(reader.problems) == 1


def test_a_server_that_is_not_there_is_asked_once(disk: Disk, blocks: list[tuple[PayloadPlace, Block]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reader = BlockReader(Location("/nowhere", "127.0.0.1", port), disk.directory)
    for place, block in blocks:
        assert reader.read(place) == b"".join(block)
    assert reader.sources == {"disk": 3}
    assert len(reader.problems) == 1
    assert "refused" in reader.problems[0]


@pytest.mark.parametrize("location", [None, Location("/nowhere")], ids=["no warehouse", "no server"])
def test_where_nothing_is_in_memory_blocks_come_from_disk_without_a_word(
    location: Location | None, disk: Disk, blocks: list[tuple[PayloadPlace, Block]]
) -> None:
    reader = BlockReader(location, disk.directory)
    reader.prepare([place for place, _ in blocks])
    for place, block in blocks:
        assert reader.read(place) == b"".join(block)
    assert (reader.sources, reader.problems) == ({"disk": 3}, [])


def test_a_closed_reader_asks_on_a_new_connection(
    server: Server, reader: BlockReader, blocks: list[tuple[PayloadPlace, Block]]
) -> None:
    server.replies = [[give(blocks[0][1]), give(blocks[1][1])], [give(blocks[1][1])]]
    reader.close()  # of none
    assert reader.read(blocks[0][0]) == b"".join(blocks[0][1])
    reader.close()
    assert reader.read(blocks[1][0]) == b"".join(blocks[1][1])
    assert reader.sources == {"server": 2}
    assert len(server.requests) == 2


def test_what_people_look_at_is_shown_without_its_hash(tmp_path: Path, disk: Disk) -> None:
    """From memory where it is there, else from disk; it counts for nothing."""
    (tmp_path / "memory").mkdir()
    warehouse = EmbeddedWarehouse(tmp_path / "memory", limit_bytes=1 << 20)
    try:
        (place, block), (other, other_block) = disk.write(1), disk.write(2)
        assert warehouse.put(place, block)
        reader = BlockReader(Location(str(warehouse.directory)), disk.directory)
        assert reader.glance(place) == b"".join(block)
        assert reader.glance(other) == b"".join(other_block)
        assert (reader.sources, reader.problems) == ({}, [])
        assert BlockReader(None, disk.directory).glance(other) == b"".join(other_block)
        (disk.directory / place.file).write_bytes(b"")
        assert reader.glance(place) == b"".join(block)
        with pytest.raises(ValueError, match="greater than file size"):
            reader.glance(other)
    finally:
        warehouse.close()

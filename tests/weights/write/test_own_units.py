"""Units of one writer: what is hashed and written, what changes of two images, and where these lie in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpcrl.weights.format.delta import apply_chunk, iter_records
from hpcrl.weights.format.layout import PublishedTensor, layout_shards
from hpcrl.weights.format.manifest import Chunk, Piece
from hpcrl.weights.write.own_units import (
    Delta,
    OwnUnit,
    UnitChunk,
    delta_result,
    delta_tensors,
    encode_delta,
    full_results,
    hash_units,
    hashes_by_offset,
    write_units,
)
from hpcrl.weights.write.writer import FileWriter, preallocate

#: three units in two files; the image begins with bytes that are of no unit, and the last unit lies first in it
UNITS = (
    OwnUnit("one", 100, 12, 10, (UnitChunk("a", 0, 8, 2), UnitChunk("a", 1, 2, 2))),
    OwnUnit("two", 4, 22, 8, (UnitChunk("b", 3, 8, 4),)),
    OwnUnit("one", 300, 4, 8, (UnitChunk("c", 0, 4, 4), UnitChunk("d", 0, 4, 1))),
)
IMAGE = bytes(range(30))


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


#: by hand: place in the file, place in the image
CHUNKS = {
    "one": [
        Chunk(100, 8, digest(IMAGE[12:20])),
        Chunk(108, 2, digest(IMAGE[20:22])),
        Chunk(300, 4, digest(IMAGE[4:8])),
        Chunk(304, 4, digest(IMAGE[8:12])),
    ],
    "two": [Chunk(4, 8, digest(IMAGE[22:30]))],
}


def test_chunks_are_hashed_where_they_lie() -> None:
    assert hash_units(UNITS, memoryview(IMAGE)) == CHUNKS
    assert hash_units((), memoryview(IMAGE)) == {}


@pytest.mark.parametrize("turn", [0, 1, 2, 3, 7])
def test_units_are_written_where_they_belong_whatever_comes_first(tmp_path: Path, turn: int) -> None:
    for file in ("one", "two"):
        preallocate(tmp_path / file, 400)
    with FileWriter(tmp_path, direct=False) as writer:
        found = write_units(writer, UNITS, memoryview(IMAGE), turn)
        writer.sync()
    assert {file: sorted(chunks) for file, chunks in found.items()} == CHUNKS
    one, two = ((tmp_path / file).read_bytes() for file in ("one", "two"))
    assert (one[100:110], one[300:308], two[4:12]) == (IMAGE[12:22], IMAGE[4:12], IMAGE[22:30])
    assert sum(one) + sum(two) == sum(IMAGE[4:])


@pytest.mark.parametrize(
    ("turn", "order"), [(0, [100, 4, 300]), (1, [4, 300, 100]), (2, [300, 100, 4]), (4, [4, 300, 100])]
)
def test_writers_begin_with_different_units(turn: int, order: list[int]) -> None:
    begun: list[int] = []

    class Writer:
        def write(self, file: str, offset: int, data: memoryview, cuts: list[int]) -> list[Chunk]:
            begun.append(offset)
            return []

    writer: Any = Writer()
    write_units(writer, UNITS, memoryview(IMAGE), turn)
    assert begun == order
    assert write_units(writer, (), memoryview(IMAGE), turn) == {}


def test_hashes_of_all_writers_are_found_by_file_and_offset() -> None:
    reports = [{"one": CHUNKS["one"][:2]}, {"one": CHUNKS["one"][2:], "two": CHUNKS["two"]}]
    assert hashes_by_offset(reports) == {
        (file, chunk.offset): chunk.xxh3_128 for file, chunks in CHUNKS.items() for chunk in chunks
    }


# -- changes


def changed(*places: int) -> bytes:
    image = bytearray(IMAGE)
    for place in places:
        image[place] ^= 0x55
    return bytes(image)


def applied(delta: Delta, old: bytes) -> bytes:
    """Apply records to the chunks that they name."""
    image = bytearray(old)
    widths = {cut.tensor: cut.width for unit in UNITS for cut in unit.cuts}
    places = {}
    for unit in UNITS:
        position = unit.at
        for cut in unit.cuts:
            places[cut.tensor, cut.number] = slice(position, position + cut.bytes)
            position += cut.bytes
    for tensor, record in delta.records:
        for number, change in iter_records(record, widths[tensor]):
            apply_chunk(change, memoryview(image)[places[tensor, number]], widths[tensor])
    return bytes(image)


@pytest.mark.parametrize("places", [(), (13,), (20, 21), (29,), (4, 11), tuple(range(4, 30))])
def test_a_delta_gives_the_new_image(places: tuple[int, ...]) -> None:
    new = changed(*places)
    found = encode_delta(UNITS, memoryview(IMAGE), memoryview(new), limit=1000)
    assert found is not None
    assert applied(found, IMAGE) == new
    assert found.digests == hash_units(UNITS, memoryview(new))
    assert found.bytes == sum(len(record) for _, record in found.records)


def test_a_delta_names_the_tensors_that_changed_alone() -> None:
    new = changed(13, 21, 11)
    found = encode_delta(UNITS, memoryview(IMAGE), memoryview(new), limit=1000)
    assert found is not None
    assert [tensor for tensor, _ in found.records] == ["a", "a", "d"]


def test_a_delta_may_be_as_large_as_the_limit() -> None:
    new = changed(13, 25)
    found = encode_delta(UNITS, memoryview(IMAGE), memoryview(new), limit=1000)
    assert found is not None
    assert found.bytes > 0
    assert encode_delta(UNITS, memoryview(IMAGE), memoryview(new), limit=found.bytes) == found
    assert encode_delta(UNITS, memoryview(IMAGE), memoryview(new), limit=found.bytes - 1) is None


def test_changes_of_a_tensor_that_are_neighbours_are_one_piece(tmp_path: Path) -> None:
    records = [("a", b"12"), ("a", b"345"), ("b", b"6"), ("a", b"7890"), ("c", b"xy"), ("c", b"z")]
    made = delta_result(tmp_path, "delta-3", Delta(records, 15, {}), chunk_bytes=4)
    content = b"1234567890xyz"
    assert (tmp_path / "delta-3").read_bytes() == content
    assert (made.name, made.tensors) == ("delta-3", {})
    assert made.changes == {
        "a": (Piece("delta-3", 0, 5), Piece("delta-3", 6, 4)),
        "b": (Piece("delta-3", 5, 1),),
        "c": (Piece("delta-3", 10, 3),),
    }
    assert made.file.bytes == len(content)
    assert made.file.xxh3_128 == "".join(digest(content[i : i + 4]) for i in range(0, len(content), 4))


def test_a_delta_without_changes_is_an_empty_file(tmp_path: Path) -> None:
    made = delta_result(tmp_path, "delta-0", Delta([], 0, {}), chunk_bytes=4)
    assert (made.file.bytes, made.file.xxh3_128, made.changes) == (0, "", {})
    assert (tmp_path / "delta-0").read_bytes() == b""


# -- records of a whole version


def test_records_are_put_together_from_all_reports() -> None:
    tensors = [PublishedTensor("a", "float32", (5,)), PublishedTensor("b", "bfloat16", (3, 2))]
    (shard,) = layout_shards(tensors, 1 << 20)
    (a, at_a), (b, at_b) = shard.tensors
    reports = [
        {shard.file: [Chunk(at_a, 8, "A0"), Chunk(at_a + 16, 4, "A2"), Chunk(at_b + 8, 4, "B1")]},
        {shard.file: [Chunk(at_b, 8, "B0"), Chunk(at_a + 8, 8, "A1")]},
    ]
    (found,) = full_results([shard], reports, 8)
    assert (found.name, found.file.bytes) == (shard.file, shard.bytes)
    assert found.file.xxh3_128 == "".join(digest(shard.head[i : i + 8]) for i in range(0, len(shard.head), 8))
    assert {name: (own.xxh3_128, own.offset, own.bytes, own.shape) for name, own in found.tensors.items()} == {
        a.name: ("A0A1A2", at_a, 20, (5,)),
        b.name: ("B0B1", at_b, 12, (3, 2)),
    }
    assert {own.file for own in found.tensors.values()} == {shard.file}
    without = delta_tensors([shard], reports, 8)
    assert {name: (own.xxh3_128, own.file, own.offset) for name, own in without.items()} == {
        "a": ("A0A1A2", "", 0),
        "b": ("B0B1", "", 0),
    }
    with pytest.raises(KeyError):
        full_results([shard], reports[:1], 8)

"""Files of columns as their writer makes them: one behind the other, each block whole, whatever is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpcrl.dock.ledger import payload
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import PayloadWriter, check_block, read_payload, view_payload, write_pieces


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[PayloadWriter]:
    """Of files of ten bytes."""
    writer = PayloadWriter(tmp_path, 3, file_bytes=10)
    yield writer
    writer.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_blocks_lie_one_behind_the_other(writer: PayloadWriter, tmp_path: Path) -> None:
    first, second = writer.write([[b"abc"], [b"d", memoryview(b"ef")]])
    (third,) = writer.write([[b"ghi"]])
    file = "000003-000001.columns"
    assert [(place.file, place.offset, place.bytes) for place in (first, second, third)] == [
        (file, 0, 3),
        (file, 3, 3),
        (file, 6, 3),
    ]
    assert (tmp_path / file).read_bytes() == b"abcdefghi"
    assert second.xxh3_128 == xxhash.xxh3_128_hexdigest(b"def")
    assert read_payload(tmp_path, second) == b"def"
    assert view_payload(tmp_path, second) == b"def"


def test_a_file_that_is_full_is_followed_by_the_next(writer: PayloadWriter, tmp_path: Path) -> None:
    places = [writer.write([[b"x" * size]])[0] for size in (9, 1, 20, 1)]
    assert [(place.file[7:13], place.offset) for place in places] == [
        ("000001", 0),
        ("000001", 9),
        ("000002", 0),
        ("000003", 0),
    ]
    assert names(tmp_path) == [f"000003-00000{number}.columns" for number in (1, 2, 3)]
    assert [read_payload(tmp_path, place) for place in places] == [b"x" * size for size in (9, 1, 20, 1)]


def test_a_file_that_cannot_be_made_is_tried_again_by_its_name(
    writer: PayloadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that was written before is written anew."""
    first = [writer.write([[b"x" * 10]])[0] for _ in range(2)]

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "open", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="no space"):
                writer.write([[b"y"]])
    (place,) = writer.write([[b"z"]])
    assert place.file == "000003-000003.columns"
    assert [read_payload(tmp_path, each) for each in (*first, place)] == [b"x" * 10, b"x" * 10, b"z"]


def test_what_is_written_again_goes_to_the_same_place(
    writer: PayloadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write([[b"abc"]])

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "not durable")

    with monkeypatch.context() as patch:
        patch.setattr(payload.os, "fsync", refuse)
        with pytest.raises(OSError, match="not durable"):
            writer.write([[b"longer"]])
    (place,) = writer.write([[b"de"]])
    assert (place.offset, read_payload(tmp_path, place)) == (3, b"de")


def test_blocks_are_durable_and_so_are_names_of_files(
    writer: PayloadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    writer.write([[b"abc"]])
    assert [Path(name).name for name in synced] == ["000003-000001.columns", tmp_path.name]
    writer.write([[b"abc"], [b"d"]])
    assert [Path(name).name for name in synced[2:]] == ["000003-000001.columns"]
    writer.write([[b"x" * 9]]), writer.write([[b"y"]])
    assert Path(synced[-1]).name == tmp_path.name


def test_a_closed_writer_continues_in_a_new_file(writer: PayloadWriter, tmp_path: Path) -> None:
    writer.close()
    assert names(tmp_path) == []
    writer.write([[b"a"]])
    writer.close()
    assert writer.write([[b"b"]])[0] == PayloadPlace("000003-000002.columns", 0, 1, xxhash.xxh3_128_hexdigest(b"b"))


@pytest.mark.parametrize("most", [1, 3, 5, 1000])
def test_pieces_are_written_whole_however_few_bytes_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also more pieces than one call takes, empty ones, and those of other numbers than bytes."""
    pieces: list[bytes | memoryview] = [b"", b"ab", memoryview(b"cdefghij").cast("i"), b"", *([b"x"] * 1100)]
    real, most_pieces = os.pwritev, 0

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal most_pieces
        most_pieces = max(most_pieces, len(buffers))
        return real(fd, [memoryview(b"".join(buffers))[:most]], offset)

    monkeypatch.setattr(payload.os, "pwritev", some)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        assert write_pieces(fd, pieces, 7) == 1110
        assert write_pieces(fd, [], 7) == 0
    finally:
        os.close(fd)
    assert (tmp_path / "a").read_bytes() == bytes(7) + b"abcdefghij" + b"x" * 1100
    assert most_pieces <= 1024  # of Linux


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000, 70000])
def test_a_block_is_mapped_wherever_it_lies(tmp_path: Path, offset: int) -> None:
    data = os.urandom(80000)
    (tmp_path / "a").write_bytes(data)
    place = PayloadPlace("a", offset, 9000, xxhash.xxh3_128_hexdigest(data[offset : offset + 9000]))
    assert view_payload(tmp_path, place) == read_payload(tmp_path, place) == data[offset : offset + 9000]


def test_what_is_not_the_block_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    digest = xxhash.xxh3_128_hexdigest(b"6789")
    assert read_payload(tmp_path, PayloadPlace("a", 6, 4, digest)) == b"6789"
    with pytest.raises(ValueError, match=r"^a ends 1 bytes before the end of a rollout"):
        read_payload(tmp_path, PayloadPlace("a", 7, 4, digest))
    with pytest.raises(ValueError, match=r"^the content of a at byte 5 is not what was written"):
        read_payload(tmp_path, PayloadPlace("a", 5, 4, digest))
    with pytest.raises(ValueError, match=r"^a ends 2 bytes before"):
        check_block(b"67", PayloadPlace("a", 6, 4, digest))
    # of numbers as of bytes
    check_block(memoryview(b"6789").cast("i"), PayloadPlace("a", 6, 4, digest))
    with pytest.raises(FileNotFoundError):
        read_payload(tmp_path, PayloadPlace("b", 6, 4, digest))

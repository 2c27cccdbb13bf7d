"""Files that are made before their content is known, and the records of shards: against what is on disk."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import xxhash

from hpcrl.weights.format.layout import PAGE_BYTES, PublishedTensor, layout_shards
from hpcrl.weights.write import writer
from hpcrl.weights.write.writer import FileWriter, preallocate, shard_records


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@pytest.mark.parametrize("head", [b"", b"a head"])
def test_a_file_has_its_size_its_head_and_is_closed(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "shard"
    preallocate(path, 10_000, head)
    assert path.read_bytes() == head.ljust(10_000, b"\0")
    assert str(path) not in open_files()
    # a second writer of the same file is an error, and changes nothing
    with pytest.raises(FileExistsError):
        preallocate(path, 5)
    assert path.stat().st_size == 10_000


def test_a_file_that_cannot_be_synced_is_closed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer.os, "fsync", fail)
    path = tmp_path / "shard"
    with pytest.raises(OSError, match="Input/output error"):
        preallocate(path, 100)
    assert str(path) not in open_files()


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 10, 1 << 20])
def test_records_of_a_shard_are_those_of_its_bytes(chunk_bytes: int) -> None:
    """Chunks of a tensor are counted from its own first byte, those of the head from the file's."""
    tensors = [PublishedTensor("first", "float32", (33, 7)), PublishedTensor("second", "bfloat16", (1000,))]
    (shard,) = layout_shards(tensors, 1 << 30)
    content = bytearray(os.urandom(shard.bytes))
    content[: len(shard.head)] = shard.head
    sizes = {"first": 33 * 7 * 4, "second": 2000}
    starts = {tensor.name: offset for tensor, offset in shard.tensors}
    digests = {
        start: xxhash.xxh3_128_hexdigest(bytes(content[start : min(start + chunk_bytes, starts[name] + size)]))
        for name, size in sizes.items()
        for start in range(starts[name], starts[name] + size, chunk_bytes)
    }
    file, records = shard_records(shard, digests, chunk_bytes)
    head = [shard.head[start : start + chunk_bytes] for start in range(0, len(shard.head), chunk_bytes)]
    assert (file.bytes, file.xxh3_128) == (len(content), "".join(map(xxhash.xxh3_128_hexdigest, head)))
    assert records.keys() == sizes.keys()
    for name, record in records.items():
        assert (record.file, record.offset, record.bytes) == (shard.file, starts[name], sizes[name])
        whole = bytes(content[record.offset : record.offset + record.bytes])
        parts = [whole[start : start + chunk_bytes] for start in range(0, len(whole), chunk_bytes)]
        assert record.xxh3_128 == "".join(map(xxhash.xxh3_128_hexdigest, parts))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("offset", "size"), [(0, 2 * PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES + 77), (5, PAGE_BYTES)])
def test_stretches_are_written_and_hashed_where_they_belong(
    tmp_path: Path, direct: bool, offset: int, size: int
) -> None:
    preallocate(tmp_path / "shard", 4 * PAGE_BYTES)
    # memory of whole pages, which is what direct I/O takes
    data = mmap.mmap(-1, 4 * PAGE_BYTES)
    data[:] = os.urandom(len(data))
    cuts = [100, size - 150, 50]
    with FileWriter(tmp_path, direct=direct) as files:
        chunks = files.write("shard", offset, memoryview(data)[:size], cuts)
        files.sync()
    written = (tmp_path / "shard").read_bytes()
    assert written == bytes(offset) + data[:size] + bytes(4 * PAGE_BYTES - offset - size)
    begins = [offset, offset + 100, offset + size - 50]
    assert [(chunk.offset, chunk.bytes) for chunk in chunks] == list(zip(begins, cuts, strict=True))
    for chunk, begin, cut in zip(chunks, begins, cuts, strict=True):
        assert chunk.xxh3_128 == xxhash.xxh3_128_hexdigest(written[begin : begin + cut])
    assert str(tmp_path / "shard") not in open_files()

"""Pulling versions over the fabric: right bytes, from memory of ranks; every failure ends in a read of the share."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fabric_lab import FabricWriter, writer_process
from handoff_lab import check_content, model_directory, publish, publish_delta
from patience import wait_for

from hpcrl.errors import HandoffError
from hpcrl.mooncake import TransferEngine
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.fabric_record import (
    HEADER_BYTES,
    FabricLayout,
    FabricRecord,
    Stretch,
    decode_fabric_record,
    newest_writer,
    seal_header,
)
from hpcrl.weights.format.segments import SegmentMap
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")

SHAPE = {"tensors": 6, "words": 5000}
DATA = 6 * 8 * 5000
SETTINGS = ReaderSettings(segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20))


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


def read(root: Path, version: int, settings: ReaderSettings = SETTINGS) -> Subscriber:
    """Read a version and compare every byte; return the reader with its counts."""
    with Subscriber(root, "r", settings) as reader:
        with reader.reading(version) as reading:
            assert check_content(reading) == DATA
        return reader


def record_of(writer: FabricWriter, version: int) -> FabricRecord:
    return decode_fabric_record((writer.records.directory / f"v{version:06d}.json").read_bytes())


def test_a_version_is_pulled_from_the_ranks_and_not_from_the_share(writer: FabricWriter, root: Path) -> None:
    for path in HandoffStore(root).open(1).shards:
        path.write_bytes(bytes(path.stat().st_size))  # what is read there would be wrong
    with Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert (reader.share.bytes_read, reader.fabric.failures, reader.fabric.problem) == (0, 0, "")
        assert DATA <= reader.fabric.bytes_read < DATA + 8192
        reader.acknowledge(1)
        (record,) = ReaderWatch(root, expiry_s=60.0).observe()
        assert record.sources.fabric_bytes == reader.fabric.bytes_read
        assert record.sources.fabric_s > 0


def test_processes_of_a_node_share_what_one_of_them_pulls(writer: FabricWriter, root: Path, tmp_path: Path) -> None:
    settings = ReaderSettings(segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20), cache_dir=tmp_path / "node")
    with Subscriber(root, "a", settings) as first, Subscriber(root, "b", settings) as second:
        for reader in (first, second):
            with reader.reading(1) as reading:
                assert check_content(reading) == DATA
        assert DATA <= first.fabric.bytes_read + second.fabric.bytes_read < DATA + 8192
        assert first.share.bytes_read + second.share.bytes_read == 0


def test_nodes_pass_on_what_one_of_them_pulls(writer: FabricWriter, root: Path, tmp_path: Path) -> None:
    readers = []
    for name in ("a", "b", "c"):
        settings = ReaderSettings(
            segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20), cache_dir=tmp_path / name, fanout_host="127.0.0.1"
        )
        readers.append(Subscriber(root, f"reader-{name}", settings, node=name).open())
    try:
        for reader in readers:
            with reader.reading(1):
                pass  # all of them serve before one reads
        for reader in readers:
            reader._urls = (-10.0, {})
            with reader.reading(1) as reading:
                assert check_content(reading) == DATA
        assert sum(reader.share.bytes_read for reader in readers) == 0
        assert DATA <= sum(reader.fabric.bytes_read for reader in readers) < DATA + 8192
    finally:
        for reader in readers:
            reader.close()


def test_a_delta_is_pulled_too(root: Path, tmp_path: Path) -> None:
    writer = FabricWriter(root, slots=2)
    writer.publish(1, tensors=6, words=200)
    publish_delta(writer.writer, 2, (1,), model_directory(tmp_path / "model"), tensors=6, words=200)
    writer.serve(2)
    with Subscriber(root, "r", SETTINGS) as reader, reader.reading(2) as reading:
        assert check_content(reading) == 6 * 8 * 200
        assert (reader.share.bytes_read, reader.fabric.failures) == (0, 0)


def test_without_a_record_the_share_is_read(root: Path, tmp_path: Path) -> None:
    publish(HandoffStore(root), 1, model_directory(tmp_path / "model"), **SHAPE)
    reader = read(root, 1)
    assert reader.fabric.bytes_read == 0
    assert reader.share.bytes_read >= DATA


def test_a_reader_that_is_not_to_use_it_reads_the_share(writer: FabricWriter, root: Path) -> None:
    reader = read(root, 1, ReaderSettings(segment_bytes=16 << 10, fabric=False))
    assert (reader.fabric.bytes_read, reader.fabric.failures) == (0, 0)


@pytest.mark.parametrize("byte", [300, 4096, 4097, 60_000, DATA // 2, DATA // 2 + 9000, DATA - 1])
def test_a_changed_byte_is_never_served(writer: FabricWriter, root: Path, byte: int) -> None:
    writer.serve(1, corrupt=byte)
    reader = read(root, 1)
    assert reader.fabric.failures >= 1
    assert "other content than the manifest says" in reader.fabric.problem
    assert reader.share.bytes_read > 0


def test_the_next_version_is_pulled_again_after_a_failure(writer: FabricWriter, root: Path) -> None:
    writer.serve(1, corrupt=999)
    with Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(1) as reading:
            check_content(reading)
        failures, read_there = reader.fabric.failures, reader.share.bytes_read
        assert failures >= 1
        writer.publish(2, **SHAPE)
        with reader.reading(2) as reading:
            assert check_content(reading) == DATA
        assert (reader.fabric.failures, reader.share.bytes_read) == (failures, read_there)


def test_memory_that_holds_a_newer_version_is_not_read_for_the_older(writer: FabricWriter, root: Path) -> None:
    old = (writer.records.directory / "v000001.json").read_bytes()
    writer.publish(2, **SHAPE)
    assert not (writer.records.directory / "v000001.json").exists()
    (writer.records.directory / "v000001.json").write_bytes(old)  # a reader that has read the record before
    reader = read(root, 1)
    assert "does not serve version 1 any more" in reader.fabric.problem
    assert reader.fabric.bytes_read == 0


def test_a_version_that_is_overwritten_while_it_is_read_is_discarded(writer: FabricWriter, root: Path) -> None:
    with Subscriber(root, "r", SETTINGS) as reader, reader.reading(1) as reading:
        shard = HandoffStore(root).open(1).shards[0]
        reading.read(1, shard.name, 0, 100)
        writer.publish(2, **SHAPE)
        assert check_content(reading) == DATA
        assert reader.fabric.failures >= 1


def test_two_slots_serve_two_versions(root: Path) -> None:
    writer = FabricWriter(root, slots=2)
    for version in (1, 2):
        writer.publish(version, **SHAPE)
    for version in (1, 2):
        assert read(root, version).share.bytes_read == 0
    writer.publish(3, **SHAPE)
    assert read(root, 1).fabric.bytes_read == 0
    assert read(root, 3).share.bytes_read == 0


def test_layouts_stay_as_long_as_their_records(root: Path, tmp_path: Path) -> None:
    writer = FabricWriter(root, slots=3)
    writer.publish(1, tensors=6, words=200)
    publish_delta(writer.writer, 2, (1,), model_directory(tmp_path / "model"), tensors=6, words=200)
    writer.serve(2)
    writer.publish(3, tensors=6, words=100)
    for version, words in ((1, 200), (2, 200), (3, 100)):
        with Subscriber(root, "r", SETTINGS) as reader, reader.reading(version) as reading:
            assert check_content(reading) == 6 * 8 * words
            assert (reader.share.bytes_read, reader.fabric.problem) == (0, "")
    writer.publish(4, tensors=6, words=100)
    assert len(list(writer.records.directory.glob("layout-*"))) == 2


def test_a_record_of_an_older_attempt_is_not_used(writer: FabricWriter, root: Path) -> None:
    directory = writer.records.directory
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}
    VersionCommitter.claim(root, 2)
    assert not directory.exists()  # the claim took it away
    with pytest.raises(FileNotFoundError):
        writer.records.write(HandoffStore(root).open(1).manifest, (), ())
    directory.mkdir(parents=True)  # a leftover that writes on
    for name, data in kept.items():
        (directory / name).write_bytes(data)
    assert read(root, 1).fabric.bytes_read == 0


def test_a_version_that_was_published_again_is_not_taken_from_the_old_memory(writer: FabricWriter, root: Path) -> None:
    record = (writer.records.directory / "v000001.json").read_bytes()
    writer.writer.put_aside(1)
    publish(writer.writer, 1, model_directory(root.parent / "model"), tensors=6, words=5000, shards=3)
    (writer.records.directory / "v000001.json").write_bytes(record)
    assert read(root, 1).fabric.bytes_read == 0


def test_a_header_of_another_run_is_refused(writer: FabricWriter, root: Path) -> None:
    writer.token = "0" * 64
    writer.serve(1)
    reader = read(root, 1)
    assert "does not serve version 1" in reader.fabric.problem
    assert reader.fabric.bytes_read == 0


def test_others_cannot_write_into_what_is_served_over_tcp(writer: FabricWriter, root: Path) -> None:
    record = record_of(writer, 1)
    stranger = TransferEngine("127.0.0.1", "tcp")
    room = mmap.mmap(-1, 1 << 16)
    room[:4] = b"evil"
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    stranger.register(address, len(room))
    for peer in record.peers:
        for at in (0, 4096, 8000):
            assert stranger._engine.transfer_sync_write(peer.endpoint, address, peer.address + at, 512) != 0
    assert read(root, 1).fabric.failures == 0


@pytest.mark.parametrize("damage", ["torn", "endpoint", "address", "layout", "rank", "sequence"])
def test_a_damaged_record_ends_in_a_read_of_the_share(writer: FabricWriter, root: Path, damage: str) -> None:
    path, record = writer.records.directory / "v000001.json", record_of(writer, 1)
    first, *others = record.peers
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "layout":
        layout = writer.records.directory / record.layout
        layout.write_bytes(layout.read_bytes()[:-17])
    elif damage == "rank":
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, peers=(first,))))
    else:
        changes = {"endpoint": "127.0.0.1:1", "address": 4096, "sequence": 7}
        changed = msgspec.structs.replace(first, **{damage: changes[damage]})
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, peers=(changed, *others))))
    reader = read(root, 1)
    assert reader.share.bytes_read > 0


def test_a_writer_that_dies_while_readers_pull(root: Path) -> None:
    with writer_process(root, {1: SHAPE}) as process, Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(1) as reading:
            shard = HandoffStore(root).open(1).shards[0]
            reading.read(1, shard.name, 0, 100)
            assert reader.fabric.bytes_read > 0
            process.process.kill()
            process.process.join()
            assert check_content(reading) == DATA
        assert reader.fabric.failures >= 1
        assert reader.share.bytes_read > 0


def test_a_writer_that_hangs_costs_one_time_limit(root: Path) -> None:
    with (
        writer_process(root, {1: SHAPE, 2: SHAPE}, timeout_s=3.0, slots=2) as process,
        Subscriber(root, "r", SETTINGS) as reader,
    ):
        os.kill(process.pid, signal.SIGSTOP)
        with reader.reading(1) as reading:
            assert check_content(reading) == DATA
        assert "did not come within" in reader.fabric.problem
        # buffers that may still be written to are not used again
        buffers = reader.fabric.buffers
        hanging = set(buffers._overdue)
        assert hanging
        taken = [buffers.take(1 << 14, "tcp") for _ in range(SETTINGS.streams)]
        assert None in taken
        assert not hanging & set(taken)
        os.kill(process.pid, signal.SIGCONT)
        for buffer in taken:
            if buffer is not None:
                buffers.give_back(buffer)
        wait_for(lambda: not buffers.in_use, 60.0, "return of all buffers")
        with reader.reading(2) as reading:
            assert check_content(reading) == DATA
        assert reader.fabric.bytes_read >= DATA


def test_a_layout_finds_each_range() -> None:
    layout = FabricLayout(
        [Stretch("b", 0, 7, 1, 3), Stretch("a", 10, 5, 0, 0), Stretch("a", 0, 10, 1, 20), Stretch("a", 15, 1, 0, 9)]
    )
    again = FabricLayout.decode(layout.encode())
    for found in (layout, again):
        assert found.pieces("a", 8, 8) == [
            Stretch("a", 8, 2, 1, 28),
            Stretch("a", 10, 5, 0, 0),
            Stretch("a", 15, 1, 0, 9),
        ]
        assert found.pieces("b", 0, 7) == [Stretch("b", 0, 7, 1, 3)]
        for file, offset, size in (("a", 8, 9), ("b", 7, 1), ("c", 0, 1), ("a", 16, 1)):
            with pytest.raises(HandoffError, match="no rank serves byte"):
                found.pieces(file, offset, size)


def test_headers_differ_in_every_field() -> None:
    fields = {"nonce": "0a1b2c3d", "attempt": 1, "version": 2, "rank": 3, "sequence": 4, "size": 5}
    header = seal_header("a" * 64, **fields)  # type: ignore[arg-type]
    assert len(header) == HEADER_BYTES
    assert seal_header("b" * 64, **fields) != header  # type: ignore[arg-type]
    for name, value in fields.items():
        other = "0a1b2c3e" if isinstance(value, str) else value + 1
        assert seal_header("a" * 64, **{**fields, name: other}) != header  # type: ignore[arg-type]


def test_only_directories_of_the_newest_attempt_count() -> None:
    names = ["v000001", ".writer-000009-aaaaaaaa", ".writer-000010-bbbbbbbb", ".writer-000010-cccccccc", ".readers"]
    assert newest_writer(names) == names[2:4]
    assert newest_writer(["v000001"]) == []


def test_segments_of_a_manifest_have_the_digest_that_its_writer_records(writer: FabricWriter, root: Path) -> None:
    assert record_of(writer, 1).digest == SegmentMap(HandoffStore(root).open(1), 1 << 14).digest

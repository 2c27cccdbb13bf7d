"""Versions that are announced before they are durable: read over the fabric alone, and never taken for durable ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fabric_lab import FabricWriter, writer_process
from handoff_lab import check_content

from hpcrl.errors import HandoffError
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter
from hpcrl.weights.format.announcement import AnnouncedVersion, announced_name
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.announced import announced_versions, find_announced, open_version, read_companion
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
    """Version 1 is durable, version 2 announced."""
    made = FabricWriter(root)
    made.publish(1, **SHAPE)
    made.announce(2, **SHAPE)
    yield made
    for ring in made.rings:
        ring.close()


def take_memory(writer: FabricWriter) -> None:
    for ring in writer.rings:
        ring._memory[:64] = 0


def test_an_announced_version_is_read_over_the_fabric(writer: FabricWriter, root: Path) -> None:
    assert HandoffStore(root).versions() == [1]
    assert announced_versions(root) == [2]
    # nothing that a reader could take but the ranks' memory
    stage = writer.writer.staged(2)
    for path in stage.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with Subscriber(root, "r", SETTINGS) as reader:
        assert reader.versions() == [1, 2]
        assert reader.wait_for(2, timeout_s=0.0)
        with reader.reading(2) as reading:
            assert isinstance(reading.handoff, AnnouncedVersion)
            assert check_content(reading) == DATA
        assert (reader.share.bytes_read, reader.fabric.problem) == (0, "")
        assert DATA <= reader.fabric.bytes_read < DATA + 8192


def test_neither_form_is_taken_for_the_other(writer: FabricWriter, root: Path) -> None:
    found = find_announced(root, 2)
    assert found is not None
    assert not isinstance(found, Handoff)
    assert read_companion(found, "config.json") == b'{"model_type": "qwen3_moe"}'
    with pytest.raises(HandoffError, match=r"announced without tokenizer\.json"):
        read_companion(found, "tokenizer.json")
    store = HandoffStore(root)
    with pytest.raises(HandoffError, match="is not a published version"):
        store.open(2)
    assert not store.is_published(2)
    # also where the announcement is put in the place of a manifest
    text = (writer.records.directory / announced_name(2)).read_bytes()
    (root / "v000002").mkdir()
    (root / "v000002/manifest.json").write_bytes(text)
    with pytest.raises(HandoffError, match=r"manifest\.json cannot be read"):
        store.open(2)
    assert store.newest() == 1
    shutil.rmtree(root / "v000002")
    # and the other way round
    manifest = (root / "v000001/manifest.json").read_bytes()
    (writer.records.directory / announced_name(2)).write_bytes(manifest)
    with pytest.raises(HandoffError, match="the announcement of version 2 cannot be read"):
        find_announced(root, 2)


def test_the_durable_version_is_the_announced_one(writer: FabricWriter, root: Path) -> None:
    announced = open_version(HandoffStore(root), 2)
    writer.make_durable(2)
    durable = open_version(HandoffStore(root), 2)
    assert (type(announced), type(durable)) == (AnnouncedVersion, Handoff)
    assert announced.manifest == durable.manifest
    HandoffStore(root).open(2).verify(content=True)
    with Subscriber(root, "r", SETTINGS) as reader, reader.reading(2) as reading:
        assert isinstance(reading.handoff, Handoff)
        assert check_content(reading) == DATA
        assert reader.share.bytes_read == 0


def test_a_reader_keeps_what_it_has_and_asks_for_a_version_that_it_cannot_pull(
    writer: FabricWriter, root: Path
) -> None:
    with Subscriber(root, "r", SETTINGS) as reader:
        take_memory(writer)
        result = reader.load_newest(check_content, served=(1, -1))
        assert (result.version, result.value) == (1, DATA)
        assert [skipped.version for skipped in result.skipped] == [2]
        assert "version 2 is not durable" in result.skipped[0].reason
        assert "does not serve version 2 any more" in result.skipped[0].reason
        assert ReaderWatch(root, expiry_s=60.0).wanted_version() == 2
        # without anything that it serves: the newest durable version
        assert reader.load_newest(check_content).version == 1
        # it is tried again, also over the fabric
        writer.serve(2)
        assert reader.load_newest(check_content, served=(1, -1)).version == 2
        reader.acknowledge(2)
        assert ReaderWatch(root, expiry_s=60.0).wanted_version() is None


def test_a_version_that_becomes_durable_while_it_is_pulled_comes_from_the_share(
    writer: FabricWriter, root: Path
) -> None:
    with Subscriber(root, "r", SETTINGS) as reader, reader.reading(2) as reading:
        reading.read(2, "model-00001-of-00002.safetensors", 0, 100)
        writer.make_durable(2)
        take_memory(writer)  # behind it: segments are read ahead
        assert check_content(reading) == DATA
        assert reader.share.bytes_read > 0


@pytest.mark.parametrize("verify", [True, False])
def test_another_version_of_that_number_is_not_taken_for_the_announced_one(
    writer: FabricWriter, root: Path, verify: bool
) -> None:
    settings = ReaderSettings(segment_bytes=16 << 10, pace=Pace(5.0, 1 << 20), verify=verify)
    with Subscriber(root, "r", settings) as reader, reader.reading(2) as reading:
        writer.make_durable(2)
        take_memory(writer)
        for path in HandoffStore(root).open(2).shards:
            path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(HandoffError, match="does not have the content"):
            check_content(reading)


def test_the_death_of_the_trainer_leaves_what_is_durable(root: Path) -> None:
    with writer_process(root, {1: SHAPE}, {2: SHAPE}) as process, Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(2) as reading:
            reading.read(2, "model-00001-of-00002.safetensors", 0, 100)
            process.process.kill()
            process.process.join()
            with pytest.raises(HandoffError, match="version 2 is not durable"):
                check_content(reading)
        assert reader.load_newest(check_content).version == 1
        # the next attempt takes the announcement away
        VersionCommitter.claim(root, 2)
        assert announced_versions(root) == []
        assert reader.versions() == [1]
        with pytest.raises(HandoffError, match="does not exist"), reader.reading(2):
            pass


def test_an_older_attempt_announces_nothing(writer: FabricWriter, root: Path) -> None:
    VersionCommitter.claim(root, 2)
    manifest = HandoffStore(root).open(1).manifest
    with pytest.raises(FileNotFoundError):
        writer.records.announce(manifest, {})
    # a leftover that makes its directory again is not read: its attempt is not the newest
    writer.records.directory.mkdir(parents=True)
    writer.records.announce(manifest, {})
    writer.records.write(manifest, (), ())
    assert announced_versions(root) == []


@pytest.mark.parametrize("damage", ["torn", "record", "other", "alone"])
def test_a_damaged_announcement_is_none(writer: FabricWriter, root: Path, damage: str) -> None:
    path = writer.records.directory / announced_name(2)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "record":
        record = msgspec.json.decode((writer.records.directory / "v000002.json").read_bytes())
        (writer.records.directory / "v000002.json").write_bytes(msgspec.json.encode({**record, "digest": "0" * 32}))
    elif damage == "other":
        found = msgspec.json.decode(path.read_bytes())
        found["announced"]["version"] = 3
        path.write_bytes(msgspec.json.encode(found))
    else:
        (writer.records.directory / "v000002.json").unlink()
    with Subscriber(root, "r", SETTINGS) as reader:
        assert reader.load_newest(check_content).version == 1


def test_an_announcement_ends_with_its_memory(writer: FabricWriter, root: Path) -> None:
    writer.announce(3, **SHAPE)
    assert announced_versions(root) == [3]
    assert not (writer.records.directory / announced_name(2)).exists()
    writer.records.clear()
    assert announced_versions(root) == []


def test_retention_counts_durable_versions(writer: FabricWriter, root: Path) -> None:
    watch = ReaderWatch(root, expiry_s=60.0)
    with Subscriber(root, "r", SETTINGS) as reader:
        with reader.reading(2) as reading:
            check_content(reading)
            reading.keep()
        reader.acknowledge(2)  # it serves a version that is not durable
        report = Collector(HandoffStore(root), watch, keep_last=1, settle_s=0.0).collect(in_use={2})
    assert report.removed == []
    assert report.kept == {1: "one of the newest 1"}
    assert HandoffStore(root).versions() == [1]


def test_nodes_pass_on_an_announced_version(writer: FabricWriter, root: Path, tmp_path: Path) -> None:
    readers = []
    for name in ("a", "b"):
        settings = ReaderSettings(
            segment_bytes=16 << 10, pace=Pace(20.0, 1 << 20), cache_dir=tmp_path / name, fanout_host="127.0.0.1"
        )
        readers.append(Subscriber(root, f"reader-{name}", settings, node=name).open())
    try:
        for reader in readers:
            with reader.reading(2):
                pass  # all of them serve before one reads
        for reader in readers:
            reader._urls = (-10.0, {})
            with reader.reading(2) as reading:
                assert check_content(reading) == DATA
        assert sum(reader.share.bytes_read for reader in readers) == 0
        assert DATA <= sum(reader.fabric.bytes_read for reader in readers) < DATA + 8192
    finally:
        for reader in readers:
            reader.close()

"""Hand-offs: a reader sees whole versions or none, whatever happens to the writer."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hpcrl.errors import FencedError, HandoffError
from hpcrl.storage.quarantine import list_asides
from hpcrl.weights import HandoffStore, VersionCommitter, write_shard
from hpcrl.weights.format.manifest import Handoff
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.write.handoff_writer import ShardResult


def tensor(name: str, array: np.ndarray) -> TensorBytes:
    return TensorBytes(name, str(array.dtype), array.shape, memoryview(array).cast("B"))


def arrays(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {"a.weight": rng.normal(size=(4, 3)).astype(np.float32), "b": np.full((5,), version, np.int64)}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return path


@pytest.fixture
def writer(tmp_path: Path) -> VersionCommitter:
    return VersionCommitter.claim(tmp_path / "weights", 1)


@pytest.fixture
def store(writer: VersionCommitter) -> HandoffStore:
    return writer.store


def write_version(writer: VersionCommitter, version: int, model_dir: Path) -> None:
    stage = writer.stage(version)
    results = []
    for i, (name, array) in enumerate(arrays(version).items(), start=1):
        shard = f"model-{i:05d}-of-00002.safetensors"
        file, tensors = write_shard(stage / shard, [tensor(name, array)])
        results.append(ShardResult(shard, file, tensors))
    writer.publish(version=version, shards=results, model_dir=model_dir, producer="test")


def test_published_version_is_a_model_directory(writer: VersionCommitter, store: HandoffStore, model_dir: Path) -> None:
    write_version(writer, 3, model_dir)
    handoff = store.open(3)
    handoff.verify(content=True)
    assert (handoff.version, handoff.manifest.kind, handoff.manifest.parent) == (3, "full", None)
    loaded = {name: array for shard in handoff.shards for name, array in load_file(shard).items()}
    for name, array in arrays(3).items():
        np.testing.assert_array_equal(loaded[name], array)
        record = handoff.manifest.tensors[name]
        with (handoff.path / record.file).open("rb") as stream:
            stream.seek(record.offset)
            assert stream.read(record.bytes) == array.tobytes()
    index = json.loads((handoff.path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(arrays(3))
    assert (handoff.path / "config.json").read_text() == (model_dir / "config.json").read_text()


def test_versions_are_listed_and_unfinished_ones_are_not(
    writer: VersionCommitter, store: HandoffStore, model_dir: Path
) -> None:
    assert store.newest() is None
    for version in (0, 2, 1_000_000):
        write_version(writer, version, model_dir)
    writer.stage(5)
    assert store.versions() == [0, 2, 1_000_000]
    assert store.newest() == 1_000_000


def test_publishing_twice_is_refused_and_changes_nothing(
    writer: VersionCommitter, store: HandoffStore, model_dir: Path
) -> None:
    write_version(writer, 1, model_dir)
    before = store.open(1).manifest
    with pytest.raises(FileExistsError):
        write_version(writer, 1, model_dir)
    assert store.open(1).manifest == before
    assert sorted(os.listdir(store.root)) == [writer.fence.path.name, "v000001"]
    assert os.listdir(writer.fence.path) == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "format"])
def test_damage_is_found_and_named(writer: VersionCommitter, store: HandoffStore, model_dir: Path, damage: str) -> None:
    write_version(writer, 1, model_dir)
    shard = store.open(1).shards[1]
    manifest = store.path_of(1) / "manifest.json"
    data = bytearray(shard.read_bytes())
    if damage == "truncate":
        shard.write_bytes(data[:-1])
    elif damage == "flip":
        data[-1] ^= 1
        shard.write_bytes(data)
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 99'))
    with pytest.raises(HandoffError) as error:
        store.open(1).verify(content=True)
    assert (shard.name if damage in ("truncate", "flip", "remove") else "v000001") in str(error.value)


def test_full_disk_leaves_last_version_and_the_next_publish_works(
    writer: VersionCommitter, store: HandoffStore, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(writer, 1, model_dir)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.storage.files.os.fsync", no_space)
        with pytest.raises(OSError, match="No space"):
            write_version(writer, 2, model_dir)
    assert store.versions() == [1]
    store.open(1).verify(content=True)
    write_version(writer, 2, model_dir)
    assert store.versions() == [1, 2]


def test_withdraw_removes_the_future_and_leftovers(
    writer: VersionCommitter, store: HandoffStore, model_dir: Path
) -> None:
    for version in range(4):
        write_version(writer, version, model_dir)
    writer.stage(9)
    os.rename(store.path_of(3), store.root / ".hidden-v000003")  # a collector that died
    new = VersionCommitter.claim(store.root, 2)
    assert new.withdraw_after(1) == [2]
    assert sorted(os.listdir(store.root)) == [new.fence.path.name, "put-aside", "v000000", "v000001"]
    # it is kept as it was until the run has published that version again
    (aside,) = list_asides(store.root, "v")
    assert (aside.number, aside.token) == (2, 2)
    Handoff.open(aside.path).verify(content=True)
    collector = Collector(store, ReaderWatch(store.root, expiry_s=60.0), keep_last=9, settle_s=0.0)
    collector.collect()
    assert aside.path.exists()
    write_version(new, 2, model_dir)
    collector.collect()
    assert list_asides(store.root, "v") == []
    assert store.versions() == [0, 1, 2]
    assert os.listdir(new.fence.path) == []


def test_wrong_tensor_bytes_are_refused(tmp_path: Path) -> None:
    good = tensor("a", np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="bytes"):
        write_shard(tmp_path / "x", [good._replace(shape=(3, 2))])
    with pytest.raises(ValueError, match="complex"):
        write_shard(tmp_path / "y", [good._replace(dtype="complex64")])


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_store import write_version
from hpcrl.weights import VersionCommitter
version, attempt = map(int, sys.argv[1:])
writer = VersionCommitter.claim(Path({root!r}), attempt)
writer.withdraw_after(version - 1)
print("ready", flush=True)
while True:
    write_version(writer, version, Path({model!r}))
    version += 1
"""


def test_killed_writer_never_leaves_a_torn_version(tmp_path: Path, model_dir: Path) -> None:
    """kill -9 of the writer at random moments: every listed version is whole, and the next writer goes on."""
    store = HandoffStore(tmp_path / "weights")
    script = WRITER.format(tests=str(Path(__file__).parent), root=str(store.root), model=str(model_dir))
    rng = np.random.default_rng(0)
    newest = 0
    for attempt in range(100):
        writer = subprocess.Popen([sys.executable, "-c", script, str(newest), str(attempt + 1)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        # longer and longer: a slow disk gets somewhere, too
        time.sleep(float(rng.uniform(0.0, 0.1 + 0.05 * attempt)))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        versions = store.versions()
        assert versions == list(range(len(versions)))
        for version in versions[newest:]:
            store.open(version).verify(content=True)
        newest = len(versions)
        if newest > 8:
            return
    pytest.fail("the writers got nowhere")


WRITE_ON = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_store import write_version
from hpcrl.errors import FencedError
from hpcrl.weights import VersionCommitter
writer, version = VersionCommitter.claim(Path({root!r}), int(sys.argv[1])), int(sys.argv[2])
try:
    while True:
        try:
            write_version(writer, version, Path({model!r}))
        except FileNotFoundError:  # its directory went under its hands
            writer.fence.check()
            raise
        print(version, flush=True)
        version += 1
except FencedError as error:
    sys.exit(f"fenced: {{error}}")
"""


def test_of_two_processes_that_write_only_the_newer_one_can(tmp_path: Path, model_dir: Path) -> None:
    """A trainer that was stopped, and thought dead, wakes up while the next attempt publishes the same versions."""
    root = tmp_path / "weights"
    script = WRITE_ON.format(tests=str(Path(__file__).parent), root=str(root), model=str(model_dir))

    def start(attempt: int, version: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(attempt), str(version)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start(1, 0) as old:
        try:
            assert old.stdout is not None
            assert [old.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
            old.send_signal(signal.SIGSTOP)
            os.waitpid(old.pid, os.WUNTRACED)
            first = len(HandoffStore(root).versions())
            with start(2, first) as new:
                try:
                    assert new.stdout is not None
                    new.stdout.readline()
                    old.send_signal(signal.SIGCONT)
                    said, error = old.communicate(timeout=300)
                    before = len(HandoffStore(root).versions())
                    while len(HandoffStore(root).versions()) < before + 3:
                        assert new.stdout.readline(), "the newer one ended"
                finally:
                    new.kill()
        finally:
            old.kill()
    assert "fenced: attempt 1 may not write" in error
    # it may have said less than it did: it was stopped between the rename and its word
    assert len(said.splitlines()) <= first - 3
    for version in HandoffStore(root).versions():
        handoff = HandoffStore(root).open(version)
        handoff.verify(content=True)


@pytest.mark.parametrize("what", ["stage", "publish", "remove", "withdraw"])
def test_an_overtaken_writer_can_change_nothing(
    writer: VersionCommitter, store: HandoffStore, model_dir: Path, what: str
) -> None:
    write_version(writer, 1, model_dir)
    write_version(writer, 2, model_dir)
    writer.stage(3)
    VersionCommitter.claim(store.root, 2)
    before = sorted(str(path) for path in store.root.rglob("*"))
    actions = {
        "stage": lambda: writer.stage(4),
        "publish": lambda: writer.publish(version=3, shards=[], model_dir=model_dir, producer="test"),
        "remove": lambda: writer.remove(1),
        "withdraw": lambda: writer.withdraw_after(1),
    }
    with pytest.raises(FencedError, match="attempt 2 writes there"):
        actions[what]()
    assert sorted(str(path) for path in store.root.rglob("*")) == before

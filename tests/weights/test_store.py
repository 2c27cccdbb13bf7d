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

from hpcrl.errors import HandoffError
from hpcrl.fs import StagedDirectory
from hpcrl.weights import HandoffStore, write_shard
from hpcrl.weights.shard import TensorBytes
from hpcrl.weights.store import ShardResult


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


def write_version(store: HandoffStore, version: int, model_dir: Path) -> StagedDirectory:
    stage = store.stage(version, token="t")
    stage.create()
    results = []
    for i, (name, array) in enumerate(arrays(version).items(), start=1):
        shard = f"model-{i:05d}-of-00002.safetensors"
        file, tensors = write_shard(stage.path / shard, [tensor(name, array)])
        results.append(ShardResult(shard, file, tensors))
    store.publish(stage, version=version, shards=results, model_dir=model_dir, producer="test")
    return stage


def test_published_version_is_a_model_directory(tmp_path: Path, model_dir: Path) -> None:
    store = HandoffStore(tmp_path / "weights")
    write_version(store, 3, model_dir)
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


def test_versions_are_listed_and_unfinished_ones_are_not(tmp_path: Path, model_dir: Path) -> None:
    store = HandoffStore(tmp_path / "weights")
    assert store.newest() is None
    for version in (0, 2, 1_000_000):
        write_version(store, version, model_dir)
    unfinished = store.stage(5, token="t")
    unfinished.create()
    assert store.versions() == [0, 2, 1_000_000]
    assert store.newest() == 1_000_000


def test_publishing_twice_is_refused_and_changes_nothing(tmp_path: Path, model_dir: Path) -> None:
    store = HandoffStore(tmp_path / "weights")
    write_version(store, 1, model_dir)
    before = store.open(1).manifest
    with pytest.raises(FileExistsError):
        write_version(store, 1, model_dir)
    assert store.open(1).manifest == before
    assert os.listdir(store.root) == ["v000001"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "format"])
def test_damage_is_found_and_named(tmp_path: Path, model_dir: Path, damage: str) -> None:
    store = HandoffStore(tmp_path / "weights")
    write_version(store, 1, model_dir)
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
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(HandoffError) as error:
        store.open(1).verify(content=True)
    assert (shard.name if damage in ("truncate", "flip", "remove") else "v000001") in str(error.value)


def test_full_disk_leaves_last_version_and_the_next_publish_works(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HandoffStore(tmp_path / "weights")
    write_version(store, 1, model_dir)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.fs.os.fsync", no_space)
        with pytest.raises(OSError, match="No space"):
            write_version(store, 2, model_dir)
    assert store.versions() == [1]
    store.open(1).verify(content=True)
    write_version(store, 2, model_dir)
    assert store.versions() == [1, 2]


def test_collect_keeps_the_newest_and_what_is_in_use(tmp_path: Path, model_dir: Path) -> None:
    store = HandoffStore(tmp_path / "weights")
    for version in range(6):
        write_version(store, version, model_dir)
    assert store.collect(keep_last=2, in_use={1}) == [0, 2, 3]
    assert store.versions() == [1, 4, 5]
    assert store.collect(keep_last=9, in_use=set()) == []


def test_withdraw_removes_the_future_and_leftovers(tmp_path: Path, model_dir: Path) -> None:
    store = HandoffStore(tmp_path / "weights")
    for version in range(4):
        write_version(store, version, model_dir)
    store.stage(9, token="dead").create()
    assert store.withdraw_after(1) == [2, 3]
    assert sorted(os.listdir(store.root)) == ["v000000", "v000001"]


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
from hpcrl.weights import HandoffStore
store, version = HandoffStore(Path({root!r})), int(sys.argv[1])
store.withdraw_after(version - 1)
print("ready", flush=True)
while True:
    write_version(store, version, Path({model!r}))
    version += 1
"""


def test_killed_writer_never_leaves_a_torn_version(tmp_path: Path, model_dir: Path) -> None:
    """kill -9 of the writer at random moments: every listed version is whole, and the next writer goes on."""
    store = HandoffStore(tmp_path / "weights")
    script = WRITER.format(tests=str(Path(__file__).parent), root=str(store.root), model=str(model_dir))
    rng = np.random.default_rng(0)
    newest = 0
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", script, str(newest)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(float(rng.uniform(0.0, 0.1)))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        versions = store.versions()
        assert versions == list(range(len(versions)))
        for version in versions[newest:]:
            store.open(version).verify(content=True)
        newest = len(versions)
    assert newest > 8

"""Small hand-offs for tests and benches, without torch: every tensor of a version says which version it is."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from hpcrl.weights import HandoffStore, TensorRecord, VersionCommitter, write_shard
from hpcrl.weights.format.delta import encode_chunk
from hpcrl.weights.format.manifest import CHUNK_BYTES, chunk_digests
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.read.subscriber import Reading
from hpcrl.weights.write.handoff_writer import ShardResult
from hpcrl.weights.write.own_units import Delta, delta_result


def model_directory(path: Path) -> Path:
    """A directory with what a version copies from its start model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return path


def content(version: int, name: str, words: int) -> bytes:
    """Bytes of a tensor of int64: the version and the tensor, over and over."""
    return (version * 1000 + int(name.rpartition(".")[2])).to_bytes(8, sys.byteorder) * words


def publish(
    store: HandoffStore | VersionCommitter,
    version: int,
    model: Path,
    *,
    tensors: int = 4,
    words: int = 1000,
    shards: int = 2,
) -> None:
    """Publish a full version of ``tensors`` tensors of ``words`` int64 each, as who claims the store first or has."""
    writer = _writer(store)
    results = write_files(writer, version, tensors=tensors, words=words, shards=shards)
    writer.publish(version=version, shards=results, model_dir=model, producer="lab")


def write_files(
    writer: VersionCommitter, version: int, *, tensors: int = 4, words: int = 1000, shards: int = 2
) -> list[ShardResult]:
    """Write the files of a full version to its stage; they are removed where that fails."""
    stage = writer.stage(version)
    results = []
    try:
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            data = [
                TensorBytes(f"t.{i}", "int64", (words,), memoryview(content(version, f"t.{i}", words)))
                for i in range(shard, tensors, shards)
            ]
            results.append(ShardResult(name, *write_shard(stage / name, data)))
    except BaseException:
        with contextlib.suppress(OSError):
            writer.discard(version)
        raise
    return results


def publish_delta(
    store: HandoffStore | VersionCommitter,
    version: int,
    needs: tuple[int, ...],
    model: Path,
    *,
    tensors: int = 4,
    words: int = 1000,
) -> None:
    """Publish a version as changes of ``needs[-1]``, all of whose tensors change."""
    writer = _writer(store)
    stage = writer.stage(version)
    try:
        records, whole = [], {}
        for i in range(tensors):
            name = f"t.{i}"
            old, new = content(needs[-1], name, words), content(version, name, words)
            records.append((name, encode_chunk(0, memoryview(old), memoryview(new), 8)))
            digest = chunk_digests(new, CHUNK_BYTES)
            whole[name] = TensorRecord("int64", (words,), "", 0, len(new), digest)
        delta = Delta(records, sum(len(record) for _, record in records), {})
        result = delta_result(stage, "delta-00001-of-00001.bin", delta, CHUNK_BYTES)
    except BaseException:
        with contextlib.suppress(OSError):
            writer.discard(version)
        raise
    writer.publish(
        version=version,
        shards=[result],
        model_dir=model,
        producer="lab",
        kind="delta",
        needs=needs,
        tensors=whole,
    )


def _writer(store: HandoffStore | VersionCommitter) -> VersionCommitter:
    return store if isinstance(store, VersionCommitter) else VersionCommitter.claim(store.root, 1)


def check_content(reading: Reading) -> int:
    """Read all of a version and compare each tensor with what it must be; returns the bytes read."""
    version, total = reading.handoff.version, 0
    for name, _, data in reading.tensors():
        words = len(data) // 8
        assert bytes(data) == content(version, name, words), f"tensor {name} of version {version} is torn or mixed"
        total += len(data)
    return total

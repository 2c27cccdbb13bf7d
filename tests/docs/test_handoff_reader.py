"""The reader in docs/handoff.md reads what we publish: the specification is enough to write one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from adapter_lab import adapter_tensors, publish_adapter

from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.manifest import CHUNK_BYTES, Chunk
from hpcrl.weights.format.shard import TensorBytes, write_shard
from hpcrl.weights.write.handoff_writer import ShardResult
from hpcrl.weights.write.own_units import OwnUnit, UnitChunk, delta_result, encode_delta

DOC = Path(__file__).parents[2] / "docs/handoff.md"


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], str(DOC), "exec"), names)
    return names


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> HandoffStore:
    """Version 1 whole, 2 and 3 deltas."""
    writer = VersionCommitter.claim(tmp_path_factory.mktemp("weights"), 1)
    store = writer.store
    rng = np.random.default_rng(0)
    data = rng.integers(0, 1 << 16, 3_000_000, dtype=np.uint16)  # two chunks of bfloat16
    small = np.arange(7, dtype=np.float32)
    needs: tuple[int, ...] = ()
    tensors: dict[str, Any] = {}
    for version in (1, 2, 3):
        stage = writer.stage(version)
        if version == 1:
            inputs = [
                TensorBytes("a", "bfloat16", (3000, 1000), data.view(np.uint8).data),
                TensorBytes("b", "float32", (7,), small.view(np.uint8).data),
            ]
            shards = [ShardResult("model.safetensors", *write_shard(stage / "model.safetensors", inputs))]
            tensors = shards[0].tensors
        else:
            old = data.copy()
            data[rng.random(len(data)) < 0.03] += 3
            data[[5, 2_999_999]] = 0x7F
            cuts = (UnitChunk("a", 0, CHUNK_BYTES, 2), UnitChunk("a", 1, data.nbytes - CHUNK_BYTES, 2))
            unit = OwnUnit("f", 0, 0, data.nbytes, cuts)
            delta = encode_delta([unit], old.view(np.uint8).data, data.view(np.uint8).data, limit=1 << 30)
            assert delta is not None
            shards = [delta_result(stage, "delta-00001-of-00001.bin", delta, CHUNK_BYTES)]
            tensors = {
                "a": record(tensors["a"], delta.digests["f"]),
                "b": record(tensors["b"], [Chunk(0, 28, tensors["b"].xxh3_128)]),
            }
        writer.publish(
            version=version,
            shards=shards,
            model_dir=None,
            producer="test",
            kind="delta" if needs else "full",
            needs=needs,
            tensors=tensors if needs else None,
        )
        needs = (*needs, version)
        (store.root / f"expected-{version}").write_bytes(data.tobytes())
    return store


def test_of_an_adapter_it_reads_the_factors(reader: dict[str, Any], tmp_path: Path) -> None:
    writer = VersionCommitter.claim(tmp_path, 1)
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    shard = writer.stage(1) / "model.safetensors"
    data = TensorBytes("q_proj.weight", "float32", array.shape, array.view(np.uint8).data)
    results = [ShardResult(shard.name, *write_shard(shard, [data]))]
    base = writer.publish(version=1, shards=results, model_dir=None, producer="test")
    tensors = adapter_tensors({"q_proj": (array[:2], array[:, :2])}, {}, "fused")
    publish_adapter(writer, version=2, base=base, tensors=tensors, dtype="float32", config={}, producer="test")
    found = {name: bytes(data) for name, _, _, data in reader["tensors"](tmp_path, 2)}
    assert found == {name: tensor.tobytes() for name, tensor in tensors.items()}
    lines = "".join(
        f"{name} {t['dtype']} {'x'.join(map(str, t['shape']))} {t['xxh3_128']}\n"
        for name, t in sorted(reader["manifest"](tmp_path, 1)["tensors"].items())
    )
    assert reader["manifest"](tmp_path, 2)["parent_xxh3_128"] == xxhash.xxh3_128_hexdigest(lines.encode())


def record(old: Any, chunks: list[Chunk]) -> Any:
    import msgspec

    return msgspec.structs.replace(old, file="", offset=0, xxh3_128="".join(chunk.xxh3_128 for chunk in chunks))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_it_reads_every_version(reader: dict[str, Any], store: HandoffStore, version: int) -> None:
    found = {name: (dtype, shape, bytes(data)) for name, dtype, shape, data in reader["tensors"](store.root, version)}
    assert found["a"] == ("bfloat16", [3000, 1000], (store.root / f"expected-{version}").read_bytes())
    assert found["b"] == ("float32", [7], np.arange(7, dtype=np.float32).tobytes())
    assert reader["newest"](store.root) == 3


def test_it_refuses_damage(reader: dict[str, Any], store: HandoffStore) -> None:
    path = store.path_of(2) / "delta-00001-of-00001.bin"
    good = path.read_bytes()
    path.write_bytes(good[:1000] + bytes([good[1000] ^ 2]) + good[1001:])
    with pytest.raises(AssertionError, match="a"):
        list(reader["tensors"](store.root, 3))
    path.write_bytes(good)


def test_fields_of_the_manifest_are_documented() -> None:
    from hpcrl.weights.format.manifest import Manifest

    table = re.findall(r"^\| (`.*?) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)`", row)} >= set(Manifest.__struct_fields__)

"""Adapters in the layouts of PEFT and vLLM: both mean the same change of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adapter_lab import ExpertAdapter, adapter_tensors, config_of, publish_adapter
from safetensors.numpy import load_file

from hpcrl.errors import HandoffError
from hpcrl.weights import Handoff, VersionCommitter, write_shard
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.write.handoff_writer import ParentGoneError, ShardResult

E, R, H, F = 3, 2, 8, 5
EXPERTS = "model.layers.0.mlp.experts"
QUERY = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture
def experts() -> ExpertAdapter:
    return ExpertAdapter(random(E, R, H), random(E, 2 * F, R), random(E, R, F), random(E, H, R))


def publish_base(writer: VersionCommitter, version: int = 0) -> Handoff:
    """What the adapters of these tests claim to be trained on."""
    path = writer.stage(version) / "model.safetensors"
    array = random(12, H)
    data = [TensorBytes(f"{QUERY}.weight", "float32", array.shape, memoryview(array).cast("B"))]
    shard = ShardResult(path.name, *write_shard(path, data))
    return writer.publish(version=version, shards=[shard], model_dir=None, producer="test")


def publish(root: Path, experts: ExpertAdapter, layout: str) -> dict[str, np.ndarray]:
    """Write and read back what a reader finds."""
    writer = VersionCommitter.claim(root, 1)
    linear = {QUERY: (random(R, H), random(12, R))}
    config = config_of(list(linear), [EXPERTS], layout, rank=R, alpha=4)
    publish_adapter(
        writer,
        version=3,
        base=publish_base(writer),
        tensors=adapter_tensors(linear, {EXPERTS: experts}, layout),
        dtype="float32",
        config=config,
        producer="test",
    )
    handoff = writer.store.open(3)
    handoff.verify(content=True)
    assert (handoff.manifest.kind, handoff.manifest.parent, handoff.manifest.needs) == ("lora", 0, (0,))
    assert set(handoff.manifest.files) == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads((handoff.path / "adapter_config.json").read_text()) == config
    return load_file(handoff.path / "adapter_model.safetensors")


def test_per_expert_names_and_products(tmp_path: Path, experts: ExpertAdapter) -> None:
    found = publish(tmp_path, experts, "per_expert")
    assert len(found) == 2 + 6 * E
    for e in range(E):
        product = {
            name: found[f"{PREFIX}{EXPERTS}.{e}.{name}.lora_B.weight"]
            @ found[f"{PREFIX}{EXPERTS}.{e}.{name}.lora_A.weight"]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = experts.gate_up_b[e] @ experts.gate_up_a[e]
        np.testing.assert_allclose(np.concatenate([product["gate_proj"], product["up_proj"]]), gate_up, rtol=1e-6)
        np.testing.assert_allclose(product["down_proj"], experts.down_b[e] @ experts.down_a[e], rtol=1e-6)


def test_fused_layout_unpacks_as_peft_and_vllm_do(tmp_path: Path, experts: ExpertAdapter) -> None:
    found = publish(tmp_path, experts, "fused")
    assert len(found) == 2 + 4
    for module, b, a in (
        (f"{EXPERTS}.base_layer", experts.gate_up_b, experts.gate_up_a),
        (EXPERTS, experts.down_b, experts.down_a),
    ):
        flat_a, flat_b = (found[f"{PREFIX}{module}.lora_{x}.weight"] for x in "AB")
        # [experts, r, in] and [out, r, experts]
        unpacked_a, unpacked_b = flat_a.reshape(E, -1, flat_a.shape[-1]), flat_b.reshape(flat_b.shape[0], -1, E)
        np.testing.assert_allclose(
            np.einsum("ore,eri->eoi", unpacked_b, unpacked_a), np.einsum("eor,eri->eoi", b, a), rtol=1e-5, atol=1e-6
        )


def test_bfloat16_comes_as_bits(tmp_path: Path) -> None:
    a, b = np.arange(R * H, dtype=np.uint16).reshape(R, H), np.arange(4 * R, dtype=np.uint16).reshape(4, R)
    writer = VersionCommitter.claim(tmp_path, 1)
    tensors = adapter_tensors({QUERY: (a, b)}, {}, "per_expert")
    base = publish_base(writer)
    publish_adapter(writer, version=1, base=base, tensors=tensors, dtype="bfloat16", config={}, producer="t")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    found = load_torch(writer.store.path_of(1) / "adapter_model.safetensors")[f"{PREFIX}{QUERY}.lora_A.weight"]
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.view(torch.uint16).numpy(), a)


def test_the_base_stays_as_long_as_an_adapter_of_it(tmp_path: Path, experts: ExpertAdapter) -> None:
    publish(tmp_path, experts, "fused")
    writer = VersionCommitter.claim(tmp_path, 1)
    publish_base(writer, 1)
    collector = Collector(writer.store, ReaderWatch(tmp_path, expiry_s=60.0), keep_last=1, settle_s=0.0)
    assert collector.collect().removed == [1]
    assert writer.store.versions() == [0, 3]


def test_an_adapter_whose_base_is_gone_is_not_published(tmp_path: Path) -> None:
    writer = VersionCommitter.claim(tmp_path, 1)
    base = publish_base(writer)
    writer.remove(0)
    tensors = adapter_tensors({QUERY: (random(R, H), random(12, R))}, {}, "fused")
    with pytest.raises(ParentGoneError, match="v000000"):
        publish_adapter(writer, version=1, base=base, tensors=tensors, dtype="float32", config={}, producer="t")
    assert writer.store.versions() == []


def test_a_manifest_of_an_adapter_without_its_base_is_wrong(tmp_path: Path, experts: ExpertAdapter) -> None:
    publish(tmp_path, experts, "fused")
    path = tmp_path / "v000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    for changes in ({"parent": None}, {"parent_xxh3_128": None}, {"needs": []}):
        path.write_text(json.dumps(manifest | changes))
        with pytest.raises(HandoffError, match="do not fit each other"):
            VersionCommitter.claim(tmp_path, 1).store.open(3)

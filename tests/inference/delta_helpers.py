"""Versions in bfloat16: whole ones, and deltas between two models."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_helpers import random_model, tensors_of, tiny_arch

from hpcrl.modeling.decoder import Decoder
from hpcrl.trainer.publish.publisher import tensor_bytes
from hpcrl.weights import Handoff, HandoffStore, TensorRecord, VersionCommitter, write_shard
from hpcrl.weights.format.delta import encode_chunk
from hpcrl.weights.format.manifest import CHUNK_BYTES, chunk_digests
from hpcrl.weights.write.handoff_writer import ShardResult
from hpcrl.weights.write.own_units import Delta, delta_result

ARCH = tiny_arch()
BF16 = torch.bfloat16


def model(seed: int) -> Decoder:
    return random_model(ARCH, seed).to(BF16)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def publish_bf16(store: HandoffStore, version: int, source: Decoder, path: Path) -> Handoff:
    writer = VersionCommitter.claim(store.root, 1)
    stage = writer.stage(version)
    shard = shard_of_any(stage / "model-00001-of-00001.safetensors", tensors_of(source))
    return writer.publish(version=version, shards=[shard], model_dir=path, producer="test")


def shard_of_any(path: Path, tensors: dict[str, torch.Tensor]) -> ShardResult:

    record, records = write_shard(path, [tensor_bytes(name, t, t.dtype) for name, t in tensors.items()])
    return ShardResult(path.name, record, records)


def publish_delta(store: HandoffStore, version: int, needs: tuple[int, ...], old: Decoder, new: Decoder) -> Handoff:
    writer = VersionCommitter.claim(store.root, 1)
    stage = writer.stage(version)
    before, after = tensors_of(old), tensors_of(new)
    records, whole = [], {}
    for name, tensor in after.items():
        record = encode_chunk(0, memoryview(raw(before[name])), memoryview(raw(tensor)), 2)
        if record:
            records.append((name, record))
        data = raw(tensor)
        whole[name] = TensorRecord("bfloat16", tuple(tensor.shape), "", 0, len(data), chunk_digests(data, CHUNK_BYTES))
    delta = Delta(records, sum(len(r) for _, r in records), {})
    result = delta_result(stage, "delta-00001-of-00001.bin", delta, CHUNK_BYTES)
    return writer.publish(
        version=version,
        shards=[result],
        model_dir=stage,
        producer="test",
        kind="delta",
        needs=needs,
        tensors=whole,
    )


def nudged(source: Decoder, seed: int) -> Decoder:
    """A few elements moved, as by an optimizer step."""
    result = model(0)
    result.load_state_dict(source.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in result.parameters():
        mask = torch.rand(parameter.shape, generator=generator) < 0.02
        parameter.data[mask] *= 1.01
    return result

"""LoRA adapters for tests: of experts, too, in both layouts that `hpcrl.weights.read.adapters` describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.weights import Handoff, VersionCommitter, write_shard
from hpcrl.weights.format.manifest import content_digest
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, ADAPTER_MODEL
from hpcrl.weights.write.handoff_writer import ShardResult
from hpcrl.weights.write.lora import adapter_config

ExpertLayout = Literal["per_expert", "fused"]
_PREFIX = "base_model.model."
_Array = NDArray[Any]


class ExpertAdapter(NamedTuple):
    """The adapter of the experts of one layer; gate and up have their A in common.

    Attributes
    ----------
    gate_up_a:
        ``[experts, r, hidden]``.
    gate_up_b:
        ``[experts, 2 · intermediate, r]``, gate first.
    down_a:
        ``[experts, r, intermediate]``.
    down_b:
        ``[experts, hidden, r]``.
    """

    gate_up_a: _Array
    gate_up_b: _Array
    down_a: _Array
    down_b: _Array


def adapter_tensors(
    linear: Mapping[str, tuple[_Array, _Array]], experts: Mapping[str, ExpertAdapter], layout: ExpertLayout
) -> dict[str, _Array]:
    """Arrays by the names of ``adapter_model.safetensors``.

    ``linear`` has A ``[r, in]`` and B ``[out, r]`` by module, for example ``model.layers.0.self_attn.q_proj``;
    ``experts`` those of modules such as ``model.layers.0.mlp.experts``.
    """
    result: dict[str, _Array] = {}
    for module, (a, b) in linear.items():
        result[f"{module}.lora_A.weight"], result[f"{module}.lora_B.weight"] = a, b
    for module, adapter in experts.items():
        result.update(_fused(module, adapter) if layout == "fused" else _per_expert(module, adapter))
    return {_PREFIX + name: np.ascontiguousarray(array) for name, array in result.items()}


def _per_expert(module: str, adapter: ExpertAdapter) -> dict[str, _Array]:
    half = adapter.gate_up_b.shape[1] // 2
    result = {}
    for e in range(adapter.gate_up_a.shape[0]):
        parts = {
            "gate_proj": (adapter.gate_up_a[e], adapter.gate_up_b[e, :half]),
            "up_proj": (adapter.gate_up_a[e], adapter.gate_up_b[e, half:]),
            "down_proj": (adapter.down_a[e], adapter.down_b[e]),
        }
        for name, (a, b) in parts.items():
            result[f"{module}.{e}.{name}.lora_A.weight"], result[f"{module}.{e}.{name}.lora_B.weight"] = a, b
    return result


def _fused(module: str, adapter: ExpertAdapter) -> dict[str, _Array]:
    def rows(a: _Array) -> _Array:
        return a.reshape(-1, a.shape[-1])

    def columns(b: _Array) -> _Array:
        return b.transpose(1, 2, 0).reshape(b.shape[1], -1)

    return {
        f"{module}.base_layer.lora_A.weight": rows(adapter.gate_up_a),
        f"{module}.base_layer.lora_B.weight": columns(adapter.gate_up_b),
        f"{module}.lora_A.weight": rows(adapter.down_a),
        f"{module}.lora_B.weight": columns(adapter.down_b),
    }


def config_of(
    linear: Sequence[str], experts: Sequence[str], layout: ExpertLayout, *, rank: int, alpha: float
) -> dict[str, Any]:
    """The adapter's ``adapter_config.json``."""
    own = [f"experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")] if layout == "per_expert" else []
    config = adapter_config(rank=rank, alpha=alpha, modules=[*linear, *(own if experts else ())], base_model="start")
    if experts and layout == "fused":
        # in this order PEFT wraps gate and up first, which is what `base_layer` in the names says
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return config


def publish_adapter(
    writer: VersionCommitter,
    *,
    version: int,
    base: Handoff,
    tensors: Mapping[str, _Array],
    dtype: str,
    config: Mapping[str, Any],
    producer: str,
) -> Handoff:
    """Publish an adapter that was trained on ``base``. Arrays of bfloat16, which numpy lacks, come as uint16."""
    stage = writer.stage(version)
    data = [
        TensorBytes(name, dtype, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, array in tensors.items()
    ]
    shard = ShardResult(ADAPTER_MODEL, *write_shard(stage / ADAPTER_MODEL, data))
    return writer.publish(
        version=version,
        shards=[shard],
        model_dir=None,
        producer=producer,
        metadata={ADAPTER_CONFIG: json.dumps(dict(config), indent=2).encode() + b"\n"},
        kind="lora",
        needs=(*base.manifest.needs, base.version),
        parent_xxh3_128=content_digest(base.manifest),
    )

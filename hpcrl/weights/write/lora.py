"""LoRA adapters as PEFT and vLLM read them, published as versions of kind ``lora`` (needs numpy).

Engines of a run merge an adapter into the version that it was trained on, whatever its layout
(`hpcrl.weights.format.adapters`). Where vLLM itself loads one, the layout of experts has to be that of its model class;
the wrong one is dropped or misread without an error, so `adapter_tensors` makes either from the same arrays:

``per_expert``
    ``...mlp.experts.7.gate_proj.lora_A.weight [r, in]`` and so on: Qwen3-MoE, DeepSeek-V3, GLM in vLLM
    (``is_3d_moe_weight = False``).
``fused``
    ``...mlp.experts.base_layer.lora_A.weight [E·r, hidden]`` and ``lora_B [2·intermediate, r·E]`` for gate and up,
    ``...mlp.experts.lora_A.weight [E·r, intermediate]`` and ``lora_B [hidden, r·E]`` for down: PEFT's wrapper of
    parameters, and vLLM's models with ``is_3d_moe_weight = True``. Rows of A are grouped by expert, columns of B by
    rank: column ``i·E + e`` belongs to expert ``e``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.weights.format.adapters import ADAPTER_CONFIG, ADAPTER_MODEL
from hpcrl.weights.format.manifest import Handoff, content_digest
from hpcrl.weights.format.shard import TensorBytes, write_shard
from hpcrl.weights.write.handoff_writer import HandoffWriter, ShardResult

__all__ = ["ExpertAdapter", "ExpertLayout", "adapter_config", "adapter_tensors", "publish_adapter"]

ExpertLayout = Literal["per_expert", "fused"]
MAX_RANK = 512
"""vLLM refuses adapters of a higher rank."""

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

    Parameters
    ----------
    linear:
        A ``[r, in]`` and B ``[out, r]`` by module, for example ``model.layers.0.self_attn.q_proj``.
    experts:
        By module, for example ``model.layers.0.mlp.experts``.
    layout:
        Of the experts.

    Raises
    ------
    ValueError
        Shapes do not fit each other, or ranks differ or are too high.
    """
    ranks = {a.shape[0] for a, _ in linear.values()} | {adapter.gate_up_a.shape[1] for adapter in experts.values()}
    if len(ranks) != 1 or not 1 <= (rank := ranks.pop()) <= MAX_RANK:
        raise ValueError(f"an adapter has one rank between 1 and {MAX_RANK}, in the same way for all modules")
    result: dict[str, _Array] = {}
    for module, (a, b) in linear.items():
        if a.ndim != 2 or b.ndim != 2 or b.shape[1] != rank:
            raise ValueError(f"{module}: A {a.shape} and B {b.shape} are not [r, in] and [out, r] with r {rank}")
        result[f"{module}.lora_A.weight"], result[f"{module}.lora_B.weight"] = a, b
    for module, adapter in experts.items():
        _check_experts(module, adapter, rank)
        result.update(_fused(module, adapter) if layout == "fused" else _per_expert(module, adapter))
    return {_PREFIX + name: np.ascontiguousarray(array) for name, array in result.items()}


def _check_experts(module: str, adapter: ExpertAdapter, rank: int) -> None:
    (count, _, hidden), (_, both, _) = adapter.gate_up_a.shape, adapter.gate_up_b.shape
    wanted = ((count, rank, hidden), (count, both, rank), (count, rank, both // 2), (count, hidden, rank))
    if both % 2 or tuple(array.shape for array in adapter) != wanted:
        shapes = ", ".join(str(array.shape) for array in adapter)
        raise ValueError(f"{module}: the shapes {shapes} are not those of one adapter of rank {rank}")


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


def adapter_config(
    *,
    rank: int,
    alpha: float,
    linear: Sequence[str],
    experts: Sequence[str],
    layout: ExpertLayout,
    base_model: str,
) -> dict[str, Any]:
    """Make the bytes of ``adapter_config.json``.

    Parameters
    ----------
    rank, alpha:
        The product of B and A is scaled by ``alpha / rank``.
    linear, experts:
        Modules as for `adapter_tensors`.
    layout:
        Of the experts.
    base_model:
        Path or name of the model that is adapted.
    """
    modules = {name.rpartition(".")[2] for name in linear}
    parameters: list[str] = []
    if experts and layout == "per_expert":
        modules |= {"gate_proj", "up_proj", "down_proj"}
    elif experts:
        # in this order PEFT wraps gate and up first, which is what `base_layer` in the names says
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "target_parameters": parameters or None,
    }


def publish_adapter(
    writer: HandoffWriter,
    *,
    version: int,
    base: Handoff,
    tensors: Mapping[str, _Array],
    dtype: str,
    config: Mapping[str, Any],
    producer: str,
) -> Handoff:
    """Publish an adapter as a version of kind ``lora``, by one writer (adapters are small).

    Parameters
    ----------
    writer:
        Of the store.
    version:
        Policy version.
    base:
        The version that the adapter was trained on: whole (kind ``full``), or a delta. It stays as long as the adapter.
    tensors:
        From `adapter_tensors`.
    dtype:
        torch's name. Arrays of bfloat16, which numpy lacks, come as uint16.
    config:
        From `adapter_config`.
    producer:
        For the manifest.

    Raises
    ------
    ValueError
        The base is itself an adapter, or FP8, into which no adapter is merged.
    OSError, HandoffError, FencedError
        As for `HandoffWriter.publish`.
    """
    if base.manifest.kind not in ("full", "delta"):
        raise ValueError(f"version {base.version} is of kind {base.manifest.kind!r}, which cannot be adapted")
    stage = writer.stage(version)
    data = [
        TensorBytes(name, dtype, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, array in tensors.items()
    ]
    try:
        shard = ShardResult(ADAPTER_MODEL, *write_shard(stage / ADAPTER_MODEL, data))
    except BaseException:
        writer.discard(version)
        raise
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

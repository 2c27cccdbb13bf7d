"""Which tensors an FP8 version quantises, and how a reader finds their scales: block-wise e4m3, as DeepSeek-V3.

A weight ``X.weight [rows, columns]`` is cut into blocks of 128 x 128. Each block has one float32 in
``X.weight_scale_inv [ceil(rows / 128), ceil(columns / 128)]``, and ``weight = quantised * scale_inv``, which is what
vLLM, SGLang and transformers read by ``quantization_config`` in config.json. The arithmetic is in
`hpcrl.modeling.fp8`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcrl.weights.format.layout import PublishedTensor

__all__ = ["BLOCK", "FP8_DTYPE", "is_quantised", "quantization_config", "scale_tensor"]

BLOCK = 128
FP8_DTYPE = "float8_e4m3fn"

#: modules whose matrices stay as they are: engines read them unquantised (embeddings, output, routers, the small
#: gates of sparse attention's indexer, the projection of multi-token prediction)
_KEPT = ("embed_tokens", "lm_head", "gate", "shared_expert_gate", "weights_proj", "eh_proj", "shared_head.head")
_KEPT_ENDS = tuple(f".{kept}" for kept in _KEPT)


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the published tensor ``name`` is stored in FP8."""
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(shape) != 2:
        return False
    return module not in _KEPT and not module.endswith(_KEPT_ENDS)


def scale_tensor(name: str, shape: tuple[int, ...]) -> PublishedTensor:
    """The scales that belong to the quantised tensor ``name``."""
    rows, columns = shape
    return PublishedTensor(f"{name}_scale_inv", "float32", (-(-rows // BLOCK), -(-columns // BLOCK)))


def quantization_config(tensors: Iterable[PublishedTensor]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for the model of (unquantised) ``tensors``."""
    kept = [
        tensor.name.removesuffix(".weight")
        for tensor in tensors
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight") and not is_quantised(tensor.name, tensor.shape)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }

"""Selection of tensors that are quantised to FP8, and the place of their scales: block-wise e4m3, as DeepSeek-V3.

A weight ``X.weight [rows, columns]`` is cut into blocks of 128 x 128. Each block has one float32 in
``X.weight_scale_inv [ceil(rows / 128), ceil(columns / 128)]``, and ``weight = quantised * scale_inv``, which is what
vLLM, SGLang and transformers read by ``quantization_config`` in config.json. The arithmetic is in
`hpcrl.modeling.fp8.quantiser`. Versions in FP8 and a trainer that multiplies in FP8 read the same list.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcrl.weights.format.layout import PublishedTensor

BLOCK = 128
FP8_DTYPE = "float8_e4m3fn"

#: modules whose matrices stay unquantised, because engines multiply with them unquantised: embeddings, output, routers,
#: the projection of multi-token prediction, and of sparse attention's indexer the weights of its heads and its keys,
#: which vLLM computes in one product and converts back to bfloat16 where a checkpoint has them in FP8; of the gated
#: delta rule the one or two numbers of each head
_KEPT = (
    *("embed_tokens", "embeddings", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj", "shared_head.head"),
    *("indexer.weights_proj", "indexer.wk", "mtp.fc", "in_proj_ba", "in_proj_b", "in_proj_a"),
)
_KEPT_ENDS = tuple(f".{kept}" for kept in _KEPT)


@dataclass(frozen=True)
class QuantisedModules:
    """Selection of the matrices of a model that are quantised.

    Attributes
    ----------
    linears, experts:
        Whether matrices of routed experts (``experts``) and all others (``linears``) are quantised.
    keep:
        Patterns (``*``, ``?``, ``[…]``) of published names of modules that are not quantised, in addition to those that
        never are.
    """

    linears: bool = True
    experts: bool = True
    keep: tuple[str, ...] = ()

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the published tensor ``name`` of ``shape`` is quantised."""
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(shape) != 2 or module in _KEPT or module.endswith(_KEPT_ENDS):
            return False
        if not (self.experts if ".experts." in name else self.linears):
            return False
        return not any(fnmatch.fnmatchcase(module, pattern) for pattern in self.keep)


def scale_tensor(name: str, shape: tuple[int, ...]) -> PublishedTensor:
    """Return the scales that belong to the quantised tensor ``name``."""
    rows, columns = shape
    return PublishedTensor(f"{name}_scale_inv", "float32", (-(-rows // BLOCK), -(-columns // BLOCK)))


def quantization_config(tensors: Iterable[PublishedTensor]) -> dict[str, Any]:
    """Return the ``quantization_config`` of config.json for a model that is published as ``tensors``."""
    kept = [
        tensor.name.removesuffix(".weight")
        for tensor in tensors
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.dtype != FP8_DTYPE
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }

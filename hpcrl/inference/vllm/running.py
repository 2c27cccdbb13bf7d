"""Finds a published tensor in a model that vLLM runs, if it is stored there as it was published.

vLLM fuses matrices, deals them out to ranks, and brings some into forms of its kernels. Compared with what was
published are embeddings and output, a rank's rows of them; weights of norms; and matrices that are not quantised and
not distributed, fused or not. Experts and quantised matrices are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from hpcrl.inference.proof import TensorSample, same_bits
from hpcrl.weights import TensorRecord


class _Rows(NamedTuple):
    """Rows of a published tensor that this rank has, from ``first`` on."""

    first: int
    tensor: torch.Tensor


class RunningModel:
    """A model of one worker, by published names. Its parameters may be replaced; its layers stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Inspect the layers of ``model``."""
        self._layers = dict(model.named_modules(remove_duplicate=False))
        self._fused: dict[str, tuple[str, int]] = {}
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            self._fused |= {part: (fused, i) for i, part in enumerate(parts)}

    def can_compare(self, name: str, record: TensorRecord) -> bool:
        """Return whether this rank has some of the tensor as it was published."""
        return self._rows(name, tuple(record.shape)) is not None

    def compare(self, sample: TensorSample) -> bool | None:
        """Return whether the model has the bits of ``sample``; None where this rank has none of its rows."""
        rows = self._rows(sample.name, sample.shape)
        if rows is None:
            return None
        begin = max(sample.first_row, rows.first)
        end = min(sample.first_row + len(sample.tensor), rows.first + len(rows.tensor))
        if begin >= end:
            return None
        part = sample.tensor[begin - sample.first_row : end - sample.first_row]
        return same_bits(part, rows.tensor[begin - rows.first : end - rows.first])

    def _rows(self, name: str, shape: tuple[int, ...]) -> _Rows | None:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            return None
        layer = self._layers.get(module)
        if layer is None:
            return self._part(module, shape)
        weight = layer._parameters.get(leaf)
        if weight is None or weight.dim() != len(shape):
            return None
        if isinstance(layer, VocabParallelEmbedding):
            own = layer.shard_indices
            fits = isinstance(layer.quant_method, UnquantizedEmbeddingMethod) and weight.shape[1:] == shape[1:]
            count = own.org_vocab_end_index - own.org_vocab_start_index
            return _Rows(own.org_vocab_start_index, weight[:count]) if fits and count else None
        plain = "Norm" in type(layer).__name__ or _is_plain(layer)
        return _Rows(0, weight) if plain and tuple(weight.shape) == shape else None

    def _part(self, module: str, shape: tuple[int, ...]) -> _Rows | None:
        """Find a matrix that vLLM has put into one with others."""
        parent, _, part = module.rpartition(".")
        fused, number = self._fused.get(part, ("", 0))
        layer = self._layers.get(f"{parent}.{fused}")
        weight = None if layer is None else layer._parameters.get("weight")
        sizes: list[int] = list(getattr(layer, "output_sizes", ()))
        if layer is None or weight is None or not _is_plain(layer) or len(sizes) <= number:
            return None
        if tuple(weight.shape) != (sum(sizes), *shape[1:]) or sizes[number] != shape[0]:
            return None
        first = sum(sizes[:number])
        return _Rows(0, weight[first : first + sizes[number]])


def _is_plain(layer: torch.nn.Module) -> bool:
    return type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod

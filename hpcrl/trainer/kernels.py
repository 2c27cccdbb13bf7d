"""Finds the kernels that a recipe selects on this rank's device, and installs them in a model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpcrl.config.recipe import TrainerConfig
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.kernels.attend import kernel_for, use_flash_attention_3
from hpcrl.modeling.kernels.kernel import QKV
from hpcrl.modeling.layers.dsa import SparseLatentAttention
from hpcrl.modeling.sparse_kernels.find import find_sparse_kernel
from hpcrl.modeling.sparse_kernels.kernel import SparseKernel, SparseShape
from hpcrl.models.arch import GlmMoeDsaArch, ModelArch


class TrainerKernels(NamedTuple):
    """Kernels for attention: the name of that of dense layers; None for sparse attention if the model has none."""

    attention: str
    sparse_attention: SparseKernel | None

    @property
    def names(self) -> dict[str, str]:
        """Return the names of kernels by setting of ``trainer.kernels``, for the record of the run."""
        if self.sparse_attention is None:
            return {"attention": self.attention}
        return {"sparse_attention": self.sparse_attention.name}


def find_kernels(config: TrainerConfig, arch: ModelArch, device: torch.device) -> TrainerKernels:
    """Return the kernels that the recipe selects for ``arch`` on ``device``.

    On a GPU, kernels other than torch's are tried before.

    Raises
    ------
    UsageError
        A kernel cannot be used here (see `find_sparse_kernel` and `use_flash_attention_3`).
    """
    dtype = getattr(torch, config.dtype)
    sparse = None
    if isinstance(arch, GlmMoeDsaArch):
        shape = SparseShape(
            heads=arch.num_attention_heads,
            dim=arch.kv_lora_rank + arch.qk_rope_head_dim,
            value_dim=arch.kv_lora_rank,
            width=arch.index_topk,
            index_heads=arch.index_n_heads,
            index_dim=arch.index_head_dim,
            dtype=dtype,
        )
        sparse = find_sparse_kernel(config.kernels.sparse_attention, device, shape)
    if config.kernels.attention == "flash_attention_3":
        use_flash_attention_3(device, dtype)
        return TrainerKernels("flash_attention_3", sparse)
    width = max(arch.kv.key_dim, arch.kv.value_dim)
    some = torch.empty(0, 1, width, dtype=dtype, device=device)
    return TrainerKernels(kernel_for(QKV(some, some, some)).name, sparse)


def apply_kernels(model: Decoder, kernels: TrainerKernels) -> None:
    """Let the layers of ``model`` compute by ``kernels``."""
    for module in model.modules():
        if isinstance(module, SparseLatentAttention):
            assert kernels.sparse_attention is not None
            module.kernel = kernels.sparse_attention

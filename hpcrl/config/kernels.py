"""Which kernels the trainer of a recipe computes with."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import StrictModel

__all__ = ["KernelsConfig"]


class KernelsConfig(StrictModel):
    """What computes attention (docs/training.md, Kernels). A kernel that is not there, or is tried at the start and
    differs from the reference, ends the trainer's start with the reason."""

    sparse_attention: Literal["auto", "reference", "triton", "flash_mla", "flash_mla_cudnn"] = "auto"
    """Sparse attention (GLM-5): ``reference`` in plain torch anywhere; ``triton`` by programs of hpcrl's own;
    ``flash_mla`` forward by FlashMLA, backward by Triton; ``flash_mla_cudnn`` backward by cudnn-frontend, whose sums
    differ from run to run. ``auto``: ``reference`` on processors and in float32, else ``triton``."""
    attention: Literal["auto", "flash_attention_3"] = "auto"
    """Dense attention. ``auto``: the fastest kernel of torch that takes it (FlashAttention 2 on GPUs in half
    precision). ``flash_attention_3``: torch's own with the kernels of the package ``flash_attn_3``, on Hopper."""

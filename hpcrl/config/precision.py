"""In which precision the trainer of a recipe computes."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import StrictModel


class Fp8Config(StrictModel):
    """Products of matrices in block FP8 (docs/training.md, Block FP8)."""

    linears: bool = True
    """Matrices outside of routed experts."""
    experts: bool = True
    """Matrices of routed experts."""
    backend: Literal["auto", "deep_gemm", "torch", "reference"] = "auto"
    """Kernels of the products: ``deep_gemm`` and ``torch`` (its ``scaled_mm``) on GPUs of NVIDIA's Hopper,
    ``reference`` in plain torch anywhere, slowly. ``auto``: ``reference`` on processors, else the first of the others
    that is there; where none is, the trainer does not start."""
    keep: list[str] = []
    """Patterns (``*``, ``?``, ``[…]``) of published names of modules that stay in ``trainer.dtype``, such as
    ``*.self_attn.kv_b_proj``, in addition to those that always do: embeddings, the head, norms, routers, and of an
    indexer the keys and the weights of heads. Versions of ``handoff.kind: fp8`` keep the same."""


class PrecisionConfig(StrictModel):
    """Precision of the trainer's computation, in addition to ``trainer.dtype``."""

    fp8: Fp8Config | None = None
    """Matrices of layers are multiplied in FP8, weights with a scale for each 128 x 128 block, activations and
    gradients with one for each 128 numbers; sums are float32, and so are master weights. ``{}`` uses the defaults.
    None: ``trainer.dtype`` everywhere."""

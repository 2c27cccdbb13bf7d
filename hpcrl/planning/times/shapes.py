"""Layouts of roles on GPUs, for which memory and times are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.recipe import ContextScheme

ComputeDtype = Literal["float32", "bfloat16", "fp8"]
SparseKernels = Literal["triton", "flash_mla", "flash_mla_cudnn", "libraries"]
"""Kernels of sparse attention in a trainer: those of ``trainer.kernels.sparse_attention``, or all of others: FlashMLA,
cuDNN, and an indexer of DeepGEMM."""
Recompute = Literal["none", "selective", "full"]
"""Part of the forward pass that is recomputed: nothing, all but attention, experts and exchanges, everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerShape:
    """Parallelism and memory features of a trainer.

    Ranks form a mesh of copies × FSDP × context parallelism; expert parallelism takes the innermost ranks of a copy,
    and experts are sharded again over the others.

    Attributes
    ----------
    nodes, gpus_per_node:
        Nodes and GPUs of the ranks, one a GPU.
    context_parallel, expert_parallel, copies:
        Degrees, of which the last says how many copies of the parameters there are; ranks of one copy can be divided by
        the others.
    cp_scheme:
        Method of attention over the ranks of a context-parallel group.
    compute_dtype:
        Dtype of matrix products.
    gather_dtype_bytes, grad_dtype_bytes:
        Bytes of a parameter in FSDP's all-gather, and of a gradient in its reduce-scatter.
    recompute:
        Part of the forward pass that is recomputed in the backward pass.
    recompute_every:
        Number of layers of which one is recomputed.
    head_twice:
        Logits are computed again in the backward pass.
    reshard:
        Parameters are freed after the forward pass and gathered again.
    offload_optimizer, offload_activations, offload_parameters:
        To host memory; the last with gradients and optimizer, whose step is computed there.
    reference:
        Whether the start model is computed in addition to the policy: a further forward pass, whose parameters come
        from the host where it is ``host``.
    micro_batch_tokens:
        Token budget of a micro-batch of one context-parallel group.
    trained:
        Parameters that are trained: those of adapters. None: all.
    muon:
        Hidden matrices are updated by Muon.
    rows_sent:
        Rows that a dispatch sends for each token. None: one for each of its experts, as torch's all-to-all does; DeepEP
        sends one to each node that has some of them.
    sparse_kernels:
        Kernels of sparse attention and its indexer.
    balanced_experts:
        A gate gives every expert as many tokens, as in benchmarks with random data.
    """

    nodes: int
    gpus_per_node: int
    context_parallel: int = 1
    expert_parallel: int = 1
    copies: int = 1
    cp_scheme: ContextScheme = "ulysses"
    compute_dtype: ComputeDtype = "bfloat16"
    gather_dtype_bytes: int = 2
    grad_dtype_bytes: int = 4
    trained: int | None = None
    recompute: Recompute = "full"
    recompute_every: int = 1
    head_twice: bool = False
    reshard: bool = True
    offload_optimizer: bool = False
    offload_activations: bool = False
    offload_parameters: bool = False
    reference: Literal["device", "host"] | None = None
    micro_batch_tokens: int = 32768
    muon: bool = False
    rows_sent: float | None = None
    sparse_kernels: SparseKernels = "triton"
    balanced_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("context_parallel", "expert_parallel"):
            if self.ranks % (self.copies * getattr(self, name)):
                ranks = f"{self.ranks} ranks with {self.copies} copies"
                raise ValueError(f"{name} {getattr(self, name)} does not divide {ranks}")

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the trainer."""
        return self.nodes * self.gpus_per_node

    @property
    def shards(self) -> int:
        """Return the number of ranks that one copy of the parameters is sharded over."""
        return self.ranks // self.copies

    @property
    def groups(self) -> int:
        """Return the number of context-parallel groups: each works on its own micro-batches."""
        return self.ranks // self.context_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """One side of serving: ``replicas`` of ``nodes`` nodes each.

    Attributes
    ----------
    replicas, nodes, gpus_per_node:
        Size.
    tensor_parallel:
        Ranks that share the layers of one data-parallel rank.
    expert_parallel:
        Ranks that share the experts; all of the replica where it is wide.
    weight_dtype, kv_dtype:
        ``fp8`` is block-scaled.
    max_num_seqs:
        Sequences that a data-parallel rank decodes at once.
    """

    replicas: int
    nodes: int
    gpus_per_node: int
    tensor_parallel: int = 1
    expert_parallel: int = 1
    weight_dtype: ComputeDtype = "bfloat16"
    kv_dtype: ComputeDtype = "bfloat16"
    max_num_seqs: int = 64

    @property
    def ranks(self) -> int:
        """Return the number of GPUs of a replica."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Return the number of data-parallel ranks of a replica: each has its own sequences."""
        return max(1, self.ranks // self.tensor_parallel)

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks that one copy of the experts is spread over, by experts or tensor parallelism."""
        return max(self.expert_parallel, self.tensor_parallel)

    @property
    def dispatches(self) -> bool:
        """Return whether tokens are sent to their experts.

        Within one data-parallel rank every GPU has all tokens, and results are added up.
        """
        return self.expert_parallel > 1 and self.data_parallel > 1

    @property
    def all_nodes(self) -> int:
        """Return the number of nodes of all replicas."""
        return self.replicas * self.nodes

    @property
    def all_ranks(self) -> int:
        """Return the number of GPUs of all replicas."""
        return self.replicas * self.ranks

    @property
    def sequences(self) -> int:
        """Return the number of sequences that all replicas decode at once."""
        return self.replicas * self.data_parallel * self.max_num_seqs

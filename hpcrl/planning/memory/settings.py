"""Inputs of the memory of a trainer, and the memory of its ranks on the host for versions and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.lora import LoraConfig
from hpcrl.config.recipe import ContextScheme
from hpcrl.models.adapting import lora_parameters
from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import DTYPE_BYTES
from hpcrl.planning.ledger import GIB, Term
from hpcrl.planning.memory.activations import ActivationShape
from hpcrl.planning.memory.padding import model_padding
from hpcrl.planning.muon import moments_formula, spared_bytes

OFFLOAD_BUCKET = 256 << 20
"""Bytes of optimizer state that move together (`hpcrl.trainer.memory.optimizer`)."""
OFFLOAD_BUCKETS = 3
"""Number of these buckets on the GPU at once: one is fetched, one is computed, one is written back."""
AUTO_CHUNK, AUTO_CHUNK_OF_ROLLOUTS = 4096, 1024
"""Tokens of a piece of the head, where the recipe lets the trainer choose (`hpcrl.trainer.step.head`)."""
HEAD_PIECE_BYTES = 32 << 20
"""Maximum bytes of the float32 logits of a piece of the vocabulary."""
LOGIT_PIECE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Maximum bytes of float32 logits that are processed at once (`hpcrl.trainer.batch.tensors`)."""
CUDA_BYTES = int(1.0 * GIB)
"""CUDA context, cuBLAS and cuDNN workspaces of a process."""
NCCL_BYTES = int(0.5 * GIB)
"""Buffers of one NCCL communicator over many nodes."""
FRAGMENTATION = 0.05
"""Memory that the caching allocator holds in addition to tensors, as a share of these."""
EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest rank of expert parallelism relative to the mean."""


@dataclass(frozen=True, slots=True)
class RealPass:
    """Activations of a micro-batch as the model's own code makes them, in bytes.

    Attributes
    ----------
    head, whole:
        At the highest point until the backward pass of the head is done, and of the whole pass.
    """

    head: int
    whole: int

    def __str__(self) -> str:
        return f"a pass of the real model takes {self.whole / GIB:.2f} GiB of activations and logits on each rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Inputs of the memory of the trainer.

    Attributes
    ----------
    ranks, ep, cp, dp_replicate:
        Ranks of the trainer; degrees of expert and context parallelism; copies of the parameters.
    cp_scheme:
        Method of attention over the context-parallel ranks.
    dtype:
        Dtype of parameters and activations in forward and backward.
    loss_of_rollouts:
        Whether the loss needs all log-probabilities first, so that logits in pieces are computed twice.
    micro_batch_tokens:
        Tokens of a micro-batch of one context-parallel group.
    trained_tokens:
        Tokens of a micro-batch whose logits are computed; None: all.
    accumulates:
        Whether there are several micro-batches a step: gradients of earlier ones are held.
    handoff_dtype, images, staging_bytes:
        Dtype of published weights; number of copies of its part of a version that a rank holds in host memory (two with
        deltas); and, where files are staged a few at a time, the maximum bytes of one copy.
    saves_aside:
        Whether a checkpoint is written from a copy in host memory while training continues.
    expert_imbalance:
        Tokens of the busiest rank of expert parallelism relative to the mean.
    device:
        ``cuda`` adds the memory of CUDA, NCCL and the caching allocator.
    host_is_apart:
        Whether memory that a tool moves to the host is not counted; None: as on the device, where a processor is its
        own host.
    optimizer_bucket_bytes:
        Bytes of optimizer state that move together.
    muon:
        Whether hidden matrices are updated by Muon, which has one moment, and the rest by AdamW.
    reference, reference_on_host, reference_saved:
        Whether a frozen reference is computed in addition to the policy; whether its parameters are on the host;
        whether it is in checkpoints.
    deepep_tokens:
        Maximum tokens that one rank gives to DeepEP in one pass; 0: torch's collectives carry them.
    deterministic:
        Whether backward passes add in a fixed order.
    real:
        Activations of the real model; None: by formulas.
    """

    ranks: int
    micro_batch_tokens: int
    dtype: str = "bfloat16"
    ep: int = 1
    cp: int = 1
    dp_replicate: int = 1
    cp_scheme: ContextScheme = "ulysses"
    trained_tokens: int | None = None
    accumulates: bool = True
    handoff_dtype: Literal["float32", "bfloat16", "fp8"] | None = None
    images: int = 1
    staging_bytes: int | None = None
    saves_aside: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    checkpoint_every_layers: int = 1
    activation_offload: bool = False
    offload_in_flight_bytes: int = 1 << 30
    optimizer_offload: bool = False
    parameter_offload: bool = False
    lm_head_chunk_tokens: int | None = None
    loss_of_rollouts: bool = False
    fp8: bool = False
    lora: LoraConfig | None = None
    router_replay: bool = False
    expert_imbalance: float = EXPERT_IMBALANCE
    device: Literal["cpu", "cuda"] = "cuda"
    host_is_apart: bool | None = None
    optimizer_bucket_bytes: int = OFFLOAD_BUCKET
    muon: bool = False
    reference: bool = False
    reference_on_host: bool = False
    reference_saved: bool = False
    deepep_tokens: int = 0
    deterministic: bool = False
    real: RealPass | None = None

    @property
    def shards(self) -> int:
        """Return the number of ranks that one copy of the parameters is sharded over."""
        return self.ranks // self.dp_replicate

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on one rank."""
        return -(-self.micro_batch_tokens // self.cp)

    @property
    def has_host(self) -> bool:
        """Return whether the memory of the host is separate from that of the device."""
        return self.device == "cuda" if self.host_is_apart is None else self.host_is_apart

    @property
    def offloads_activations(self) -> bool:
        """Return whether inputs of layers are moved off the device."""
        return self.activation_offload and self.activation_checkpointing != "none" and self.has_host

    @property
    def logit_tokens(self) -> int:
        """Return the tokens of a rank whose logits are computed."""
        return self.tokens if self.trained_tokens is None else -(-self.trained_tokens // self.cp)

    @property
    def head_rows(self) -> int:
        """Return the tokens whose logits exist at once."""
        return min(self.logit_tokens, self.lm_head_chunk_tokens or self.logit_tokens)

    @property
    def activations(self) -> ActivationShape:
        """Return the shape of the activations of a layer."""
        return ActivationShape(
            tokens=self.tokens,
            element_bytes=self.element_bytes,
            on_gpu=self.device == "cuda",
            imbalance=self.expert_imbalance if self.ep > 1 else 1.0,
            gathers_from=self.cp if self.cp > 1 and self.cp_scheme == "gather" else 0,
            head_ranks=1 if self.cp_scheme == "ring" else self.cp,
            ring=self.cp > 1 and self.cp_scheme == "ring",
            deterministic=self.deterministic,
        )


def trained_parameters(facts: ModelFacts, lora: LoraConfig | None) -> int:
    """Return the number of a model's parameters, or of those of its adapters."""
    if lora is None:
        return facts.num_parameters()
    return lora_parameters(facts, lora.rank, lora.targets, shared_outer=lora.experts == "shared_outer")


def reference_term(facts: ModelFacts, memory: TrainerMemory, *, ranks_here: int = 1) -> Term | None:
    """Return the copy of the reference on a rank, or on ``ranks_here`` of them; None where there is none."""
    if not memory.reference:
        return None
    p, n, b = (
        facts.num_parameters() + model_padding(facts, shards=memory.shards, ep=memory.ep),
        memory.shards,
        memory.element_bytes,
    )
    inputs: dict[str, float | str] = {"b": b, "P + padding": p, "N": n, "ranks": ranks_here}
    return Term("reference weights", b * p // n * ranks_here, "b (P + padding) / N · ranks", inputs)


def image_term(facts: ModelFacts, memory: TrainerMemory, *, ranks_here: int = 1) -> Term:
    """Return the term of a rank's part of a published version in host memory, times ``ranks_here``."""
    kind = memory.handoff_dtype or memory.dtype
    fp8 = kind == "fp8"
    # weights that are not quantised stay in the trainer's dtype
    published = sum(facts.weight_bytes(memory.dtype if fp8 else kind, fp8=fp8).values())
    each = -(-published // memory.ranks)
    if memory.staging_bytes is not None:
        each = min(each, memory.staging_bytes)
    inputs: dict[str, float | str] = {"V": published, "N": memory.ranks, "images": memory.images, "dtype": kind}
    if ranks_here == 1:
        return Term("image of a version", memory.images * each, "images · V / N", inputs)
    return Term("images of a version", memory.images * each * ranks_here, "images · V / N · ranks", inputs)


def checkpoint_term(facts: ModelFacts, memory: TrainerMemory, *, ranks_here: int = 1) -> Term | None:
    """Return the term of a rank's state, copied to be written during the next steps, times ``ranks_here``."""
    if not memory.saves_aside:
        return None
    # the base weights of adapters are not saved
    p = trained_parameters(facts, memory.lora)
    if memory.lora is None:
        p += model_padding(facts, shards=memory.shards, ep=memory.ep)
    width = 12 + (memory.element_bytes if memory.reference_saved else 0)
    spared = spared_bytes(facts, muon=memory.muon)
    inputs: dict[str, float | str] = {"P + padding": p, "N": memory.shards}
    formula = moments_formula(f"{width} (P + padding)", spared, inputs) + (" · ranks" if ranks_here > 1 else "")
    return Term("copy for a checkpoint", (width * p - spared) // memory.shards * ranks_here, formula, inputs)

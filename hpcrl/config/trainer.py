"""The section ``trainer`` of a recipe: steps, ranks, optimizer, parallelism and memory."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.lora import LoraConfig
from hpcrl.config.precision import PrecisionConfig


class KernelsConfig(StrictModel):
    """Kernels that compute attention (docs/training.md, Kernels). If a kernel is not available, or differs from the
    reference in the test at the start, the trainer's start fails with the reason.
    """

    sparse_attention: Literal["auto", "reference", "triton", "flash_mla", "flash_mla_cudnn"] = "auto"
    """Sparse attention (GLM-5): ``reference`` in plain torch anywhere; ``triton`` by programs of hpcrl's own;
    ``flash_mla`` forward by FlashMLA, backward by Triton; ``flash_mla_cudnn`` backward by cudnn-frontend, whose sums
    differ from run to run. ``auto``: ``reference`` on processors and in float32, else ``triton``."""
    attention: Literal["auto", "flash_attention_3"] = "auto"
    """Dense attention. ``auto``: the fastest kernel of torch that takes it (FlashAttention 2 on GPUs in half
    precision). ``flash_attention_3``: torch's own with the kernels of the package ``flash_attn_3``, on Hopper."""


class OptimizerConfig(StrictModel):
    """Optimizer, clipping and schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: hidden matrices (of attention, MLPs and each expert) are updated by orthogonalised momentum, scaled to
    the size of AdamW's updates, so that ``learning_rate`` and ``weight_decay`` mean the same. Embedding, head, routers,
    norms and other vectors have AdamW."""
    muon_momentum: Fraction = 0.95
    """``muon``: decay of the momentum, which is Nesterov's."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; biases, norms, attention sinks and constants of Mamba-2 heads have none."""
    beta1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    beta2: Fraction = 0.99
    """Decay of AdamW's second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from 0."""


ContextScheme = Literal["ulysses", "ring", "gather"]


class TrainerParallelismConfig(StrictModel):
    """Division of the work among the ranks, in addition to the sharding of parameters (docs/training.md, Meshes)."""

    dp_replicate: PositiveInt = 1
    """Copies of the parameters (HSDP): they are sharded over ``ranks`` divided by this, and gradients are added up over
    the copies. Divides ``ranks``; ``cp`` and ``ep`` divide what is left."""
    ep: PositiveInt = 1
    """Expert parallelism: ranks over which experts of a layer are distributed; divides ``ranks`` and the experts."""
    cp: PositiveInt = 1
    """Context parallelism: ranks among which a sequence is cut; divides ``ranks``."""
    cp_scheme: ContextScheme = "ulysses"
    """Method of attention over the ranks of a context-parallel group: ``ulysses`` exchanges tokens for heads, which
    have to be divided evenly; ``ring`` passes keys and values around, for any number of heads; ``gather`` is for latent
    attention (DeepSeek-V3, Kimi K2), whose latents it gathers once a layer: the least is sent, and each rank makes keys
    and values of what its queries see. Sparse attention has a scheme of its own, which goes by ``ulysses``."""
    dispatcher: Literal["all_to_all", "deepep"] = "all_to_all"
    """Transport of tokens to experts of other ranks: collectives of torch, or the kernels of DeepEP,
    which has to be installed where the trainer runs (never run on a GPU by this project yet)."""


class TrainerMemoryConfig(StrictModel):
    """Tools that save memory in exchange for time (docs/training.md, Memory tools)."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """``full``: of a layer only its input is kept, the rest is computed again in the backward pass; ``selective``: the
    outputs of attention, of products with experts and of exchanges between ranks are kept as well."""
    checkpoint_every_layers: PositiveInt = 1
    """Number of consecutive layers of which the first is computed again and the others are kept whole."""
    activation_offload: bool = False
    """Kept inputs of layers wait in host memory (with ``activation_checkpointing``)."""
    offload_in_flight_gib: PositiveFloat = 1.0
    """Device memory that ``activation_offload`` may hold for copies that are not done, in GiB; the input of one layer
    where that is more."""
    optimizer_offload: bool = False
    """Optimizer state lives in host memory, and comes to the device for its step a bucket at a time."""
    parameter_offload: bool = False
    """Shards of parameters, their gradients and the optimizer live in host memory (FSDP2's CPU offload); the step of
    the optimizer is computed there."""
    lm_head_chunk_tokens: PositiveInt | Literal["auto"] | None = None
    """Tokens whose logits are computed at once, with their part of the loss and the gradients; ``auto`` chooses. None:
    all logits of a micro-batch at once."""
    compile: bool = False
    """`torch.compile` of the layers: they keep and move less data. The first step takes minutes longer."""


class NonFiniteConfig(StrictModel):
    """Treatment of a step whose gradient is not finite."""

    action: Literal["end", "skip"] = "end"
    """``end``: the run ends, and names parameters and rollouts. ``skip``: weights and optimizer stay as they are, the
    step's version is published with the weights of the one before, and an event names the same. A run whose weights are
    not finite ends in any case."""
    max_in_a_row: PositiveInt = 3
    """Maximum number of consecutive skipped steps; the next one ends the run."""


class TrainerConfig(StrictModel):
    """The trainer role."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""
    ranks: PositiveInt = 1
    """Processes of the trainer; parameters are sharded over them (FSDP2), over all where there is one copy."""
    nodes: PositiveInt = 1
    """Nodes that the ranks are spread over, the same number on each. A local run has one."""
    micro_batch_tokens: PositiveInt = 2048
    """Token budget of one forward and backward pass of a rank; rollouts are packed into it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters in forward and backward; master weights and optimizer are float32."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    """Gradients that are not finite."""
    threads: PositiveInt = 1
    """CPU threads of each rank."""
    parallelism: TrainerParallelismConfig = TrainerParallelismConfig()
    """Division of the work among the ranks."""
    memory: TrainerMemoryConfig = TrainerMemoryConfig()
    """Tools that save memory in exchange for time."""
    precision: PrecisionConfig = PrecisionConfig()
    """Products of matrices in fewer bits."""
    lora: LoraConfig | None = None
    """Low-rank adapters are trained, and the model's own weights stay as they are: these have no gradient, no optimizer
    state and no float32 copy; checkpoints and versions hold the adapters alone. ``{}`` uses the defaults. None: the
    weights are trained."""
    kernels: KernelsConfig = KernelsConfig()
    """Kernels that compute attention."""
    deterministic: bool = False
    """On GPUs: the same numbers from the same batches each time, by slower kernels. On processors it is always so."""
    router_replay: bool = False
    """Tokens go to the experts that engines chose for them, by weights of the trainer's own routers; tokens without
    recorded experts use the trainer's own router, and are counted: ``unknown_routing``. Engines return experts then."""
    replay_probe_steps: NonNegativeInt = 0
    """With ``router_replay``: number of steps after which the first micro-batch of each rank goes through the model
    once more, without replay and without gradients, to measure the effect of replay: ``unreplayed_mismatch_kl`` next to
    ``replayed_mismatch_kl``. 0: never."""
    freeze: list[str] | None = None
    """Patterns (``*``, ``?``, ``[…]``) of published names of tensors that are not trained, such as
    ``*.mlp.gate.weight``: they have no gradient and no optimizer state, and are saved and published all the same. The
    experts of a layer are one parameter, frozen together. None: what its family says (the indexer of GLM-5)."""
    mtp_tensors: Literal["keep", "drop"] = "keep"
    """Treatment of the model's tensors of multi-token prediction, which are not trained: ``keep`` carries them
    through as they are, into checkpoints, versions and exports; ``drop`` leaves them out of all three."""

    @property
    def data_ranks(self) -> int:
        """Return the number of data-parallel ranks, which is the number of shards of a batch.

        Ranks of a context-parallel group share one shard.
        """
        return self.ranks // self.parallelism.cp

    @property
    def dispatched_tokens(self) -> int:
        """Return the maximum tokens that one rank gives to its sparse layers in one pass."""
        cp = self.parallelism.cp
        share = -(-self.micro_batch_tokens // cp)
        # chunks near heads and tails have unequal lengths, and padding is added
        unequal = self.parallelism.cp_scheme != "ulysses" and cp > 1
        return (2 * share if unequal else share) + 2 * cp

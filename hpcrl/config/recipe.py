"""The recipe: what a researcher wants. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.base import Fraction, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.chat import ChatConfig
from hpcrl.config.engine import EngineConfig, EngineGroupConfig, EngineMemoryConfig
from hpcrl.config.environments import (
    CalculatorEnv,
    CustomEnv,
    DatasetEnv,
    EnvironmentConfig,
    HostedEnv,
    LatencyConfig,
    WordsEnv,
)
from hpcrl.config.evaluation import EvaluationSetConfig
from hpcrl.config.job import JobConfig
from hpcrl.config.kernels import KernelsConfig
from hpcrl.config.lora import LoraConfig
from hpcrl.config.precision import PrecisionConfig
from hpcrl.config.rollouts import AdaptiveConcurrencyConfig, RolloutConfig
from hpcrl.config.sampling import EvaluationSampling, SamplingConfig
from hpcrl.config.sft import SftColumns, SftConfig
from hpcrl.config.supervision import (
    EnginePolicyConfig,
    OrchestratorPolicyConfig,
    RolePolicyConfig,
    SupervisionConfig,
)
from hpcrl.config.warmup import WarmupConfig

__all__ = [
    "AdaptiveConcurrencyConfig",
    "AlgorithmConfig",
    "CalculatorEnv",
    "CheckpointConfig",
    "ContextScheme",
    "CustomEnv",
    "DatasetEnv",
    "EngineConfig",
    "EngineGroupConfig",
    "EngineMemoryConfig",
    "EnginePolicyConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationSampling",
    "HandoffConfig",
    "HostedEnv",
    "JobConfig",
    "LatencyConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OrchestratorConfig",
    "OrchestratorPolicyConfig",
    "Recipe",
    "RolePolicyConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SftColumns",
    "SftConfig",
    "SupervisionConfig",
    "TrainerConfig",
    "TrainerMemoryConfig",
    "TrainerParallelismConfig",
    "WarmupConfig",
    "WordsEnv",
]

_COLLECTIVE_MARGIN_S = 300.0
"""How much longer than a wait at the dock the other ranks wait in a collective."""


class ModelConfig(StrictModel):
    """The model that is trained."""

    path: str
    """Hugging Face model directory that the run starts from; relative to where hpcrl is called. Or the id of a
    published model, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, that ``hpcrl model get`` put into ``paths.models_root``
    of the profile."""
    warmup: WarmupConfig | None = None
    """Settings of ``hpcrl warmup`` for recipes whose start model is made rather than given."""
    chat: ChatConfig = ChatConfig()
    """Chat format and variables of the chat template."""


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
    """How the ranks share the work, beside the sharding of parameters (docs/training.md, Meshes)."""

    dp_replicate: PositiveInt = 1
    """Copies of the parameters (HSDP): they are sharded over ``ranks`` divided by this, and gradients are added up over
    the copies. Divides ``ranks``; ``cp`` and ``ep`` divide what is left."""
    ep: PositiveInt = 1
    """Expert parallelism: ranks among which the experts of a layer are dealt out; divides ``ranks`` and the experts."""
    cp: PositiveInt = 1
    """Context parallelism: ranks among which a sequence is cut; divides ``ranks``."""
    cp_scheme: ContextScheme = "ulysses"
    """How ranks of a context-parallel group attend together: ``ulysses`` exchanges tokens for heads, which have to be
    dealt out evenly; ``ring`` passes keys and values around, for any number of heads; ``gather`` is for latent
    attention (DeepSeek-V3, Kimi K2), whose latents it gathers once a layer: the least is sent, and each rank makes keys
    and values of what its queries see. Sparse attention has a scheme of its own, which goes by ``ulysses``."""
    dispatcher: Literal["all_to_all", "deepep"] = "all_to_all"
    """What takes tokens to experts of other ranks: collectives of torch, or the kernels of DeepEP,
    which has to be installed where the trainer runs (never run on a GPU by this project yet)."""


class TrainerMemoryConfig(StrictModel):
    """What saves memory in exchange for time (docs/training.md, Memory tools)."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """``full``: of a layer only its input is kept, the rest is computed again in the backward pass; ``selective``: the
    outputs of attention, of products with experts and of exchanges between ranks are kept as well."""
    checkpoint_every_layers: PositiveInt = 1
    """Of so many layers in a row the first is computed again, the others are kept whole."""
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
    all logits of a micro-batch are there together."""
    compile: bool = False
    """`torch.compile` of the layers: less is kept of them, and less moved. The first step takes minutes longer."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, given: Any) -> Any:
        # what `trainer.precision.fp8` and `trainer.lora` are now; recipes of earlier runs have them, always off
        if not isinstance(given, dict):
            return given
        off = {"fp8": False, "lora_rank": None}
        return {key: value for key, value in given.items() if key not in off or value is not off[key]}


class NonFiniteConfig(StrictModel):
    """What becomes of a step whose gradient is not finite."""

    action: Literal["end", "skip"] = "end"
    """``end``: the run ends, and names parameters and rollouts. ``skip``: weights and optimizer stay as they are, the
    step's version is published with the weights of the one before, and an event names the same. A run whose weights are
    not finite ends in any case."""
    max_in_a_row: PositiveInt = 3
    """So many steps may be skipped one after the other; the next one ends the run."""


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
    """How the ranks share the work."""
    memory: TrainerMemoryConfig = TrainerMemoryConfig()
    """What saves memory in exchange for time."""
    precision: PrecisionConfig = PrecisionConfig()
    """Products of matrices in fewer bits."""
    lora: LoraConfig | None = None
    """Low-rank adapters are trained, and the model's own weights stay as they are: these have no gradient, no optimizer
    state and no float32 copy; checkpoints and versions hold the adapters alone. ``{}`` is the whole setting. None: the
    weights are trained."""
    kernels: KernelsConfig = KernelsConfig()
    """What computes attention."""
    deterministic: bool = False
    """On GPUs: the same numbers from the same batches each time, by slower kernels. On processors it is always so."""
    router_replay: bool = False
    """Tokens go to the experts that engines chose for them, by weights of the trainer's own routers; tokens that nobody
    spoke of go where the routers say, and are counted: ``unknown_routing``. Engines return experts then."""
    replay_probe_steps: NonNegativeInt = 0
    """With ``router_replay``: every so many steps the first micro-batch of each rank goes through the model once more,
    without replay and without gradients, to say what replay is good for: ``unreplayed_mismatch_kl`` beside
    ``replayed_mismatch_kl``. 0: never."""
    freeze: list[str] | None = None
    """Patterns (``*``, ``?``, ``[…]``) of published names of tensors that are not trained, such as
    ``*.mlp.gate.weight``: they have no gradient and no optimizer state, and are saved and published all the same. The
    experts of a layer are one parameter, frozen together. None: what its family says (the indexer of GLM-5)."""
    mtp_tensors: Literal["keep", "drop"] = "keep"
    """What becomes of the model's tensors of multi-token prediction, which are not trained: ``keep`` carries them
    through as they are, into checkpoints, versions and exports; ``drop`` leaves them out of all three."""

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: a batch is cut into so many shards. Ranks of a context-parallel group share one."""
        return self.ranks // self.parallelism.cp

    @property
    def dispatched_tokens(self) -> int:
        """Maximum tokens that one rank gives to its sparse layers in one pass."""
        cp = self.parallelism.cp
        share = -(-self.micro_batch_tokens // cp)
        # chunks near heads and tails are of unequal length, and what fills up comes on top
        unequal = self.parallelism.cp_scheme != "ulysses" and cp > 1
        return (2 * share if unequal else share) + 2 * cp


class EvaluationConfig(StrictModel):
    """Held-out evaluation during the run."""

    every_steps: NonNegativeInt = 10
    """Policy versions between evaluations; 0 evaluates only the first and the last version."""
    prompts: PositiveInt = 64
    """Held-out prompts of each evaluation, over all environments; the same ones each time."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How tokens are drawn in held-out rollouts."""
    failures: Literal["zero", "exclude"] = "zero"
    """How held-out rollouts that fail count in the held-out reward. ``zero``: with the reward 0, so that a task does
    not leave the mean because it is hard, or because the policy breaks its environment. ``exclude``: not at all; the
    mean is over those that finished, and where none did the evaluation has no reward. How many failed is said in both
    cases. The first evaluation of a run ends it where no rollout finishes."""
    sets: Annotated[tuple[EvaluationSetConfig, ...], Field(strict=False)] = ()
    """Further held-out prompts, each set with an interval, samples and a temperature of its own."""


class CheckpointConfig(StrictModel):
    """Joint checkpoints of trainer and orchestrator."""

    every_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: PositiveInt = 2
    """Newest entries that are kept; there is room needed for one more, because a new one is complete before an old
    one goes."""
    keep_every_steps: NonNegativeInt = 0
    """Entries of steps that are a multiple of this are kept for ever; 0 keeps none for that reason."""
    mode: Literal["async", "sync"] = "async"
    """``async`` copies the trainer's state to host memory and writes it beside the training; ``sync`` lets the
    training wait, and needs no memory for the copy."""
    verify: Literal["content", "sizes"] = "content"
    """What a resume compares with the manifest before it trusts an entry: every byte (all trainer ranks read, each
    its share), or the sizes of files only."""
    verify_timeout_s: PositiveFloat = 1800.0
    """Longest time for that, in seconds."""
    save_timeout_s: PositiveFloat = 1800.0
    """Longest time of one save in seconds; a save that hangs for longer ends the run."""


def _on_or_off(value: object) -> object:
    """YAML reads ``on`` and ``off`` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class HandoffConfig(StrictModel):
    """Weight hand-offs from trainer to engines."""

    kind: Literal["full", "fp8"] = "full"
    """``full`` publishes weights in ``dtype``; ``fp8`` quantises matrices in blocks of 128 x 128 (e4m3 with
    ``weight_scale_inv``), as vLLM reads them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of published weights that are not quantised. None: ``trainer.dtype``."""
    overlap: bool = True
    """Write a version while the next step runs, from a copy of this rank's share in host memory."""
    staging_gib: PositiveFloat = 1.0
    """Without ``overlap``: memory of a rank for copying, in GiB (at least its share of one shard file)."""
    max_shard_gib: PositiveFloat = 4.0
    """Largest safetensors file in GiB. All ranks write into all files."""
    direct_io: bool = False
    """Write past the page cache (``O_DIRECT``) where the filesystem can."""
    delta_chain: NonNegativeInt = 0
    """Publish changes against an earlier version, which every engine has acknowledged, at most so many deltas in a
    row; then a full version. 0: full versions only. Doubles the memory of the copy."""
    delta_max_share: Fraction = 0.5
    """A delta larger than this share of the full version is not worth its trouble: the full version is written."""
    publish_timeout_s: PositiveFloat = 1800.0
    """Longest time that writing one version may take, in seconds."""
    retry_s: NonNegativeFloat = 300.0
    """How long a version is tried again that the filesystem refuses (no space, a quota, a stale handle), in seconds.
    Then the run ends, and says why. 0: not at all."""
    keep_last: PositiveInt = 3
    """Published versions that are kept beside those an engine is serving."""
    update_timeout_s: PositiveFloat = 120.0
    """Least time that an engine is given to load a version, in seconds; what a version's bytes take at
    ``min_bandwidth_mib_s`` comes on top."""
    min_bandwidth_mib_s: PositiveFloat = 50.0
    """Slowest rate, in MiB/s, at which reading weights still counts as working."""
    lease_timeout_s: PositiveFloat = 60.0
    """A reader whose registration has not changed for so long, by the clock of who looks, counts as dead: what it
    leased may go. Readers renew four times as often."""
    read_streams: PositiveInt = 4
    """Segments of 64 MiB that a reader reads ahead, each by a thread of its own."""
    node_cache: str | None = "/dev/shm"
    """Directory of the node through which its engines share what they read, so that each byte is read once a node.
    null: every engine reads for itself."""
    node_cache_gib: PositiveFloat = 16.0
    """Most memory of a node's cache, in GiB. With less than a version, engines share a window that moves through it;
    other nodes are served from it, too."""
    adapter_base_gib: NonNegativeFloat = 8.0
    """With ``trainer.lora``: most memory of a vLLM worker for blocks of layers that adapters change, as they are in the
    base, in GiB; what does not fit is read again with each version."""
    fanout: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """Whether nodes give versions to each other, so that the share is read once and not once a node. ``auto``: where
    engines have more than one node, and there is a ``node_cache``."""
    fanout_degree: PositiveInt = 2
    """Nodes that one node gives a segment to; 1 is a chain."""


class OrchestratorConfig(StrictModel):
    """The orchestrator role."""

    wait_timeout_s: PositiveFloat = 600.0
    """Longest wait for engines, for the first weights, and of the trainer for a batch, in seconds."""


class Recipe(StrictModel):
    """A whole run. `extends` is resolved by the loader and never reaches this model."""

    name: Name
    """Name of the recipe; runs are called after it."""
    description: str = ""
    """One sentence for ``hpcrl recipe list``."""
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and initial weights."""
    model: ModelConfig
    """The policy."""
    sft: SftConfig | None = None
    """Supervised training on conversations in place of rollouts: `hpcrl sft`. Such a run has a trainer alone, and no
    ``environments``, ``rollouts``, ``engine`` and ``evaluation``."""
    environments: Annotated[tuple[EnvironmentConfig, ...], Field(strict=False)]
    """Where rollouts come from."""
    rollouts: RolloutConfig = RolloutConfig()
    """What is rolled out."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    trainer: TrainerConfig
    """The trainer role."""
    engine: EngineConfig = EngineConfig()
    """The inference role."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator role."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Joint checkpoints."""
    handoff: HandoffConfig = HandoffConfig()
    """Weight hand-offs."""
    job: JobConfig = JobConfig()
    """How the run becomes jobs."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What happens when a replica fails or hangs."""

    @model_validator(mode="before")
    @classmethod
    def _without_rollouts(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("sft") is not None:
            return {"environments": (), **given}
        return given

    @field_validator("environments", mode="after")
    @classmethod
    def _has_environments(
        cls, environments: tuple[EnvironmentConfig, ...], info: ValidationInfo
    ) -> tuple[EnvironmentConfig, ...]:
        # where `sft` itself is wrong it is not known, and that alone is told
        if not environments and info.data.get("sft", 0) is None:
            raise PydanticCustomError("no_environments", "there must be at least 1 environment")
        return environments

    @property
    def engine_nodes(self) -> int:
        """Nodes of all engines on a cluster; a local run has one, whatever this says. On the trainer's node they have
        none of their own."""
        if self.engine.placement != "apart" or self.sft is not None:
            return 0
        sides = [side for side in (self.engine.prefill, self.engine.decode) if side is not None]
        return sum(side.replicas * side.nodes for side in sides) or self.engine.replicas * self.engine.nodes

    @property
    def returns_routed_experts(self) -> bool:
        """Whether engines say which experts they chose."""
        return self.engine.return_routed_experts or self.trainer.router_replay

    @property
    def fans_out(self) -> bool:
        """Whether nodes of engines give versions to each other."""
        handoff = self.handoff
        wanted = handoff.fanout == "on" or (handoff.fanout == "auto" and self.engine_nodes > 1)
        return wanted and handoff.node_cache is not None

    @property
    def wait_for_batch_s(self) -> float:
        """Longest wait of the trainer for a batch: where engines come and go, there may be none for a while."""
        elastic_s = self.job.replica_wait_h * 3600.0 if self.job.layout == "elastic" else 0.0
        return max(self.orchestrator.wait_timeout_s, elastic_s)

    @property
    def collective_timeout_s(self) -> float:
        """Longest time of the trainer's ranks in one collective: one of them may wait for a batch meanwhile."""
        return self.wait_for_batch_s + _COLLECTIVE_MARGIN_S

"""The recipe: what a researcher wants. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import Fraction, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel

__all__ = [
    "AlgorithmConfig",
    "CalculatorEnv",
    "CheckpointConfig",
    "CustomEnv",
    "EngineConfig",
    "EngineGroupConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "HandoffConfig",
    "JobConfig",
    "LatencyConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OrchestratorConfig",
    "Recipe",
    "RolloutConfig",
    "SamplingConfig",
    "TrainerConfig",
    "WarmupConfig",
    "WordsEnv",
]


class WarmupConfig(StrictModel):
    """How ``hpcrl warmup`` makes a small start model: random weights, then supervised steps on demonstrations."""

    hidden_size: PositiveInt = 64
    """Width of the residual stream."""
    num_hidden_layers: PositiveInt = 2
    """Decoder layers; all are sparse."""
    num_attention_heads: PositiveInt = 4
    """Query heads."""
    num_key_value_heads: PositiveInt = 2
    """Key and value heads; divides ``num_attention_heads``."""
    head_dim: PositiveInt = 16
    """Size of a head; even."""
    moe_intermediate_size: PositiveInt = 64
    """Inner width of an expert."""
    num_experts: PositiveInt = 8
    """Experts a layer."""
    num_experts_per_tok: PositiveInt = 2
    """Experts that a token visits."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence in tokens."""
    steps: PositiveInt = 300
    """Supervised optimizer steps."""
    batch_size: PositiveInt = 64
    """Demonstrations a step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of AdamW (linear warm-up, cosine decay)."""
    correct_share: Fraction = 0.3
    """Share of demonstrations that show the right behaviour; the others show a plausible wrong one, so that
    the start model knows both and reinforcement learning has something to choose from."""


class ModelConfig(StrictModel):
    """The policy."""

    path: str
    """Hugging Face model directory that the run starts from; relative to where hpcrl is called."""
    warmup: WarmupConfig | None = None
    """Settings of ``hpcrl warmup`` for recipes whose start model is made rather than given."""


class LatencyConfig(StrictModel):
    """Extra waiting time of a rollout, as a slow tool or test suite would cause; for measurements."""

    median_s: NonNegativeFloat = 0.0
    """Waiting time of an ordinary rollout in seconds."""
    tail_share: Fraction = 0.0
    """Share of rollouts that take longer."""
    tail_factor: PositiveFloat = 10.0
    """How many times longer these take."""


class _Environment(StrictModel):
    name: Name
    """Name in metrics; unique in the recipe."""
    weight: PositiveFloat = 1.0
    """Share of this environment in the prompts, relative to the others."""
    latency: LatencyConfig = LatencyConfig()
    """Extra waiting time, for measurements."""


class WordsEnv(_Environment):
    """Single turn: transform an English word letter by letter."""

    kind: Literal["words"]
    task: Literal["reverse", "sort", "shift"] = "reverse"
    """``reverse`` the letters, ``sort`` them, or ``shift`` each by one in the alphabet."""
    min_letters: PositiveInt = 3
    """Shortest word."""
    max_letters: PositiveInt = 6
    """Longest word."""


class CalculatorEnv(_Environment):
    """Several turns: answer an arithmetic question with a tool that runs a program in a sandboxed process."""

    kind: Literal["calculator"]
    max_operand: PositiveInt = 99
    """Largest number in a question."""
    max_turns: PositiveInt = 3
    """Model turns before the rollout is ended."""
    tool_timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one tool call in seconds."""


class CustomEnv(_Environment):
    """An environment of your own."""

    kind: Literal["custom"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:Name`` of a callable that returns an `hpcrl.rollouts.environments.Environment`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""


EnvironmentConfig = Annotated[WordsEnv | CalculatorEnv | CustomEnv, Field(discriminator="kind")]


class SamplingConfig(StrictModel):
    """How tokens are drawn in training rollouts."""

    temperature: PositiveFloat = 1.0
    """Divides logits; log-probabilities are taken after it on both sides."""
    max_new_tokens: PositiveInt = 32
    """Tokens that the model may say in one turn."""


class RolloutConfig(StrictModel):
    """What is rolled out and how fresh it must be."""

    rollouts_per_step: PositiveInt = 64
    """Rollouts that one optimizer step consumes; a multiple of ``group_size``."""
    group_size: PositiveInt = 8
    """Rollouts of one prompt; their rewards are compared with each other."""
    max_in_flight: PositiveInt = 128
    """Rollouts that may be running at once; at least ``group_size``."""
    max_off_policy_steps: NonNegativeInt = 4
    """Largest staleness of a consumed rollout: trainer version minus the version of its first sampled token.
    0 is synchronous: the trainer waits for rollouts of its own version."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal carry no gradient: ``keep`` them in the batch, or ``drop`` and replace
    them by others. Both are counted."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest time without an answer to one generation request, in seconds."""
    max_retries: NonNegativeInt = 3
    """Attempts after the first for a request that failed; then the rollout is dropped and counted."""


class LossConfig(StrictModel):
    """The token-level policy loss; formulas and sources in docs/algorithms.md."""

    kind: Literal["masked_ratio", "icepop", "tis", "ppo_clip", "cispo", "gspo"] = "masked_ratio"
    """``masked_ratio`` (importance ratio, tokens masked by probability difference; what the reference run uses),
    ``icepop`` (double-sided mask on the ratio), ``tis`` (truncated ratio), ``ppo_clip``, ``cispo``, ``gspo``."""
    mask_low: PositiveFloat = 0.2
    """``masked_ratio``: largest fall of a sampled token's probability (engine to trainer) that still counts."""
    mask_high: PositiveFloat = 0.2
    """``masked_ratio``: largest rise of a sampled token's probability that still counts."""
    kl_tau: NonNegativeFloat = 1e-3
    """``masked_ratio``: weight of the squared log-ratio that keeps trainer and engine close."""
    ratio_low: PositiveFloat = 0.5
    """``icepop``: smallest importance ratio that counts."""
    ratio_high: PositiveFloat = 5.0
    """``icepop``: largest ratio that counts; ``tis``: where it is cut."""
    clip_low: PositiveFloat = 0.2
    """``ppo_clip``, ``cispo``, ``gspo``: lower clip distance from 1."""
    clip_high: PositiveFloat = 0.28
    """``ppo_clip``, ``cispo``, ``gspo``: upper clip distance from 1."""


class AlgorithmConfig(StrictModel):
    """Advantages and loss."""

    advantage: Literal["grpo", "mean_baseline"] = "grpo"
    """``grpo``: reward minus group mean, divided by the group's standard deviation; ``mean_baseline``: not divided."""
    loss: LossConfig = LossConfig()
    """The policy loss."""


class OptimizerConfig(StrictModel):
    """AdamW, clipping and schedule."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.99
    """Decay of the second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from 0."""


class TrainerConfig(StrictModel):
    """The trainer role."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""
    ranks: PositiveInt = 1
    """Processes of the trainer; parameters are sharded over all of them (FSDP2)."""
    nodes: PositiveInt = 1
    """Nodes that the ranks are spread over, the same number on each. A local run has one."""
    micro_batch_tokens: PositiveInt = 2048
    """Token budget of one forward and backward pass of a rank; rollouts are packed into it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters in forward and backward; master weights and optimizer are float32."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    threads: PositiveInt = 1
    """CPU threads of each rank."""


class EngineGroupConfig(StrictModel):
    """One side of disaggregated serving."""

    replicas: PositiveInt
    """Independent engines of this side; each holds the whole model."""
    nodes: PositiveInt
    """Nodes of one replica."""


class EngineConfig(StrictModel):
    """The inference role."""

    backend: Literal["embedded", "vllm"] = "embedded"
    """Which server: ``embedded`` runs the project's own torch model behind vLLM's API; ``vllm`` has a rank on each GPU
    of its nodes (so far for the payload ``probe`` only)."""
    replicas: PositiveInt = 1
    """Independent engines; each serves the whole model."""
    nodes: PositiveInt = 1
    """Nodes of one replica."""
    prefill: EngineGroupConfig | None = None
    """Engines that compute prompts only; together with ``decode``, in place of ``replicas`` and ``nodes``."""
    decode: EngineGroupConfig | None = None
    """Engines that go on from prompts that ``prefill`` computed."""
    max_model_len: PositiveInt = 256
    """Longest sequence in tokens, prompt and answer together."""
    max_num_seqs: PositiveInt = 64
    """Sequences that are decoded at once."""
    max_num_batched_tokens: PositiveInt = 2048
    """Tokens of one engine step (prefill is cut to fit)."""
    block_size: PositiveInt = 16
    """Tokens of a KV cache block; prefixes are reused in whole blocks."""
    kv_cache_gib: PositiveFloat = 0.25
    """Memory of the KV cache in GiB."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and KV cache."""
    pause: Literal["keep", "none"] = "keep"
    """During a weight update: ``keep`` freezes requests until the new weights are in, ``none`` goes on
    generating with the old ones. Requests and their KV survive in both."""
    threads: PositiveInt = 1
    """CPU threads of each engine."""


class EvaluationConfig(StrictModel):
    """Held-out evaluation during the run."""

    every_steps: NonNegativeInt = 10
    """Policy versions between evaluations; 0 evaluates only the first and the last version."""
    prompts: PositiveInt = 64
    """Held-out prompts of each evaluation, over all environments; the same ones each time."""


class CheckpointConfig(StrictModel):
    """Joint checkpoints of trainer and orchestrator."""

    every_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: PositiveInt = 2
    """Entries that are kept."""


class HandoffConfig(StrictModel):
    """Weight hand-offs from trainer to engines."""

    keep_last: PositiveInt = 3
    """Published versions that are kept beside those an engine is serving."""
    update_timeout_s: PositiveFloat = 120.0
    """Longest time for one engine to load one version, in seconds."""


class OrchestratorConfig(StrictModel):
    """The orchestrator role."""

    wait_timeout_s: PositiveFloat = 600.0
    """Longest wait for engines, for the first weights, and of the trainer for a batch, in seconds."""


class JobConfig(StrictModel):
    """How the run becomes jobs of a Slurm site. A local run reads ``payload`` only."""

    layout: Literal["auto", "hetjob", "single", "elastic"] = "auto"
    """``hetjob``: a heterogeneous job, one component a role; ``single``: one allocation, cut by node; ``elastic``:
    each engine is a job of its own, so that one can be lost or added. ``auto``: ``hetjob`` where roles differ in
    partition or number of nodes and the site can, else ``single``."""
    payload: Literal["roles", "probe"] = "roles"
    """``probe`` starts a small program in place of every rank: it reports where it is and what it sees."""
    time_limit_h: PositiveFloat | None = None
    """Longest job in hours; with ``requeue`` the run goes on in the next. None: the site's ``limits.time_limit_h``."""
    requeue: Literal["auto", "always", "never"] = "auto"
    """Whether Slurm starts the job again after a node failure, a preemption or the time limit. ``auto``: where the
    site can."""
    max_attempts: PositiveInt = 20
    """Attempts of the run, the first included."""
    max_attempts_without_progress: PositiveInt = 3
    """Attempts in a row that end without a new joint checkpoint; then the run is given up."""


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
    environments: Annotated[tuple[EnvironmentConfig, ...], Field(min_length=1, strict=False)]
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

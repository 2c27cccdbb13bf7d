"""The recipe: what a researcher wants. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.base import Name, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.chat import ChatConfig
from hpcrl.config.engine import EngineConfig, EngineGroupConfig, EngineMemoryConfig
from hpcrl.config.environment_workers import EnvironmentWorkersConfig
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
from hpcrl.config.handoff import HandoffConfig
from hpcrl.config.job import JobConfig
from hpcrl.config.lora import LoraConfig
from hpcrl.config.outlets import NotifierConfig, SinkConfig
from hpcrl.config.rollouts import AdaptiveConcurrencyConfig, RolloutConfig
from hpcrl.config.sampling import EvaluationSampling, SamplingConfig
from hpcrl.config.sft import SftColumns, SftConfig
from hpcrl.config.supervision import (
    EnginePolicyConfig,
    OrchestratorPolicyConfig,
    RolePolicyConfig,
    SupervisionConfig,
)
from hpcrl.config.trainer import (
    ContextScheme,
    OptimizerConfig,
    TrainerConfig,
    TrainerMemoryConfig,
    TrainerParallelismConfig,
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
"""Seconds that the other ranks wait in a collective in addition to a wait at the dock."""


class ModelConfig(StrictModel):
    """The model that is trained."""

    path: str
    """Hugging Face model directory that the run starts from; relative to the current directory. Or the id of a
    published model, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, that ``hpcrl model get`` put into ``paths.models_root``
    of the profile."""
    vision: Literal["drop", "carry"] | None = None
    """Treatment of the vision tower of a vision-language model; without it such a model is refused. Its language
    model is trained and served. ``drop``: versions and exports are language models. ``carry``: versions are, and
    exports have tower and projector as they were, byte for byte."""
    warmup: WarmupConfig | None = None
    """Settings of ``hpcrl warmup`` for recipes whose start model is made rather than given."""
    chat: ChatConfig = ChatConfig()
    """Chat format and variables of the chat template."""


class EvaluationConfig(StrictModel):
    """Held-out evaluation during the run."""

    every_steps: NonNegativeInt = 10
    """Policy versions between evaluations; 0 evaluates only the first and the last version."""
    prompts: PositiveInt = 64
    """Held-out prompts of each evaluation, over all environments; the same ones each time."""
    sampling: EvaluationSampling = EvaluationSampling()
    """Sampling of tokens in held-out rollouts."""
    failures: Literal["zero", "exclude"] = "zero"
    """Weight of failed held-out rollouts in the held-out reward. ``zero``: with the reward 0, so that a task does not
    leave the mean because it is hard, or because the policy breaks its environment. ``exclude``: not at all; the mean
    is over those that finished, and where none did the evaluation has no reward. The number of failed ones is reported
    in both cases. The first evaluation of a run ends it where no rollout finishes."""
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
    """Entries of steps that are a multiple of this are kept permanently; 0 keeps none for that reason."""
    mode: Literal["async", "sync"] = "async"
    """``async`` copies the trainer's state to host memory and writes it during the training; ``sync`` lets the
    training wait, and needs no memory for the copy."""
    verify: Literal["content", "sizes"] = "content"
    """Comparison with the manifest before a resume trusts an entry: every byte (all trainer ranks read, each
    its share), or the sizes of files only."""
    verify_timeout_s: PositiveFloat = 1800.0
    """Longest time for that, in seconds."""
    save_timeout_s: PositiveFloat = 1800.0
    """Longest time of one save in seconds; a save that hangs for longer ends the run."""


class OrchestratorConfig(StrictModel):
    """The orchestrator role."""

    wait_timeout_s: PositiveFloat = 600.0
    """Timeout in seconds for engines, for the first weights, and for a batch of the trainer."""
    gateway: Literal["node", "run"] = "node"
    """Who reaches the gateway of programs, each with the secret of its rollout. ``node``: programs on the
    orchestrator's node alone. ``run``: also those on other nodes of the run, at the orchestrator's own address. With
    ``environment_workers`` it is always ``run``."""


class Recipe(StrictModel):
    """A whole run. `extends` is resolved by the loader and never reaches this model."""

    name: Name
    """Name of the recipe; runs are called after it."""
    description: str = ""
    """One sentence for ``hpcrl recipe ls``."""
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and initial weights."""
    model: ModelConfig
    """The policy."""
    sft: SftConfig | None = None
    """Supervised training on conversations in place of rollouts: `hpcrl sft`. Such a run has a trainer alone, and no
    ``environments``, ``rollouts``, ``engine`` and ``evaluation``."""
    environments: Annotated[tuple[EnvironmentConfig, ...], Field(strict=False)]
    """Sources of rollouts."""
    environment_workers: EnvironmentWorkersConfig | None = None
    """Workers that host the environments. None: each that needs a process has one on the orchestrator's node."""
    rollouts: RolloutConfig = RolloutConfig()
    """Rollouts."""
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
    """Jobs of the run."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What happens when a replica fails or hangs."""
    sinks: Annotated[tuple[SinkConfig, ...], Field(strict=False)] = ()
    """Metric sinks, which receive the metrics of each step, in addition to the cluster profile's."""
    notify: Annotated[tuple[NotifierConfig, ...], Field(strict=False)] = ()
    """Notifiers, which send messages about events of the run, in addition to the cluster profile's."""

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
        # an invalid `sft` alone is reported, because its kind is not known then
        if not environments and info.data.get("sft", 0) is None:
            raise PydanticCustomError("no_environments", "there must be at least 1 environment")
        return environments

    @property
    def engine_nodes(self) -> int:
        """Return the number of nodes of all engines on a cluster.

        A local run has one node, whatever this value is. On the trainer's node engines have no nodes of their own.
        """
        if self.engine.placement != "apart" or self.sft is not None:
            return 0
        sides = [side for side in (self.engine.prefill, self.engine.decode) if side is not None]
        return sum(side.replicas * side.nodes for side in sides) or self.engine.replicas * self.engine.nodes

    @property
    def gateway_in_run(self) -> bool:
        """Return whether programs on other nodes of the run reach the gateway: those of workers must."""
        return self.orchestrator.gateway == "run" or self.environment_workers is not None

    @property
    def returns_routed_experts(self) -> bool:
        """Return whether engines return the routed experts."""
        return self.engine.return_routed_experts or self.trainer.router_replay

    @property
    def fans_out(self) -> bool:
        """Return whether nodes of engines pass versions to each other."""
        handoff = self.handoff
        wanted = handoff.fanout == "on" or (handoff.fanout == "auto" and self.engine_nodes > 1)
        return wanted and handoff.node_cache is not None

    @property
    def wait_for_batch_s(self) -> float:
        """Return the maximum wait of the trainer for a batch, in seconds: elastic engines may be absent for a while."""
        elastic_s = self.job.replica_wait_h * 3600.0 if self.job.layout == "elastic" else 0.0
        return max(self.orchestrator.wait_timeout_s, elastic_s)

    @property
    def collective_timeout_s(self) -> float:
        """Return the maximum seconds of the trainer's ranks in one collective, in which one may wait for a batch."""
        return self.wait_for_batch_s + _COLLECTIVE_MARGIN_S

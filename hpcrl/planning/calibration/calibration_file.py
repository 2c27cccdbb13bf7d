"""The calibration file: what hardware really gives, what no data sheet has, what rollouts look like.

Efficiencies are shares of a profile's numbers. Each entry names its source, and `hpcrl.planning.fit_calibration`
makes a file from a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from hpcrl.config.base import Fraction, Name, NonNegativeFloat, PositiveFloat, StrictModel
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.explain import explain_errors
from hpcrl.config.yamltree import parse_file
from hpcrl.errors import ConfigError, UsageError
from hpcrl.planning.distributions import UsualDistribution
from hpcrl.planning.tables.file import load_table, shipped_tables
from hpcrl.planning.tables.lookup import Tables

EfficiencyName = Literal[
    "gemm_bfloat16",
    "gemm_float32",
    "gemm_fp8",
    "grouped_gemm",
    "attention",
    "indexer",
    "sparse_attention",
    "sparse_backward",
    "sparse_backward_cudnn",
    "index_scores",
    "index_choice",
    "gpu_memory",
    "nvlink",
    "nic",
    "all_to_all_nic",
    "all_to_all_nvlink",
    "low_latency_nic",
    "pcie",
    "host_memory",
    "filesystem",
    "trainer_busy",
    "comm_overlap",
    "expert_comm_overlap",
    "prefill_busy",
    "prefix_cache",
]
"""Shares between 0 and 1."""

ConstantName = Literal[
    "hop_s",
    "local_hop_s",
    "all_to_all_latency_s",
    "layer_overhead_s",
    "engine_step_overhead_s",
    "request_overhead_s",
    "file_overhead_s",
    "tensor_load_s",
    "serve_rate",
    "delta_share",
    "backward_attention_share",
    "expert_imbalance",
    "process_start_s",
]
"""Seconds, rates and ratios that no data sheet has."""


Origin = Literal["assumed", "published", "measured"]
"""Kind of a number's source: not measured, measured elsewhere, or measured by a run of this site."""

FACTORS: dict[Origin, float] = {"assumed": 1.5, "published": 1.15, "measured": 1.05}
"""Factor by which the truth may be larger or smaller than a number, by where it comes from."""


def origin_of(source: str) -> Origin:
    """Return the kind of a source by its first words: ``assumed`` is unmeasured, ``run NAME`` is of this site."""
    if source.startswith("assumed"):
        return "assumed"
    return "measured" if source.startswith("run ") else "published"


class Sourced(StrictModel):
    """A number and where it comes from."""

    value: NonNegativeFloat
    """The number."""
    source: Annotated[str, Field(min_length=1)]
    """Author and subject of the measurement; ``assumed`` where there was none."""
    spread: Annotated[float, Field(ge=1, le=10)] | None = None
    """Factor by which the truth may be larger or smaller. None: 1.5 where the source is ``assumed``, 1.05 for a run of
    the site, 1.15 for others."""
    spread_below: Annotated[float, Field(ge=1, le=10)] | None = None
    """Factor by which the truth may be smaller, where that is another one."""

    @property
    def origin(self) -> Origin:
        """Return the kind of the source: ``assumed``, ``published`` or ``measured``."""
        return origin_of(self.source)

    @property
    def factor(self) -> float:
        """Return the factor by which the truth may be larger, 1 or more: `spread`, or the default of its origin."""
        return self.spread or FACTORS[self.origin]

    @property
    def ends(self) -> tuple[float, float]:
        """Return the factors to the lowest and to the highest value that the source allows."""
        return 1.0 / (self.spread_below or self.factor), self.factor


class WorkloadConfig(StrictModel):
    """Shape of the rollouts of one environment."""

    source: Annotated[str, Field(min_length=1)]
    """Source of the figures."""
    tokens: UsualDistribution
    """Tokens of a whole rollout: prompt, what the model says and what tools say. Cut at ``engine.max_model_len``."""
    prompt_tokens: PositiveFloat
    """Tokens of the prompt."""
    turns: Annotated[float, Field(ge=1)] = 1.0
    """Requests of a rollout of median length; longer ones have more."""
    sampled_share: Fraction = 1.0
    """Share of the tokens after the prompt that the model samples; tools say the others."""
    tool_s: UsualDistribution | None = None
    """Seconds of a tool call, one between two turns. None: no tools."""
    judge_s: UsualDistribution | None = None
    """Seconds from the last token to the reward. None: none."""
    assumed: Annotated[
        tuple[Literal["tokens", "prompt_tokens", "turns", "sampled_share", "tool_s", "judge_s"], ...],
        Field(strict=False),
    ] = ()
    """Fields that the source does not give: predicted times have a wider range for them."""


class Measured(StrictModel):
    """Measurement of one run. It holds for the same recipe on the same hardware, whatever the profile lists."""

    run: str
    """The run."""
    recipe: Name
    """Its recipe."""
    cluster: Name
    """Its cluster profile."""
    trainer_ranks: PositiveFloat
    """Trainer ranks."""
    engines: PositiveFloat
    """Engine replicas."""
    steps: PositiveFloat
    """Steps that were measured, start-up left out."""
    train_s_per_token: PositiveFloat
    """Seconds of forward and backward a token of the batch, on these ranks."""
    optimizer_s: NonNegativeFloat
    """Median seconds of the optimizer."""
    publish_s: NonNegativeFloat
    """Median seconds that publishing stops the trainer."""
    other_s: NonNegativeFloat = 0.0
    """Median seconds of a step in no phase."""
    checkpoint_s: NonNegativeFloat = 0.0
    """Median seconds that a checkpoint stops the trainer."""
    update_s: NonNegativeFloat = 0.0
    """Median seconds of loading a version into an engine."""
    sampled_tokens_per_s: PositiveFloat
    """Tokens that all engines together sampled a second, those of rollouts that were thrown away included. A lower
    limit of what they can, where they were held back."""
    batch_tokens: PositiveFloat
    """Mean tokens of a batch."""


MEASURED_TIMES = (
    "train_s_per_token",
    "optimizer_s",
    "publish_s",
    "other_s",
    "checkpoint_s",
    "update_s",
    "sampled_tokens_per_s",
)
"""Fields of a measured run that are times or rates."""


class Calibration(StrictModel):
    """A calibration file. What a file does not say is taken from the one that comes with hpcrl."""

    format_version: Literal[1] = 1
    """Version of this format."""
    description: str = ""
    """Scope of validity, in a sentence."""
    efficiencies: dict[EfficiencyName, Sourced] = {}
    """Shares of a profile's numbers."""
    constants: dict[ConstantName, Sourced] = {}
    """Seconds, rates and ratios."""
    workloads: dict[Name, WorkloadConfig] = {}
    """Rollouts by the name of their environment in a recipe."""
    measured: tuple[Measured, ...] = Field(default=(), strict=False)
    """Runs that were measured as a whole."""
    durations: dict[str, Any] | None = None
    """Values for ``hpcrl simulate --durations`` (`hpcrl.simulation.inputs.durations`), of the same run."""
    _tables: Tables = PrivateAttr(default_factory=Tables)

    @property
    def tables(self) -> Tables:
        """Return the measured times of kernels from separate files; they take precedence over efficiencies."""
        return self._tables

    def with_tables(self, tables: Tables) -> Calibration:
        """Return the calibration with these measured times."""
        copy = self.model_copy()
        copy._tables = tables
        return copy

    @model_validator(mode="after")
    def _shares(self) -> Calibration:
        for name, entry in self.efficiencies.items():
            if entry.value > 1.0:
                raise ValueError(f"efficiencies.{name} is {entry.value:g}; a share is at most 1")
        return self

    def share(self, name: EfficiencyName) -> float:
        """Look an efficiency up by its name: a share of what hardware could do, 0 to 1."""
        return self.efficiencies[name].value

    def constant(self, name: ConstantName) -> float:
        """Look a constant up by its name."""
        return self.constants[name].value

    def uncertain(self) -> Iterator[tuple[str, tuple[float, float], Origin]]:
        """Yield the names of all numbers, the factors to their lowest and highest values, and their origins."""
        for name, entry in self.efficiencies.items():
            yield f"efficiencies.{name}", entry.ends, entry.origin
        for constant, own in self.constants.items():
            yield f"constants.{constant}", own.ends, own.origin
        for kind in self.tables.kinds:
            factor = self.tables.factor(kind)
            origin: Origin = "measured" if factor <= FACTORS["measured"] else "published"
            yield f"tables.{kind}", (1.0 / factor, factor), origin
        if self.measured:
            factor = FACTORS["measured"]
            for field in MEASURED_TIMES:
                yield f"measured.{field}", (1.0 / factor, factor), "measured"

    def moved(self, name: str, factor: float) -> Calibration:
        """Return the calibration with one number of `uncertain` times ``factor``; a share stays at most 1."""
        group, _, key = name.partition(".")
        if group == "tables":
            return self.with_tables(self.tables.moved(key, factor))
        if group == "measured":
            runs = tuple(run.model_copy(update={key: getattr(run, key) * factor}) for run in self.measured)
            return self.model_copy(update={"measured": runs})
        entries = getattr(self, group)
        value = entries[key].value * factor
        value = min(1.0, value) if group == "efficiencies" else value
        return self.model_copy(update={group: {**entries, key: entries[key].model_copy(update={"value": value})}})

    def measured_for(self, recipe: str, cluster: str) -> Measured | None:
        """Return the measurement of a recipe on a cluster, the last one where there are several."""
        found = [entry for entry in self.measured if entry.recipe == recipe and entry.cluster == cluster]
        return found[-1] if found else None


def shipped_calibration_path() -> Path:
    """Return the path of the calibration file that comes with hpcrl."""
    return Path(__file__).parent / "data" / "calibration.yaml"


def load_site_calibration(
    cluster: ClusterProfile, path: str | Path | None = None, tables: Sequence[str] = ()
) -> Calibration:
    """Read a calibration file with the kernel times that a profile names, and with further ``tables``; see
    `load_calibration`."""
    own = cluster.paths.tables if isinstance(cluster, SlurmCluster) else ()
    files = [Path(os.path.expandvars(name)).expanduser() for name in (*own, *tables)]
    return load_calibration(None if path is None else Path(path), files)


def load_calibration(path: Path | None = None, tables: Sequence[Path] = ()) -> Calibration:
    """Read a calibration file on top of the shipped one, and files of measured times.

    Parameters
    ----------
    path:
        None: the shipped file alone.
    tables:
        Files of measured times on top of the shipped ones; the last one counts where several measured a kind of kernel.

    Raises
    ------
    ConfigError
        With every finding.
    UsageError
        The file does not exist.
    """
    shipped = _shipped().with_tables(Tables((*shipped_tables(), *(load_table(table) for table in tables))))
    if path is None:
        return shipped
    if not path.is_file():
        raise UsageError(f"{path}: no such file\n    hint: `hpcrl plan calibrate RUN -o FILE` makes one from a run")
    own = _read(path)
    return own.with_tables(shipped.tables).model_copy(
        update={
            "efficiencies": {**shipped.efficiencies, **own.efficiencies},
            "constants": {**shipped.constants, **own.constants},
            "workloads": {**shipped.workloads, **own.workloads},
        }
    )


@lru_cache(maxsize=1)
def _shipped() -> Calibration:
    return _read(shipped_calibration_path())


def _read(path: Path) -> Calibration:
    tree, origins = parse_file(path)
    try:
        return Calibration.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain_errors(Calibration, error, origins, path)) from None

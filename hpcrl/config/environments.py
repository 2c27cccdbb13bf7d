"""Environments of a recipe: where rollouts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)
from hpcrl.config.rewards import Extraction, FormatReward, GymTaskConfig, LengthReward, RewardConfig
from hpcrl.config.row_template import RowTemplate

__all__ = [
    "CalculatorEnv",
    "CurriculumConfig",
    "CustomEnv",
    "DatasetColumns",
    "DatasetEnv",
    "EnvironmentConfig",
    "HostedEnv",
    "LatencyConfig",
    "ReasoningGymEnv",
    "WordsEnv",
    "trained_on",
]


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
    weight: NonNegativeFloat = 1.0
    """Share of this environment in the prompts, relative to the others. 0: it is never trained on, and only sets of
    ``evaluation.sets`` and ``hpcrl eval`` that name it ask its held-out prompts."""
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


class HostedEnv(_Environment):
    """An environment that runs in a process of its own."""

    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` make it, too. ``false`` where it needs what only nodes have."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest time for making it in seconds: imports, and the factory or reading the file."""
    answer_timeout_s: PositiveFloat = 120.0
    """Longest time in seconds for a prompt, and for which the event loop of its process may be blocked: then it is
    ended and started again."""
    turn_timeout_s: PositiveFloat = 3600.0
    """Longest time of its own (tools, tests, judging) between two replies of the policy in seconds; a rollout that
    takes longer is dropped."""

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return ``package.module:Name`` of what makes it in its process, and the keyword arguments for that."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return variables that its process has beside those of the orchestrator."""
        return {}


class CustomEnv(HostedEnv):
    """An environment of your own. It runs in a process of its own."""

    kind: Literal["custom"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:Name`` of a callable that returns an `hpcrl.rollouts.environments.Environment`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return self.factory, self.args


class DatasetColumns(StrictModel):
    """Names of columns of the file."""

    prompt: str = "prompt"
    """The question, as text. Not read where there are ``messages`` or a ``template``."""
    messages: str | None = None
    """The conversation that the policy continues: a list of ``role`` and ``content``, the last one of the user."""
    answer: str = "answer"
    """The right answer: text or a number. It must be there where a checker compares with it."""
    difficulty: str | None = None
    """How difficult the question is: any text or number, for ``curriculum.weights``."""
    pass_rate: str | None = None
    """Share of right answers of some model, from 0 to 1, for the bounds of ``curriculum``."""
    id: str | None = None
    """A name of the row for messages; no two rows have the same."""


class CurriculumConfig(StrictModel):
    """Which training questions are asked how often. Held-out questions are not touched."""

    weights: dict[str, PositiveFloat] = {}
    """Share of each value of ``columns.difficulty`` in the training prompts, relative to the others. Rows with other
    values are left out."""
    min_pass_rate: Fraction = 0.0
    """Training rows with a smaller ``columns.pass_rate`` are left out."""
    max_pass_rate: Fraction = 1.0
    """Training rows with a larger one are left out."""


class DatasetEnv(HostedEnv):
    """Questions from a file: one turn each, judged by named checkers. It runs in a process of its own."""

    kind: Literal["dataset"]
    path: str | None = None
    """File (``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``) or directory (read by the library ``datasets``);
    relative to where hpcrl is called. Give this or ``hub``."""
    hub: str | None = None
    """``ORG/NAME`` of a data set on Hugging Face, read by ``datasets``, from its cache where it is offline."""
    subset: str | None = None
    """Which configuration of a directory or of a data set of the hub is read."""
    revision: str | None = None
    """Commit or tag of the data set of the hub."""
    columns: DatasetColumns = DatasetColumns()
    """Names of columns."""
    system: str | None = None
    """Text of a system message in front of each prompt."""
    template: RowTemplate | None = None
    """Text of the prompt, with ``{column}`` in place of what stands in a column; ``{{`` and ``}}`` are braces."""
    demonstration: RowTemplate | None = None
    """Text of a right reply, as ``template``, for ``hpcrl env try`` and ``hpcrl warmup``; by default the answer."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the questions that are held out, chosen by a hash of the question; 0.1 where no other split is given."""
    held_out_path: str | None = None
    """A file, or directory, of held-out questions of its own, with the same columns."""
    split_column: str | None = None
    """Column that says whether a row is for training or held out. Rows that ``datasets`` reads have a column ``split``
    with the name of their split."""
    train_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("train",)
    """Values of ``split_column`` for training. Rows with any other value are left out, and counted."""
    held_out_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("test",)
    """Values of ``split_column`` that are held out."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which training questions are asked how often."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1, strict=False)]
    """Checkers; the reward is the sum of their scores, each times its weight, less penalties."""
    checker_processes: PositiveInt = 4
    """Maximum processes of checkers that may take long (all but ``exact``, ``numeric`` and ``length``)."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.dataset:make", {"config": self.model_dump(mode="json")}


class ReasoningGymEnv(HostedEnv):
    """Tasks that the library ``reasoning_gym`` makes and judges: one turn each. It runs in a process of its own."""

    kind: Literal["reasoning_gym"]
    tasks: Annotated[dict[str, GymTaskConfig], Field(min_length=1)]
    """By their names in the library, such as ``chain_sum``."""
    system: str | None = None
    """Text of a system message in front of each prompt."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the questions that are held out, chosen by a hash of the question. There is no end of questions: a small
    share only means that more are made until one is held out."""
    extract: Extraction = "all"
    """Which part of the reply is judged (see ``exact`` of ``dataset``). A reply without that part scores 0."""
    scorer_errors: Literal["fail", "zero"] = "fail"
    """What becomes of a reply at which the scorer of a task raises, as some do for a malformed answer: the rollout
    fails, or it scores 0."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of a scorer for one reply in seconds; a rollout whose score takes longer fails."""
    rewards: Annotated[
        tuple[Annotated[FormatReward | LengthReward, Field(discriminator="kind")], ...], Field(strict=False)
    ] = ()
    """Format and penalties, beside the task's own ``score``."""
    checker_processes: PositiveInt = 4
    """Maximum processes of scorers."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.gym:make", {"config": self.model_dump(mode="json")}

    def variables(self) -> dict[str, str]:
        # some tasks go through sets of texts: their questions would be others in each process
        return {"PYTHONHASHSEED": "0"}


EnvironmentConfig = Annotated[
    WordsEnv | CalculatorEnv | CustomEnv | DatasetEnv | ReasoningGymEnv, Field(discriminator="kind")
]


def trained_on(environments: Sequence[EnvironmentConfig]) -> tuple[EnvironmentConfig, ...]:
    """Return the environments whose prompts are trained on, in order: those with a weight above 0."""
    return tuple(environment for environment in environments if environment.weight > 0)

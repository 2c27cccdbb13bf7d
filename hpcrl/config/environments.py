"""Environments of a recipe: where rollouts come from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from hpcrl.config.base import (
    Fraction,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)
from hpcrl.config.harness_sandbox import OptionalSandbox
from hpcrl.config.hosted_environment import EnvironmentBase, HostedEnv, LatencyConfig
from hpcrl.config.registered_kinds import read_registered_kind
from hpcrl.config.rewards import (
    CodeReward,
    Extraction,
    FormatReward,
    FunctionReward,
    GymTaskConfig,
    LengthReward,
    RewardConfig,
)
from hpcrl.config.row_template import RowTemplate
from hpcrl.config.swe import SweEnv
from hpcrl.config.verifiers_environment import VerifiersEnv

__all__ = [
    "CalculatorEnv",
    "CurriculumConfig",
    "CustomEnv",
    "DatasetColumns",
    "DatasetEnv",
    "EnvironmentConfig",
    "HarnessEnv",
    "HostedEnv",
    "LatencyConfig",
    "ReasoningGymEnv",
    "SweEnv",
    "TaskFileEnv",
    "VerifiersEnv",
    "WordsEnv",
    "trained_on",
]


class WordsEnv(EnvironmentBase):
    """Single turn: transform an English word letter by letter."""

    kind: Literal["words"]
    task: Literal["reverse", "sort", "shift"] = "reverse"
    """``reverse`` the letters, ``sort`` them, or ``shift`` each by one in the alphabet."""
    min_letters: PositiveInt = 3
    """Shortest word."""
    max_letters: PositiveInt = 6
    """Longest word."""


class CalculatorEnv(EnvironmentBase):
    """Several turns: answer an arithmetic question with a tool that runs a program in a sandboxed process."""

    kind: Literal["calculator"]
    max_operand: PositiveInt = 99
    """Largest number in a question."""
    max_turns: PositiveInt = 3
    """Model turns before the rollout is ended."""
    tool_timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one tool call in seconds."""


class CustomEnv(HostedEnv):
    """An environment of your own. It runs in a process of its own."""

    kind: Literal["custom"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:Name`` of a callable that returns an `hpcrl.rollouts.environments.Environment`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""
    env: dict[str, str] = {}
    """Variables of its process in addition to those of the orchestrator."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return self.factory, self.args

    def variables(self) -> dict[str, str]:
        return self.env


class DatasetColumns(StrictModel):
    """Names of columns of the file."""

    prompt: str = "prompt"
    """The question, as text. Not read where there are ``messages`` or a ``template``."""
    messages: str | None = None
    """The conversation that the policy continues: a list of ``role`` and ``content``, the last one of the user or the
    result of a tool. Messages of the assistant may have ``tool_calls``."""
    tools: str | None = None
    """Tools that the policy may call: a list of functions as OpenAI's API has it, which may be empty. Of ``kind:
    dataset`` alone."""
    answer: str = "answer"
    """The right answer: text, a number, ``true`` or ``false``; or a list of right answers, of which a reply needs one.
    It must be there where a checker compares with it."""
    difficulty: str | None = None
    """Difficulty of the question: any text or number, for ``curriculum.weights``."""
    pass_rate: str | None = None
    """Share of right answers of some model, from 0 to 1, for the bounds of ``curriculum``."""
    id: str | None = None
    """A name of the row for messages; no two rows have the same."""


class CurriculumConfig(StrictModel):
    """Frequency of training questions. Held-out questions are not affected."""

    weights: dict[str, PositiveFloat] = {}
    """Share of each value of ``columns.difficulty`` in the training prompts, relative to the others. Rows with other
    values are left out."""
    min_pass_rate: Fraction = 0.0
    """Training rows with a smaller ``columns.pass_rate`` are left out."""
    max_pass_rate: Fraction = 1.0
    """Training rows with a larger one are left out."""


class TaskFileEnv(HostedEnv):
    """An environment whose tasks stand in a file."""

    path: str | None = None
    """File (``.jsonl``, ``.csv`` or ``.tsv``, also packed as ``.gz``; ``.parquet``) or directory (read by the library
    ``datasets``); relative to the current directory. Give this or ``hub``."""
    hub: str | None = None
    """``ORG/NAME`` of a data set on Hugging Face, read by ``datasets``, from its cache where it is offline."""
    subset: str | None = None
    """Configuration to read from a directory or from a data set of the hub."""
    revision: str | None = None
    """Commit or tag of the data set of the hub."""
    columns: DatasetColumns = DatasetColumns()
    """Names of columns."""
    system: str | None = None
    """Text of a system message in front of each prompt."""
    template: RowTemplate | None = None
    """Text of the prompt, with ``{column}`` in place of the value of a column; ``{{`` and ``}}`` are braces. A column
    must have text, unless it stands there as ``{column:optional}``."""
    demonstration: RowTemplate | None = None
    """Text of a right reply, as ``template``, for ``hpcrl env try`` and ``hpcrl warmup``; by default the answer."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the questions that are held out, chosen by a hash of the question; 0.1 where no other split is given."""
    held_out_path: str | None = None
    """Separate file or directory of held-out questions, with the same columns."""
    split_column: str | None = None
    """Column that says whether a row is for training or held out. Rows that ``datasets`` reads have a column ``split``
    with the name of their split."""
    train_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("train",)
    """Values of ``split_column`` for training. Rows with any other value are left out, and counted."""
    held_out_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("test",)
    """Values of ``split_column`` that are held out."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which training questions are asked how often."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = ()
    """Checkers; the reward is the sum of their scores, each times its weight, less penalties."""
    checker_processes: PositiveInt = 4
    """Maximum processes of checkers that may take long (all but ``exact``, ``numeric``, ``tool_call`` and
    ``length``)."""

    @property
    def keeps_rows(self) -> bool:
        """Return whether rollouts need all columns of a row: functions of the user's own and tests of code do."""
        return any(isinstance(reward, FunctionReward | CodeReward) for reward in self.rewards)


class DatasetEnv(TaskFileEnv):
    """Questions from a file: one turn each, judged by named checkers. It runs in a process of its own."""

    kind: Literal["dataset"]
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1, strict=False)]
    """Checkers; the reward is the sum of their scores, each times its weight, less penalties."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.dataset:make", {"config": self.model_dump(mode="json")}


class HarnessEnv(TaskFileEnv):
    """Tasks from a file, each given to a program of its own that speaks OpenAI's API with the policy.

    The program reads its task from standard input, and finds the policy by ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
    Its reward is the last line that it prints, ``{"reward": 1.0, "parts": {"tests": 1.0}}``; with ``rewards`` all that
    it prints is judged as a reply. It runs in a process of its own.
    """

    kind: Literal["harness"]
    command: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """The program and its arguments. In each, ``{task}`` is the path of the task as JSON, ``{directory}`` the empty
    directory that it runs in, ``{prompt}`` the text of the task, ``{model}`` the name of the model, and ``{python}``
    the interpreter of the orchestrator. An argument that begins with ``./`` is relative to the current directory."""
    inherit: Annotated[tuple[str, ...], Field(strict=False)] = ("PATH", "LANG", "LC_ALL", "TZ")
    """Variables of the orchestrator that the program gets; it gets no others."""
    environ: dict[str, str] = {}
    """Further variables of the program."""
    sandbox: OptionalSandbox = None
    """Run the program in a sandbox: ``true``, or its settings. It then reaches nothing but the policy. None: it has the
    rights of the orchestrator."""
    time_limit_s: PositiveFloat = 3600.0
    """Maximum wall-clock time of the program in seconds; it is ended then, with all that it has started."""
    time_limit_reward: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    """Reward of a rollout whose program was ended at the limit and had printed none. None: the rollout fails."""
    max_output_bytes: Annotated[int, Field(ge=1024, le=1 << 26)] = 1 << 20
    """Maximum bytes that are kept of the program's output and of its errors: the last ones."""
    turn_timeout_s: PositiveFloat = 7200.0
    """Longest time of a rollout in seconds, judging included: more than ``time_limit_s``."""

    @property
    def keeps_rows(self) -> bool:
        """Return whether rollouts need all columns of a row: programs get them."""
        return True

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.harness:make", {"config": self.model_dump(mode="json")}


class ReasoningGymEnv(HostedEnv):
    """Tasks that the library ``reasoning_gym`` makes and judges: one turn each. It runs in a process of its own."""

    kind: Literal["reasoning_gym"]
    tasks: Annotated[dict[str, GymTaskConfig], Field(min_length=1)]
    """By their names in the library, such as ``chain_sum``."""
    system: str | None = None
    """Text of a system message in front of each prompt."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the questions that are held out, chosen by a hash of the question. Questions are unlimited: a small
    share only means that more are made until one is held out."""
    extract: Extraction = "all"
    """Part of the reply that is judged (see ``exact`` of ``dataset``). A reply without that part scores 0."""
    scorer_errors: Literal["fail", "zero"] = "fail"
    """Treatment of a reply at which the scorer of a task raises, as some do for a malformed answer: the rollout
    fails, or it scores 0."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of a scorer for one reply in seconds; a rollout whose score takes longer fails."""
    rewards: Annotated[
        tuple[Annotated[FormatReward | LengthReward, Field(discriminator="kind")], ...], Field(strict=False)
    ] = ()
    """Format and penalties, in addition to the task's own ``score``."""
    checker_processes: PositiveInt = 4
    """Maximum processes of scorers."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.gym:make", {"config": self.model_dump(mode="json")}

    def variables(self) -> dict[str, str]:
        # some tasks iterate over sets of texts: their questions would differ in each process
        return {"PYTHONHASHSEED": "0"}


_Environments = WordsEnv | CalculatorEnv | CustomEnv | DatasetEnv | HarnessEnv | ReasoningGymEnv | SweEnv | VerifiersEnv
_KINDS = tuple(model.model_fields["kind"].annotation.__args__[0] for model in get_args(_Environments))
EnvironmentConfig = Annotated[
    _Environments, Field(discriminator="kind"), BeforeValidator(partial(read_registered_kind, kinds=_KINDS))
]


def trained_on(environments: Sequence[EnvironmentConfig]) -> tuple[EnvironmentConfig, ...]:
    """Return the environments whose prompts are trained on, in order: those with a weight above 0."""
    return tuple(environment for environment in environments if environment.weight > 0)

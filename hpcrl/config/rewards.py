"""Rewards of environments that ask questions from a file: named checkers, each a part of the reward."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.config.base import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


def _compiles(pattern: str) -> str:
    if not pattern:
        raise PydanticCustomError("pattern", "is empty, and an empty regular expression matches everything")
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError("pattern", f"is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression of Python's module ``re``."""

Extraction = Literal["all", "last_line", "last_number", "boxed", "hashes", "answer_tag"]
"""Part of a text that is compared (`hpcrl.rollouts.environments.rewards.extraction`)."""

Score = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class _Reward(StrictModel):
    name: Name | None = None
    """Name of this part of the reward in metrics; by default its ``kind``. Unique within the environment."""
    weight: NonNegativeFloat = 1.0
    """Reward for a score of 1; with 0 the part is shown and trains nothing."""


class ExactReward(_Reward):
    """1 where the reply is the answer, after both were normalised; blanks around them never count."""

    kind: Literal["exact"]
    extract: Extraction = "all"
    """Part of the reply that is compared: ``all``; its ``last_line`` with text; its ``last_number``; the last
    ``boxed`` (``\\\\boxed{...}``); behind the last ``hashes`` (``#### ``); the last ``answer_tag``
    (``<answer>...</answer>``). A reply without that part scores 0."""
    extract_answer: Extraction = "all"
    """The same for the answer of the row, which must have that part."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    ignore_punctuation: bool = False
    """Compare without punctuation."""
    collapse_whitespace: bool = True
    """Compare each run of blanks and line ends as one blank."""
    unicode: bool = True
    """Compare in Unicode's form NFKC, in which full-width digits are digits."""


class NumericReward(_Reward):
    """1 where the reply has the number of the answer."""

    kind: Literal["numeric"]
    extract: Extraction = "last_number"
    """Part of the reply with the number (see ``exact``); the last number of that part counts. A reply without one
    scores 0."""
    extract_answer: Extraction = "last_number"
    """The same for the answer of the row, which must have one. With ``all``, ``boxed``, ``hashes`` and ``answer_tag``
    that part must be one number, with or without words; ``last_number`` takes the last one of any text."""
    absolute_tolerance: NonNegativeFloat = 0.0
    """Largest difference that counts as equal."""
    relative_tolerance: NonNegativeFloat = 0.0
    """Largest difference that counts as equal, as a share of the answer; the larger of the two tolerances holds."""


class ToolCallReward(_Reward):
    """1 where the reply calls the tools that the answer names, with equal arguments. No tool is run.

    The answer is a call, ``{"name": "weather", "arguments": {"city": "Rome"}}``, or a list of calls; an empty list: the
    reply must call nothing. Text of such JSON counts, too.
    """

    kind: Literal["tool_call"]
    ordered: bool = False
    """Calls must come in the order of the answer."""
    score: Literal["all", "share"] = "all"
    """1 where ``all`` calls are right and none is too many, or the ``share`` of right calls: their number divided by
    that of the answer or of the reply, whichever is larger."""


class _SlowReward(_Reward):
    """Runs in a process of its own, which is ended at the deadline: what a policy says can make it take very long."""

    timeout_s: PositiveFloat = 10.0
    """Longest time for one reply in seconds; a rollout whose check takes longer fails (it is not scored 0)."""

    @property
    def deadline_s(self) -> float:
        """Return the longest time in seconds after which a check is given up."""
        return self.timeout_s


class RegexReward(_SlowReward):
    """1 where a regular expression matches somewhere in the reply."""

    kind: Literal["regex"]
    pattern: Pattern | None = None
    """Regular expression of Python. Without it the answer of the row is one."""
    ignore_case: bool = False
    """Match without regard to upper and lower case."""


class FormatReward(_SlowReward):
    """1 where a regular expression matches the whole reply, but for blanks around it; ``.`` matches line ends, too."""

    kind: Literal["format"]
    pattern: Pattern
    """Regular expression of Python."""
    required: bool = False
    """A reply that does not match earns nothing of the other parts; penalties stay."""


class MathReward(_SlowReward):
    """1 where the reply and the answer are equal mathematical expressions, by the library ``math-verify``."""

    kind: Literal["math"]
    extract: Extraction = "all"
    """Part of the reply that is read (see ``exact``). The library looks for a box, LaTeX and expressions in it."""
    extract_answer: Extraction = "all"
    """The same for the answer of the row, which must be an expression, in LaTeX or as people write it."""
    digits: Annotated[int, Field(ge=1, le=50)] = 6
    """Decimal places to which numbers are compared."""


class JsonSchemaReward(_SlowReward):
    """1 where the reply is a JSON document that a JSON Schema allows, by the library ``jsonschema``."""

    kind: Literal["json_schema"]
    definition: dict[str, Any] | None = None
    """The schema. Without it the answer of the row is one, as JSON. References to other documents are not followed."""
    fenced: bool = False
    """Read the last block between lines of three backticks in the reply, and not the whole."""


class FunctionReward(_SlowReward):
    """Score of your own function, plain or ``async``: ``name(reply, answer, row, **args)``.

    ``reply`` is the text of the policy, ``answer`` that of the row (empty without a column for it) and ``row``
    a dict of all its columns.
    """

    kind: Literal["function"]
    function: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:name``, imported as the factory of a ``custom`` environment is."""
    args: dict[str, Any] = {}
    """More keyword arguments for it."""
    lowest: Score = 0.0
    """Lowest score it may give; one outside of the range fails the rollout."""
    highest: Score = 1.0
    """Highest score it may give."""


_Columns = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
_Inside = Annotated[str, Field(pattern=r"^/")]


class CodeReward(_Reward):
    """1 where the program in the reply passes the tests of the row, in a sandbox of its own.

    Tests are assert lines (a list of them, or one text, as in MBPP and HumanEval), or inputs and outputs of the program
    or of a function (a list of mappings with ``input`` and ``output``, or a mapping with ``inputs`` and ``outputs``, as
    in APPS and LiveCodeBench); both also as JSON text.
    """

    kind: Literal["code"]
    tests: str | _Columns = "tests"
    """Column with the tests of a row, or several columns whose tests are all run."""
    entry_point: str | None = None
    """Column with the name of the function that tests call, or with a mapping whose ``func_name`` it is, as in
    LiveCodeBench. A text of tests that defines ``check`` is ended by ``check(NAME)``, as in HumanEval."""
    before: str | None = None
    """Column with code that runs before the program, in its process: imports, for example. Not for inputs and outputs
    of programs."""
    setup: str | None = None
    """Column with code that runs after the program, in its process. Not for inputs and outputs of programs."""
    extract: Literal["fenced", "all"] = "fenced"
    """The program: the last ``fenced`` block, between lines of three backticks, or ``all`` of the reply. A reply
    without it scores 0."""
    score: Literal["all", "share"] = "all"
    """1 for a program that passes ``all`` tests and 0 for any other one, or the ``share`` of the tests that pass."""
    interpreter: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("/usr/bin/python3",)
    """Interpreter in the sandbox, and its arguments; the last one is the program's file. Assert lines and
    functions need Python 3.8 or later."""
    test_timeout_s: PositiveFloat = 10.0
    """Longest time for one test in seconds; one that takes longer fails."""
    timeout_s: PositiveFloat = 60.0
    """Longest time for all tests of one reply in seconds; tests that have not passed by then fail."""
    image: _Inside | None = None
    """Directory with an unpacked root filesystem, in place of the node's ``/usr``; an absolute path."""
    mounts: dict[_Inside, _Inside] = {}
    """Directories of the node that the program may read, by their absolute path inside: Python packages, for
    example."""
    memory_gib: PositiveFloat = 1.0
    """Memory of a sandbox, files included."""
    disk_gib: PositiveFloat = 0.25
    """Size of the files in its directory."""
    processes: PositiveInt = 64
    """Processes and threads of a sandbox."""

    @property
    def deadline_s(self) -> float:
        """Return the longest time in seconds after which a check is given up: sandboxes take a while to start."""
        return self.timeout_s + 180.0


class GymTaskConfig(StrictModel):
    """A task of ``reasoning_gym``."""

    weight: PositiveFloat = 1.0
    """Share of this task in the prompts, relative to the others."""
    parameters: dict[str, Any] = {}
    """Fields of the task's configuration in the library, without ``seed`` and ``size``."""


class GymReward(_SlowReward):
    """The score of the task's own scorer; it cannot be a reward of a recipe."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: dict[str, GymTaskConfig]
    """By name."""
    extract: Extraction = "all"
    """Part of the reply that is judged."""
    scorer_errors: Literal["fail", "zero"] = "fail"
    """Score of a reply at which the scorer raises."""


class LengthReward(StrictModel):
    """A penalty for replies that are longer than a limit."""

    kind: Literal["length"]
    name: Name | None = None
    """Name of this part of the reward in metrics; by default ``length``."""
    limit_tokens: PositiveInt | None = None
    """Longest reply without a penalty, in tokens. Give this or ``limit_characters``."""
    limit_characters: PositiveInt | None = None
    """Longest reply without a penalty, in characters."""
    rise: NonNegativeInt = 0
    """Tokens or characters above the limit over which the penalty rises from nothing to ``penalty``."""
    penalty: PositiveFloat
    """Amount that is subtracted from the reward of a reply that is longer."""


RewardConfig = Annotated[
    ExactReward
    | NumericReward
    | ToolCallReward
    | RegexReward
    | MathReward
    | JsonSchemaReward
    | FormatReward
    | FunctionReward
    | CodeReward
    | LengthReward,
    Field(discriminator="kind"),
]

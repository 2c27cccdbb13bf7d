"""From rows of a file to tasks: each row is checked where it comes in."""

from __future__ import annotations

import datetime
import decimal
import math
import re
import unicodedata
from typing import Any

import msgspec

from hpcrl.config.environments import TaskFileEnv
from hpcrl.config.row_template import fill_template, optional_columns, template_columns
from hpcrl.rollouts.environments.dataset.problems import BadRowError, shown
from hpcrl.rollouts.environments.dataset.reading import RawRow
from hpcrl.rollouts.environments.dataset.row_messages import normal_text, question_of, read_conversation, read_tools
from hpcrl.rollouts.environments.messages import MAX_LEVELS, is_nested_deeper
from hpcrl.rollouts.environments.rewards.answers import AnswerCheck

_MAX_BITS = 4096
"""Maximum size of an integer in bits; Python refuses to print much larger ones."""
_MAX_ANSWERS = 32
"""Maximum number of right answers of a row; each is compared."""
_LOOSE = re.compile(r"[;:?¿¡\"“”‘’'…«»]|(?<!\d)!|[.,](?!\w)")
"""Punctuation of sentences; that of formulas says what is asked."""
_TEXT_HINT = "every row has text there; remove the row, or name another column in {key}"


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Values of a row that a rollout needs.

    Attributes
    ----------
    messages:
        Messages of the prompt.
    answer:
        The right answer; empty where none is read.
    demonstration:
        A right reply; empty where there is none.
    row:
        All columns, where rollouts need them; else empty.
    others:
        Further right answers, where the row has a list of them.
    tools:
        Tools that the policy may call.
    """

    messages: list[dict[str, Any]]
    answer: str
    demonstration: str
    row: dict[str, Any]
    others: list[str] = []
    tools: list[dict[str, Any]] = []


class CheckedRow(msgspec.Struct, frozen=True):
    """Row without mistakes.

    Attributes
    ----------
    task:
        Values that a rollout needs.
    question:
        The question, its whitespace normalised, so that equal questions compare equal.
    id, difficulty, split:
        Values of these columns; empty where they are not read.
    pass_rate:
        0 to 1; 1 where it is not read.
    note:
        What is odd about the answer, as the end of a sentence; empty where nothing is.
    """

    task: Task
    question: str
    id: str
    difficulty: str
    split: str
    pass_rate: float
    note: str


class RowChecker:
    """Checks rows of one environment."""

    def __init__(self, config: TaskFileEnv, *, split_column: str | None) -> None:
        """-

        Parameters
        ----------
        split_column:
            Column that says what a row is for; None: that is not read.
        """
        self._config, self._split_column = config, split_column
        self._answers = AnswerCheck(config.rewards)
        self._wants_row = config.keeps_rows

    def check(self, raw: RawRow) -> CheckedRow:
        """Check a row (`BadRowError` with the first thing that is wrong)."""
        columns, values = self._config.columns, raw.values
        tools = (
            [] if columns.tools is None else read_tools(_given(values, columns.tools, "columns.tools"), columns.tools)
        )
        if columns.messages is not None:
            messages = read_conversation(_present(values, columns.messages, "columns.messages"), columns.messages)
            question = question_of(messages, tools)
        else:
            text, question = self._prompt(values)
            messages = [{"role": "user", "content": text}]
            question = "\0".join((question, question_of([], tools))) if tools else question
        if self._config.system is not None:
            if messages[0]["role"] in ("system", "developer"):
                raise BadRowError(f"column {columns.messages!r} begins with a system message", "remove system")
            messages = [{"role": "system", "content": self._config.system}, *messages]
        answer, *others = self._all_answers(values)
        if problem := self._answers.tests_problem(values):
            raise BadRowError(problem, "correct the row, or see the columns of the reward: tests, entry_point, setup")
        task = Task(messages, answer, self._demonstration(values, answer), self._row(values), others, tools)
        return CheckedRow(
            task=task,
            question=question,
            id=self._optional(values, columns.id, "columns.id"),
            difficulty=self._optional(values, columns.difficulty, "columns.difficulty"),
            split=self._optional(values, self._split_column, "split_column"),
            pass_rate=self._pass_rate(values),
            note=self._answers.note(answer),
        )

    def _prompt(self, values: dict[str, Any]) -> tuple[str, str]:
        """Return the text of a prompt, and its question: the columns of a template, without the surrounding text."""
        template = self._config.template
        if template is None:
            text = _text(values, self._config.columns.prompt, "columns.prompt", numbers=False)
            return text, normal_text(text)
        parts = _columns_of(values, template, "template")
        if not any(parts.values()) and parts:
            raise BadRowError("each column of template is empty", _TEXT_HINT.format(key="template"))
        question = "\0".join(normal_text(parts[column]) for column in sorted(parts))
        return fill_template(template, parts), question

    def _all_answers(self, values: dict[str, Any]) -> list[str]:
        """Return the right answers of a row: one, or those of a list."""
        column = self._config.columns.answer
        given = values.get(column)
        if self._answers.reads_calls and _are_calls(given):
            return [self._answer({**values, column: msgspec.json.encode(given, enc_hook=str).decode()})]
        if not self._config.rewards or not isinstance(given, list | tuple):
            return [self._answer(values)]
        if not self._answers.alternatives:
            what = f"column {column!r} is a list, and a part of the reward needs one answer: {shown(given)}"
            raise BadRowError(what, "give one answer; a function finds the column in its row")
        if not 0 < len(given) <= _MAX_ANSWERS:
            raise BadRowError(f"column {column!r} is a list of {len(given)}", f"give 1 to {_MAX_ANSWERS} right answers")
        return [self._answer({**values, column: each}) for each in given]

    def _answer(self, values: dict[str, Any]) -> str:
        column = self._config.columns.answer
        if not self._config.rewards:
            return ""  # a program judges itself
        if not self._answers.needed and (values.get(column) is None or values[column] == ""):
            return ""
        if isinstance(values.get(column), bool):
            values = {**values, column: str(values[column]).lower()}  # as JSON has it
        answer = _text(values, column, "columns.answer")
        if problem := self._answers.problem(answer):
            what = f"column {column!r} {problem}: {shown(answer)}"
            hint = "correct the row" if self._answers.reads_calls else "correct the row, or see extract_answer"
            raise BadRowError(what, hint)
        return answer

    def _demonstration(self, values: dict[str, Any], answer: str) -> str:
        template = self._config.demonstration
        if template is None:
            return answer
        return fill_template(template, _columns_of(values, template, "demonstration"))

    def _row(self, values: dict[str, Any]) -> dict[str, Any]:
        if not self._wants_row:
            return {}
        if deep := next((column for column in values if is_nested_deeper(values[column], MAX_LEVELS)), None):
            raise BadRowError(f"column {deep!r} is nested deeper than {MAX_LEVELS} levels", "remove it from the file")
        return {column: _plain(value, column) for column, value in values.items()}

    def _optional(self, values: dict[str, Any], column: str | None, key: str) -> str:
        return "" if column is None else _text(values, column, key).strip()

    def _pass_rate(self, values: dict[str, Any]) -> float:
        column = self._config.columns.pass_rate
        if column is None:
            return 1.0
        text = _text(values, column, "columns.pass_rate")
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if not 0 <= rate <= 1:
            what = f"column {column!r} is {shown(text)}, which is not a share from 0 to 1"
            raise BadRowError(what, "write 0.25 for one right answer of four")
        return rate


def _given(values: dict[str, Any], column: str, key: str) -> Any:
    """Return the value of a column that exists; None where the row has nothing there."""
    if column not in values:
        hint = f"name a column in {key}: there are {', '.join(shown(each) for each in list(values)[:12]) or 'none'}"
        raise BadRowError(f"column {column!r} does not exist", hint)
    return values[column]


def _present(values: dict[str, Any], column: str, key: str) -> Any:
    """Return the value of a column, which has one."""
    value = _given(values, column, key)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRowError(f"column {column!r} is empty", _TEXT_HINT.format(key=key))
    return value


def _text(values: dict[str, Any], column: str, key: str, *, numbers: bool = True) -> str:
    """Return the text in a column; a finite number counts as its digits."""
    value = _present(values, column, key)
    if isinstance(value, str):
        return value
    if numbers and isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
        if isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                what = f"column {column!r} is a number of {value.bit_length()} bits"
                raise BadRowError(what, "write it as text")
        elif not math.isfinite(value):
            raise BadRowError(f"column {column!r} is {value}, which is not finite", _TEXT_HINT.format(key=key))
        return str(value)
    wanted = "neither text nor a number" if numbers else "not text"
    raise BadRowError(f"column {column!r} is {wanted}: {shown(value)}", _TEXT_HINT.format(key=key))


def _columns_of(values: dict[str, Any], template: str, key: str) -> dict[str, str]:
    """Return the text of each column of a template; optional ones may be empty."""
    optional, texts = optional_columns(template), {}
    for column in template_columns(template):
        value = _given(values, column, key)
        empty = value is None or (isinstance(value, str) and not value.strip())
        texts[column] = "" if empty and column in optional else _text(values, column, key)
    return texts


def _are_calls(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and all(isinstance(each, dict) for each in value)
    )


def _plain(value: Any, column: str) -> Any:
    """Return a value of a column as JSON has it, for a function in another process."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if abs(value) < 1 << 63:
            return value
        case list() | tuple():
            return [_plain(each, column) for each in value]
        case dict():
            return {str(key): _plain(each, column) for key, each in value.items()}
        case decimal.Decimal() if value.is_finite():
            return str(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
    what = f"column {column!r} holds {shown(value)}, which a function cannot get"
    raise BadRowError(what, "keep text, finite numbers, lists and mappings; functions get every column of a row")


def loose_question(question: str) -> str:
    """Return a question so that those are equal which differ only in case, punctuation or invisible characters."""
    text = unicodedata.normalize("NFKC", question).casefold()
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")
    return "\0".join(normal_text(_LOOSE.sub(" ", part)) for part in text.split("\0"))

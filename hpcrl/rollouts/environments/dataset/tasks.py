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
from hpcrl.config.row_template import fill_template, template_columns
from hpcrl.rollouts.environments.dataset.problems import BadRowError, shown
from hpcrl.rollouts.environments.dataset.reading import RawRow
from hpcrl.rollouts.environments.rewards.answers import AnswerCheck

_MAX_BITS = 4096
"""Maximum size of an integer in bits; Python refuses to print much larger ones."""
_MAX_ANSWERS = 32
"""Maximum number of right answers of a row; each is compared."""
_ROLES = ("system", "user", "assistant", "tool")
_LOOSE = re.compile(r"[;:?¿¡\"“”‘’'…«»]|(?<!\d)!|[.,](?!\w)")
"""Punctuation of sentences; that of formulas says what is asked."""
_TEXT_HINT = "every row has text there; remove the row, or name another column in {key}"


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Values of a row that a rollout needs.

    Attributes
    ----------
    messages:
        Role and content of each message of the prompt.
    answer:
        The right answer; empty where none is read.
    demonstration:
        A right reply; empty where there is none.
    row:
        All columns, where rollouts need them; else empty.
    others:
        Further right answers, where the row has a list of them.
    """

    messages: list[tuple[str, str]]
    answer: str
    demonstration: str
    row: dict[str, Any]
    others: list[str] = []


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
        messages, question = self._messages(values) if columns.messages is not None else self._prompt(values)
        if self._config.system is not None:
            if messages[0][0] == "system":
                raise BadRowError(f"column {columns.messages!r} begins with a system message", "remove system")
            messages = [("system", self._config.system), *messages]
        answer, *others = self._all_answers(values)
        if problem := self._answers.tests_problem(values):
            raise BadRowError(problem, "correct the row, or see the columns of the reward: tests, entry_point, setup")
        task = Task(messages, answer, self._demonstration(values, answer), self._row(values), others)
        return CheckedRow(
            task=task,
            question=question,
            id=self._optional(values, columns.id, "columns.id"),
            difficulty=self._optional(values, columns.difficulty, "columns.difficulty"),
            split=self._optional(values, self._split_column, "split_column"),
            pass_rate=self._pass_rate(values),
            note=self._answers.note(answer),
        )

    def _prompt(self, values: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
        """Return the prompt of a row, and its question: the columns of a template, without the surrounding text."""
        template = self._config.template
        if template is None:
            text = _text(values, self._config.columns.prompt, "columns.prompt", numbers=False)
            return [("user", text)], _normal(text)
        parts = {column: _text(values, column, "template") for column in template_columns(template)}
        question = "\0".join(_normal(parts[column]) for column in sorted(parts))
        return [("user", fill_template(template, parts))], question

    def _messages(self, values: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
        """Return the conversation of a row, and its question: all of its messages."""
        column = self._config.columns.messages
        assert column is not None
        found = _present(values, column, "columns.messages")
        if isinstance(found, str):
            try:
                found = msgspec.json.decode(found)
            except (msgspec.DecodeError, RecursionError):
                raise BadRowError(f"column {column!r} is text, and no JSON list", "give a list of messages") from None
        if not isinstance(found, list | tuple) or not found:
            raise BadRowError(
                f"column {column!r} is not a list of messages", 'give [{"role": "user", "content": "..."}]'
            )
        messages = [_message(each, f"message {n} of column {column!r}") for n, each in enumerate(found, 1)]
        if messages[-1][0] != "user":
            what = f"the last message of column {column!r} is of {messages[-1][0]!r}"
            raise BadRowError(what, "end with the question of the user; the answer has a column of its own")
        return messages, "\0".join(f"{role}\0{_normal(content)}" for role, content in messages)

    def _all_answers(self, values: dict[str, Any]) -> list[str]:
        """Return the right answers of a row: one, or those of a list."""
        column = self._config.columns.answer
        given = values.get(column)
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
            raise BadRowError(what, "correct the row, or see extract_answer")
        return answer

    def _demonstration(self, values: dict[str, Any], answer: str) -> str:
        template = self._config.demonstration
        if template is None:
            return answer
        return fill_template(template, {c: _text(values, c, "demonstration") for c in template_columns(template)})

    def _row(self, values: dict[str, Any]) -> dict[str, Any]:
        if not self._wants_row:
            return {}
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


def _present(values: dict[str, Any], column: str, key: str) -> Any:
    """Return the value of a column."""
    if column not in values:
        hint = f"name a column in {key}: there are {', '.join(shown(each) for each in list(values)[:12]) or 'none'}"
        raise BadRowError(f"column {column!r} does not exist", hint)
    value = values[column]
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


def _message(value: Any, where: str) -> tuple[str, str]:
    """Check one message of a conversation."""
    if not isinstance(value, dict):
        raise BadRowError(f"{where} is not a mapping: {shown(value)}", "give role and content")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise BadRowError(f"{where} has the role {shown(role)}", f"roles are {', '.join(_ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise BadRowError(f"{where} has no text: {shown(content)}", "content is text")
    # tables contain null for keys that a message does not have
    if more := [key for key, each in value.items() if key not in ("role", "content") and each is not None]:
        raise BadRowError(f"{where} has {shown(more[0])}", "only role and content are read; remove the others")
    return role, content


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


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def loose_question(question: str) -> str:
    """Return a question so that those are equal which differ only in case, punctuation or invisible characters."""
    text = unicodedata.normalize("NFKC", question).casefold()
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")
    return "\0".join(_normal(_LOOSE.sub(" ", part)) for part in text.split("\0"))

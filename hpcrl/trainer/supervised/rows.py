"""Reads the conversations of a supervised run's data, and checks each row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from hpcrl.config.sft import SftConfig
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.dataset.problems import BadRowError, Problems, shown
from hpcrl.rollouts.environments.dataset.reading import RawRow, RowSource, read_rows
from hpcrl.rollouts.environments.dataset.row_messages import read_tools
from hpcrl.rollouts.environments.messages import plain_messages

SECTION = "sft"
"""Section of a recipe that error messages name."""
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_HASHES = 1 << 64


class DataConversation(NamedTuple):
    """One row of the data.

    Attributes
    ----------
    source, place:
        Setting that names the file, and position in it, as ``line 17``.
    messages, tools:
        Conversation as plain data.
    held_out:
        Whether it is held out from training.
    """

    source: RowSource
    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    held_out: bool


class ConversationReader:
    """Reads the data of one recipe, each file once.

    Attributes
    ----------
    train, held_out:
        Conversations so far.
    other:
        Rows so far with another value of ``split_column``.
    repeated:
        Rows for training so far that were left out, because their prompt is held out.
    problems:
        Problem with the rows.
    """

    def __init__(self, config: SftConfig) -> None:
        self._config = config
        self.train = self.held_out = self.other = self.repeated = 0
        self.problems = Problems(SECTION)
        self._held_out_hashes: set[int] = set()

    def read(self) -> Iterator[DataConversation]:
        """Yield conversations: held-out ones of a file of their own first, others in the order of the data.

        Raises
        ------
        ConfigError
            Rows are wrong, or there is nothing to train on. With `Problems` many of them are named.
        """
        config = self._config
        if config.held_out_data is not None:
            yield from self._read(RowSource("held_out_data", config.held_out_data), held_out=True)
        if config.hub is not None:
            main = RowSource("hub", config.hub, on_hub=True)
        else:
            assert config.data is not None
            main = RowSource("data", config.data)
        if config.split_column is not None:
            self._remember_held_out(main)
        yield from self._read(main, held_out=None)
        self.problems.refuse()
        if not self.train:
            left = f" ({self.other} have another value of {config.split_column!r})" if self.other else ""
            self._refuse(main, f"{main.shown} has no conversation to train on{left}")
        wants = config.held_out_share is not None or config.held_out_data is not None or config.split_column is not None
        if wants and not self.held_out:
            self._refuse(main, f"no conversation of {main.shown} is held out")

    def notes(self) -> list[str]:
        """Return what was left out, a sentence each."""
        notes = []
        if self.other:
            notes.append(f"{self.other} rows have another value of {self._config.split_column!r} and are left out")
        if self.repeated:
            notes.append(
                f"{self.repeated} rows for training have the prompt of a held-out conversation, and are left out"
            )
        return notes

    def _refuse(self, source: RowSource, what: str) -> None:
        hint = "look at the split of the data: split_column, train_values, held_out_values, held_out_share"
        raise ConfigError([Finding("recipe", f"{SECTION}.{source.key}", what, hint)])

    def _read(self, source: RowSource, *, held_out: bool | None) -> Iterator[DataConversation]:
        """Read one file; with ``held_out`` None each row decides itself which part it belongs to."""
        for raw in read_rows(source, self._config, self.problems):
            try:
                messages, tools = self._conversation(raw)
                apart = self._side(raw, messages) if held_out is None else held_out
            except BadRowError as error:
                self.problems.add(source.key, f"{source.shown}, {raw.place}: {error.what}", error.hint)
                continue
            if apart is None:
                self.other += 1
                continue
            if apart:
                self.held_out += 1
            elif self._held_out_hashes and _prompt_hash(messages) in self._held_out_hashes:
                self.repeated += 1
                continue
            else:
                self.train += 1
            if held_out:
                self._held_out_hashes.add(_prompt_hash(messages))
            yield DataConversation(source, raw.place, messages, tools, apart)

    def _remember_held_out(self, source: RowSource) -> None:
        """Read the rows that a column holds out first: the same conversation may be for training further above."""
        for raw in read_rows(source, self._config, Problems(SECTION)):
            # what is wrong is named when all rows are read
            with contextlib.suppress(BadRowError):
                messages, _ = self._conversation(raw)
                if self._side(raw, messages):
                    self._held_out_hashes.add(_prompt_hash(messages))

    def _side(self, raw: RawRow, messages: list[dict[str, Any]]) -> bool | None:
        """Return whether a row is held out; None: it is for nothing."""
        config = self._config
        if config.split_column is not None:
            value = str(_column(raw.values, config.split_column, "split_column"))
            return False if value in config.train_values else True if value in config.held_out_values else None
        # by the prompt: several replies to it are on one side
        return config.held_out_share is not None and _prompt_hash(messages) / _HASHES < config.held_out_share

    def _conversation(self, raw: RawRow) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        columns = self._config.columns
        if columns.prompt is None:
            given = _messages(_column(raw.values, columns.messages, "columns.messages"), columns.messages, role="")
        else:
            prompt = _column(raw.values, columns.prompt, "columns.prompt")
            completion = _column(raw.values, columns.completion, "columns.completion")
            given = [
                *_messages(prompt, columns.prompt, role="user"),
                *_messages(completion, columns.completion, role="assistant"),
            ]
        tools = raw.values.get(columns.tools) if columns.tools is not None else None
        try:
            messages = plain_messages(given)
            found = read_tools(tools, columns.tools) if columns.tools is not None else []
        except (TypeError, ValueError) as error:
            raise BadRowError(str(error), "write messages as {role, content}, and tools as JSON schemas") from None
        _check_assistant(messages)
        if self._config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._config.system})
        return messages, found


def _column(values: Mapping[str, Any], name: str, key: str) -> Any:
    if name not in values:
        there = ", ".join(map(shown, values))
        raise BadRowError(f"it has no column {name!r}; it has {there}", f"set {SECTION}.{key} to the name of one")
    return values[name]


def _list(value: Any, column: str) -> Sequence[Any]:
    """Return a list as it is, or the one that text of a CSV file has as JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise BadRowError(f"{column} is not a JSON list: {shown(value)}", "write a list of objects") from None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRowError(f"{column} is {type(value).__name__}, not a list: {shown(value)}", "write a list of objects")
    return value


def _messages(value: Any, column: str, *, role: str) -> list[Any]:
    """Return messages; where ``role`` is given, text is one message of that role."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    found = [_message(message) for message in _list(value, column)]
    if not found:
        raise BadRowError(f"{column} is empty", "remove the row")
    return found


def _message(given: Any) -> Any:
    """Return a message with a role and a content, also of one with ``from`` and ``value``; else what was given."""
    if not isinstance(given, Mapping):
        return given
    if "role" not in given and {"from", "value"} <= given.keys():
        role = given["from"]
        return {"role": _SHARE_GPT.get(role, role) if isinstance(role, str) else role, "content": given["value"]}
    # Parquet files have every key in every row
    return {key: value for key, value in given.items() if value is not None or key == "content"}


def _check_assistant(messages: Sequence[Mapping[str, Any]]) -> None:
    said = [message for message in messages if message["role"] == "assistant"]
    if not said:
        raise BadRowError("no message has the role assistant", "remove the row, or check the roles of its messages")
    for message in said:
        if not message.get("content") and not message.get("tool_calls"):
            raise BadRowError("a message of the assistant is empty", "remove the row, or write its content")
        if message.get("weight", 1) not in (0, 1):
            raise BadRowError(f"the weight of a message is {shown(message['weight'])}", "write 0 (context alone) or 1")
    if not any(message.get("weight", 1) for message in said):
        raise BadRowError("all messages of the assistant have the weight 0", "remove the row")


def _prompt_hash(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a hash of what comes before the first reply; of everything where no user speaks before it."""
    first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
    prompt = messages[:first]
    if all(message["role"] in ("system", "developer") for message in prompt):
        prompt = messages
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(list(prompt), order="deterministic"), seed=0)

"""Partition of rows into training and held-out ones; no question is in both.

The partition depends only on the content of rows, not on their order in the file or on the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import msgspec
import xxhash

from hpcrl.config.environments import TaskFileEnv
from hpcrl.rollouts.core.seeding import stable_fraction, stable_hash
from hpcrl.rollouts.environments.base import Split
from hpcrl.rollouts.environments.dataset.problems import BadRowError, Problems, shown
from hpcrl.rollouts.environments.dataset.reading import RowSource, read_rows
from hpcrl.rollouts.environments.dataset.tasks import CheckedRow, RowChecker, loose_question

HELD_OUT_SHARE = 0.1
"""Default share of questions that are held out."""
_NAMED = 3
"""Maximum number of rows that a note names."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Row that is kept, encoded, so that millions of rows take no more memory than the file."""

    order: int
    question: bytes
    loose: bytes
    answer: int
    task: bytes
    difficulty: str
    place: str


@dataclass(slots=True)
class Partition:
    """Encoded tasks of both splits.

    Attributes
    ----------
    train:
        By difficulty; where the curriculum has no weights, under an empty name.
    held_out:
        Held-out rows of all difficulties.
    notes:
        Warnings about the files, a sentence each.
    """

    train: dict[str, list[bytes]]
    held_out: list[bytes]
    notes: list[str] = field(default_factory=list)


def read_partition(config: TaskFileEnv) -> Partition:
    """Read the files of an environment.

    Raises
    ------
    ConfigError
        Rows are wrong, or a split is empty.
    """
    return _Reader(config).read()


def trained_elsewhere(configs: Sequence[TaskFileEnv]) -> list[str]:
    """Note held-out questions of one environment on which another one trains, a sentence for each two.

    Raises
    ------
    ConfigError
        See `read_partition`.
    """
    readers = [(config, _Reader(config)) for config in configs]
    for _, reader in readers:
        reader.read()
    notes = []
    for (config, reader), (other, trainer) in permutations(readers, 2):
        if other.weight <= 0 or not (both := reader.held_out_in(trainer)):
            continue
        count = f"{len(both)} held-out rows of environment {config.name} have a prompt"
        notes.append(f"{count} that environment {other.name} trains on: {_named(both)}")
    return notes


class _Reader:
    """Reads the files of one environment, each once."""

    def __init__(self, config: TaskFileEnv) -> None:
        self._config = config
        self._problems = Problems(f"environments.{config.name}")
        self._entries: dict[Split, list[_Entry]] = {"train": [], "heldout": []}
        self._ids: dict[bytes, str] = {}
        self._others: dict[str, int] = {}
        self._outside = 0
        self._odd: list[str] = []
        self._encoder = msgspec.msgpack.Encoder()

    def read(self) -> Partition:
        config = self._config
        if config.hub is not None:
            main = RowSource("hub", config.hub, on_hub=True)
        else:
            assert config.path is not None
            main = RowSource("path", config.path)
        by_file = config.held_out_path is not None
        self._read(main, "train" if by_file else None)
        if config.held_out_path is not None:
            self._read(RowSource("held_out_path", config.held_out_path), "heldout")
        self._problems.refuse()
        notes = self._left_out()
        if self._odd:
            what = f"{len(self._odd)} answers may be more than a number, and their last number is compared"
            notes.append(f"{what} (kind: math reads expressions): {_named(self._odd)}")
        notes += self._separate()
        for entries in self._entries.values():
            entries.sort(key=lambda each: (each.order, each.task))
        notes += _repeated([*self._entries["train"], *self._entries["heldout"]])
        notes += self._similar()
        self._refuse_empty(main)
        self._problems.refuse()
        return Partition(self._by_difficulty(notes, main), [each.task for each in self._entries["heldout"]], notes)

    def held_out_in(self, other: _Reader) -> list[str]:
        """Return the places of held-out rows whose questions another reader has for training, after `read`."""
        trained = {each.question: each.place for each in other._entries["train"]}
        held_out = self._entries["heldout"]
        return [f"{each.place} as {trained[each.question]}" for each in held_out if each.question in trained]

    def _read(self, source: RowSource, split: Split | None) -> None:
        """Read one file; None: rows have their own split."""
        config = self._config
        checker = RowChecker(config, split_column=config.split_column if split is None else None)
        for raw in read_rows(source, config, self._problems):
            try:
                row = checker.check(raw)
                self._check_id(row, f"{source.shown}, {raw.place}")
            except BadRowError as error:
                self._problems.add(source.key, f"{source.shown}, {raw.place}: {error.what}", error.hint)
                continue
            if row.note:
                # of millions of rows only the first ones are named
                named = len(self._odd) <= _NAMED
                self._odd.append(f"{raw.place} {row.note} ({shown(row.task.answer)})" if named else "")
            side = split or self._side(row)
            if side == "train" and not self._within(row.pass_rate):
                self._outside += 1
            elif side is not None:
                self._entries[side].append(self._entry(row, raw.place))

    def _check_id(self, row: CheckedRow, place: str) -> None:
        """Refuse an identifier that another row has."""
        if not row.id:
            return
        first = self._ids.setdefault(xxhash.xxh3_128_digest(row.id.encode()), place)
        if first != place:
            what = f"column {self._config.columns.id!r} is {shown(row.id)}, as in {first}"
            raise BadRowError(what, "give each row an identifier of its own, or remove columns.id")

    def _side(self, row: CheckedRow) -> Split | None:
        """Return the split of a row; None: it is not used."""
        config = self._config
        if config.split_column is None:
            share = config.held_out_share or HELD_OUT_SHARE
            return "heldout" if stable_fraction("split", row.question) < share else "train"
        if row.split in config.train_values:
            return "train"
        if row.split in config.held_out_values:
            return "heldout"
        self._others[row.split] = self._others.get(row.split, 0) + 1
        return None

    def _within(self, pass_rate: float) -> bool:
        curriculum = self._config.curriculum
        return curriculum.min_pass_rate <= pass_rate <= curriculum.max_pass_rate

    def _entry(self, row: CheckedRow, place: str) -> _Entry:
        return _Entry(
            order=stable_hash("order", row.question),
            question=xxhash.xxh3_128_digest(row.question.encode()),
            loose=xxhash.xxh3_128_digest(loose_question(row.question).encode()),
            answer=xxhash.xxh3_64_intdigest("\0".join((row.task.answer, *row.task.others)).encode()),
            task=self._encoder.encode(row.task),
            difficulty=row.difficulty,
            place=place,
        )

    def _left_out(self) -> list[str]:
        """Note the rows that are not used."""
        notes = []
        if self._others:
            named = ", ".join(f"{count} with {shown(value)}" for value, count in sorted(self._others.items())[:_NAMED])
            total = sum(self._others.values())
            notes.append(f"{total} rows are neither for training nor held out, by {self._config.split_column}: {named}")
        if self._outside:
            notes.append(f"{self._outside} training rows are excluded by their pass rate")
        return notes

    def _separate(self) -> list[str]:
        """Remove held-out questions from training, and note them."""
        held_out = {each.question: each.place for each in self._entries["heldout"]}
        both = [each for each in self._entries["train"] if each.question in held_out]
        if not both:
            return []
        self._entries["train"] = [each for each in self._entries["train"] if each.question not in held_out]
        named = _named(f"{each.place} as held-out {held_out[each.question]}" for each in both)
        return [f"{len(both)} training rows have the prompt of a held-out row, and are excluded from training: {named}"]

    def _similar(self) -> list[str]:
        """Note held-out questions that are those of training rows but for case, punctuation or invisible characters."""
        trained = {each.loose: each for each in self._entries["train"]}
        held_out = [each for each in self._entries["heldout"] if each.loose in trained]
        if not held_out:
            return []
        named = _named(f"{each.place} as {trained[each.loose].place}" for each in held_out)
        what = "differ from a training prompt only in case, punctuation or invisible characters"
        return [f"{len(held_out)} held-out prompts {what}: {named}"]

    def _refuse_empty(self, main: RowSource) -> None:
        for split, entries in self._entries.items():
            if not entries:
                noun = "training" if split == "train" else "held-out"
                key = "held_out_share" if self._config.split_column is None else "split_column"
                key = "held_out_path" if self._config.held_out_path is not None and split == "heldout" else key
                self._problems.add(key, f"{main.shown} gives no {noun} question", _HINTS[key])

    def _by_difficulty(self, notes: list[str], main: RowSource) -> dict[str, list[bytes]]:
        """Return training tasks by the value that the curriculum weighs."""
        weights, entries = self._config.curriculum.weights, self._entries["train"]
        if not weights:
            return {"": [each.task for each in entries]}
        found: dict[str, list[bytes]] = {value: [] for value in sorted(weights)}
        others: dict[str, int] = {}
        for each in entries:
            if each.difficulty in found:
                found[each.difficulty].append(each.task)
            else:
                others[each.difficulty] = others.get(each.difficulty, 0) + 1
        for value in [value for value, tasks in found.items() if not tasks]:
            there = ", ".join(shown(other) for other in sorted({each.difficulty for each in entries})[:12])
            what = f"no training row of {main.shown} has the difficulty {shown(value)}"
            self._problems.add("curriculum.weights", what, f"there are {there}")
        self._problems.refuse()
        if others:
            named = ", ".join(f"{count} of {shown(value)}" for value, count in sorted(others.items())[:_NAMED])
            notes.append(f"{sum(others.values())} training rows have a difficulty without a weight: {named}")
        return found


_HINTS = {
    "held_out_share": "choose another share, or give more rows",
    "held_out_path": "name a file with rows",
    "split_column": "see train_values and held_out_values",
}


def _repeated(entries: list[_Entry]) -> list[str]:
    """Name rows that ask the same, and those of them that have different answers."""
    first: dict[bytes, _Entry] = {}
    again: list[str] = []
    different: list[str] = []
    for each in entries:
        before = first.setdefault(each.question, each)
        if before is not each:
            (again if before.answer == each.answer else different).append(f"{each.place} as {before.place}")
    notes = []
    if again:
        notes.append(f"{len(again)} rows are duplicates, and are used more often: {_named(again)}")
    if different:
        notes.append(f"{len(different)} rows have the prompt of another row, with another answer: {_named(different)}")
    return notes


def _named(places: Iterable[str]) -> str:
    found = list(places)
    return ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")

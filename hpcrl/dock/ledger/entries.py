"""Entries of the ledger of rollouts: one JSON object a line, in ``rollouts/ledger/000001.jsonl``, a file a process.

A rollout is a member of a group, and the group has its number for the whole run. Entries of one file are in the order
in which things happened. The first says how far the files before it are believed: what a process that was thought
dead writes later is behind that, and is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

__all__ = [
    "Begin",
    "Dropped",
    "Entry",
    "Finished",
    "Kept",
    "PayloadPlace",
    "Taken",
    "TurnSaved",
    "believed_bytes",
    "ledger_files",
    "read_entries",
    "whole_bytes",
]

FORMAT_VERSION = 1
_FILE = re.compile(r"(\d{6,})\.jsonl")
_MAX_FILE = 1 << 60
_MAX_BLOCK = 1 << 40
"""Maximum size of the columns of one rollout in bytes."""


class PayloadPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where the columns of a rollout lie.

    Attributes
    ----------
    file:
        In ``rollouts/payload/``.
    offset, bytes:
        Within it.
    xxh3_128:
        Of these bytes, hexadecimal.
    """

    file: str
    offset: Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BLOCK)]
    xxh3_128: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="entry"):
    """A process begins to write.

    Attributes
    ----------
    restored:
        The step that it goes on after: what later steps took, and what became too old by them, is undone.
    believed:
        Bytes of each file before this one.
    """

    attempt: int
    restored: int
    time_s: float
    believed: dict[str, int]
    format_version: int = FORMAT_VERSION


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", tag_field="entry"):
    """A rollout has finished, and its columns are on disk.

    Attributes
    ----------
    first_version, last_version:
        Of its sampled tokens: the first one's, and the highest.
    reward:
        None where it was not finite: earlier versions took such a reward, and JSON has no number for it.
    ended_s:
        Seconds since the epoch.
    """

    group: int
    member: int
    environment: str
    prompt_index: int
    reward: float | None
    tokens: int
    sampled_tokens: int
    first_version: int
    last_version: int
    ended_s: float
    payload: PayloadPlace


class TurnSaved(msgspec.Struct, frozen=True, kw_only=True, tag="turn", tag_field="entry"):
    """A turn of a rollout in progress has ended, and its columns are on disk: with all turns before it, the rollout can
    go on from here. A turn with the number of an earlier one takes its place, and that of all behind it.

    Attributes
    ----------
    turn:
        Its number within the rollout, from 0.
    tokens:
        That it added: what was said, and what was sampled.
    first_version, last_version:
        Of its sampled tokens: the first one's, and the highest.
    """

    group: int
    member: int
    turn: int
    environment: str
    prompt_index: int
    tokens: int
    first_version: int
    last_version: int
    payload: PayloadPlace


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept", tag_field="entry"):
    """All members of a group have ended, with a result or without: it waits for a batch."""

    group: int


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped", tag_field="entry"):
    """What had finished of a group is not trained on.

    Attributes
    ----------
    members:
        Those that had finished.
    step:
        The step by whose consumption it became too old: a restore from before gives it back. None: for good.
    again:
        Whether the group starts again; otherwise it is over.
    """

    group: int
    members: list[int]
    why: str
    step: int | None = None
    again: bool = False


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken", tag_field="entry"):
    """The batch of a step was made of these groups: their numbers, and the members of each."""

    step: int
    groups: list[tuple[int, list[int]]]


Entry = Begin | Finished | TurnSaved | Kept | Dropped | Taken
_decoder = msgspec.json.Decoder(Entry)


def ledger_files(directory: Path) -> list[Path]:
    """Files of a ledger in their order; none where there is no ledger."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _FILE.fullmatch(path.name)), key=lambda path: int(path.stem))


def read_entries(directory: Path) -> Iterator[Entry]:
    """All entries of a ledger, in order.

    What is torn at the end of the newest file is left out: its writer was killed in the middle of it, or the power was
    cut before it was durable, and nobody counted on it. Of other files the next writer has said where they end.

    Raises
    ------
    ValueError
        A line before that cannot be read, or a file is of a format that this code does not know.
    """
    files = _begun(directory)
    for i, (path, _) in enumerate(files):
        limits = [later.believed[path.name] for _, later in files[i + 1 :] if path.name in later.believed]
        for entry, _ in _entries_of(path, min(limits, default=None)):
            yield entry


def believed_bytes(directory: Path, *, but: str) -> dict[str, int]:
    """How far the files that are there are to be believed; ``but`` the writer's own.

    What an earlier process has said stays: of a long run only its newest file is read. Bytes by name of the file.

    Raises
    ------
    OSError, ValueError
        A file cannot be read, does not begin as such a file, or is of a format that this code does not know.
    """
    files = [(path, begin) for path, begin in _begun(directory) if path.name != but]
    said = files[-1][1].believed if files else {}
    names = [path for path in ledger_files(directory) if path.name != but]
    return {path.name: said[path.name] if path.name in said else whole_bytes(path) for path in names}


def _begun(directory: Path) -> list[tuple[Path, Begin]]:
    files: list[tuple[Path, Begin]] = []
    for path in ledger_files(directory):
        begin = _begin(path)
        # a process of an older attempt that came late has no say
        if begin is not None and all(begin.attempt >= other.attempt for _, other in files):
            files.append((path, begin))
    return files


def whole_bytes(path: Path) -> int:
    """Bytes of a file up to its first line that cannot be read (OSError where the file cannot)."""
    return max((end for _, end in _entries_of(path, None)), default=0)


def _entries_of(path: Path, end: int | None) -> Iterator[tuple[Entry, int]]:
    """Entries of a file and where each ends, up to byte ``end``; None: up to the first line that is torn.

    A line at a time: the ledger of a long run has gigabytes.
    """
    at = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if end is not None and at >= end:
                return
            if end is None and not line.endswith(b"\n"):
                return
            try:
                entry = _decoder.decode(line if end is None else line[: end - at])
            except msgspec.DecodeError as error:
                if end is None:
                    return
                raise ValueError(f"{path}, line {number}: {error}") from error
            at += len(line)
            yield entry, at


def _begin(path: Path) -> Begin | None:
    """The first entry of a file; None where its writer was killed before that was whole."""
    with path.open("rb") as stream:
        line = stream.readline()
    try:
        entry = _decoder.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(entry, Begin):
        raise ValueError(f"{path} does not begin with the entry 'begin'")
    if entry.format_version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {entry.format_version}, this hpcrl reads {FORMAT_VERSION}")
    return entry

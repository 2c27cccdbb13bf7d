"""Entries of the ledger of rollouts: one JSON object a line, in ``rollouts/ledger/000001.jsonl``, a file a process.

A rollout is a member of a group, and the group has its number for the whole run. Entries of one file are in the order
in which things happened. The first says how far the files before it are believed: what a process that was thought
dead writes later is behind that, and is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

FORMAT_VERSION = 1
_FILE = re.compile(r"(\d{6,})\.jsonl")
_MAX_FILE = 1 << 60
_MAX_BLOCK = 1 << 40
"""Maximum size of the columns of one rollout in bytes."""


class PayloadPlace(msgspec.Struct, frozen=True, array_like=True):
    """Location of the columns of a rollout.

    Attributes
    ----------
    file:
        Name of the file in ``rollouts/payload/``.
    offset, bytes:
        Position and length within the file.
    xxh3_128:
        Hash of these bytes, hexadecimal.
    """

    file: str
    offset: Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BLOCK)]
    xxh3_128: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="entry"):
    """Entry: a process begins to write.

    Attributes
    ----------
    restored:
        The restored step: rollouts that later steps took, or that became too old by them, wait again.
    believed:
        Bytes of each file before this one.
    """

    attempt: int
    restored: int
    time_s: float
    believed: dict[str, int]
    format_version: int = FORMAT_VERSION


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", tag_field="entry"):
    """Entry: a rollout has finished, and its columns are on disk.

    Attributes
    ----------
    first_version, last_version:
        Versions of its sampled tokens: the first one's, and the highest.
    reward:
        None where it was not finite: earlier versions took such a reward, and JSON has no number for it.
    ended_s:
        Seconds since the epoch.
    sequences:
        How many there are; one more than branches. Earlier versions had one.
    truncated:
        Whether its last reply was cut at a limit; None where that was not recorded.
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
    sequences: int = 1
    truncated: bool | None = None


class TurnSaved(msgspec.Struct, frozen=True, kw_only=True, tag="turn", tag_field="entry"):
    """A turn of a rollout in progress has ended, and its columns are on disk: with all turns before it, the rollout can
    go on from here. A turn with the number of an earlier one takes its place, and that of all behind it.

    Attributes
    ----------
    turn:
        Its number within the rollout, from 0.
    tokens:
        Tokens that it added: those of messages, and the sampled ones.
    first_version, last_version:
        Versions of its sampled tokens: the first one's, and the highest.
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
    """Entry: the finished rollouts of a group were discarded.

    Attributes
    ----------
    members:
        Members that had finished.
    step:
        The step by whose consumption they became too old: a restore of an earlier step makes them wait again. None:
        they are discarded permanently.
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
    """Return the files of a ledger in their order; none where the ledger does not exist."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _FILE.fullmatch(path.name)), key=lambda path: int(path.stem))


def read_entries(directory: Path) -> Iterator[Entry]:
    """Yield all entries of a ledger, in order.

    An incomplete end of the newest file is left out: its writer was killed, or the power was cut, before it was
    durable, and no process relied on it. The ends of other files were recorded by the next writer.

    Raises
    ------
    ValueError
        A line before that cannot be read, a file is of a format that this code does not know, or a file is missing or
        shorter than a later one says.
    """
    files = _begun(directory)
    said = files[-1][1].believed if files else {}
    if missing := {name for name, size in said.items() if size} - {path.name for path in ledger_files(directory)}:
        raise ValueError(f"{directory / min(missing)} is missing, and a later file names it: its rollouts are unknown")
    for i, (path, _) in enumerate(files):
        limits = [later.believed[path.name] for _, later in files[i + 1 :] if path.name in later.believed]
        for entry, _ in _entries_of(path, min(limits, default=None)):
            yield entry


def trusted_prefix_bytes(directory: Path, *, but: str) -> dict[str, int]:
    """Return the trusted bytes at the start of each existing file but the writer's own (``but``), by name.

    Prefixes that an earlier process recorded stay as they are: of a long run only its newest file is read. It is made
    durable before: its process may have ended between a write and the sync, and what is trusted must not be lost.

    Raises
    ------
    OSError, ValueError
        A file cannot be read, does not begin as such a file, or has a format that this code does not know.
    """
    files = [(path, begin) for path, begin in _begun(directory) if path.name != but]
    said = files[-1][1].believed if files else {}
    names = [path for path in ledger_files(directory) if path.name != but]
    return {path.name: said[path.name] if path.name in said else _durable_bytes(path) for path in names}


def _durable_bytes(path: Path) -> int:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return whole_bytes(path)


def _begun(directory: Path) -> list[tuple[Path, Begin]]:
    files: list[tuple[Path, Begin]] = []
    for path in ledger_files(directory):
        begin = _begin(path)
        # a process of an older attempt that came late is ignored
        if begin is not None and all(begin.attempt >= other.attempt for _, other in files):
            files.append((path, begin))
    return files


def whole_bytes(path: Path) -> int:
    """Return the bytes of a file up to its first line that cannot be read (OSError where the file cannot)."""
    return max((end for _, end in _entries_of(path, None)), default=0)


def _entries_of(path: Path, end: int | None) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a file and the end of each, up to byte ``end``; None: up to the first incomplete line.

    The file is read line by line: the ledger of a long run has gigabytes.
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
    if end is not None and at < end:
        raise ValueError(f"{path} ends at byte {at:,} of the {end:,} that a later file names: the rest of it is lost")


def _begin(path: Path) -> Begin | None:
    """Return the first entry of a file; None where its writer was killed before that was complete."""
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

"""Entries of the ledger of rollouts: one JSON object a line, in ``rollouts/ledger/000001.jsonl`` and later files.

A rollout is a member of a group, and the group has its number for the whole run. Entries of one file are in the order
in which things happened. The first says how far the files before it are believed: what a process that was thought
dead writes later is behind that, and is not read.

Each process begins a file. It continues in a further one where its file has become long (`Begin.continues`). Files
before the newest are sealed, ``000001.jsonl.gz`` (`hpcrl.dock.ledger.sealer`); their names and positions here are
those without compression.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from hpcrl.storage.sealed_files import SUFFIX, SealedFileError, content_bytes, lines_of_file

FORMAT_VERSION = 2
"""Format of a file that others come before: they may be sealed, and it may continue one of them."""
FIRST_FORMAT = 1
"""Format of the first file of a ledger, and of all files of earlier versions. Those refuse the other format."""
_FILE = re.compile(r"(\d{6,})\.jsonl")
_LISTINGS = 3
"""Maximum looks for a file: one that is sealed while its directory is listed may be in the list in neither form."""
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
    """Entry: a process begins to write, or continues in a further file.

    Attributes
    ----------
    restored:
        The restored step: rollouts that later steps took, or that became too old by them, wait again.
    believed:
        Bytes of each file before this one; where it continues a file, of that one only.
    continues:
        Number of the file of the same process that this one continues: nothing is restored. 0: a process begins.
    """

    attempt: int
    restored: int
    time_s: float
    believed: dict[str, int]
    format_version: int = FIRST_FORMAT
    continues: int = 0


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
    """Return the files of a ledger in their order, by plain paths also where they are sealed; none without a ledger."""
    if not directory.is_dir():
        return []
    # while a file is being sealed, both forms exist
    names = {name.removesuffix(SUFFIX) for name in os.listdir(directory)}
    return [directory / name for name in sorted(filter(_FILE.fullmatch, names), key=file_number)]


def file_number(name: str) -> int:
    """Return the number of a file of a ledger by its plain name; 0 for another name."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else 0


def ledger_bytes(directory: Path) -> int:
    """Return the bytes of all entries of a ledger, without compression; OSError where a file cannot be read."""
    return sum(content_bytes(path) for path in ledger_files(directory))


def read_entries(directory: Path) -> Iterator[Entry]:
    """Yield all entries of a ledger, in order.

    An incomplete end of the newest file is left out: its writer was killed, or the power was cut, before it was
    durable, and no process relied on it. The ends of other files were recorded by the next writer.

    Raises
    ------
    ValueError
        A line before that cannot be read, a file is of a format that this code does not know, or a file is missing,
        damaged, or shorter than a later one says.
    """
    for _ in range(_LISTINGS):
        paths = ledger_files(directory)
        files = begun_files(paths)
        limits = trusted_sizes(files)
        missing = {name for name, size in limits.items() if size} - {path.name for path in paths}
        if not missing:
            break
    if missing:
        raise ValueError(f"{directory / min(missing)} is missing, and a later file names it: its rollouts are unknown")
    counted = {path for path, _ in files}
    for path in paths:
        if path not in counted and limits.get(path.name) and _begin(path) is None:
            raise ValueError(f"{path}, line 1 cannot be read, and a later file names it: its rollouts are unknown")
    for path, _ in files:
        for entry, _ in _entries_of(path, limits.get(path.name)):
            yield entry


def trusted_sizes(files: Sequence[tuple[Path, Begin]]) -> dict[str, int]:
    """Return the trusted bytes at the start of files, by name, as later ones of ``files`` have recorded them."""
    limits: dict[str, int] = {}
    for path, begin in files:
        for name, size in begin.believed.items():
            # a file of a process that began at the same time may be named, and had no entries then
            if file_number(name) < file_number(path.name):
                limits[name] = min(size, limits.get(name, size))
    return limits


def trusted_prefix_bytes(directory: Path, *, but: str) -> dict[str, int]:
    """Return the trusted bytes at the start of each existing file but the writer's own (``but``), by name.

    Prefixes that an earlier process recorded stay as they are: of a long run only its newest file is read. It is made
    durable before: its process may have ended between a write and the sync, and what is trusted must not be lost.

    Raises
    ------
    OSError, ValueError
        A file cannot be read, does not begin as such a file, or has a format that this code does not know.
    """
    paths = [path for path in ledger_files(directory) if path.name != but]
    known = trusted_sizes(begun_files(paths))
    return {path.name: known[path.name] if path.name in known else _durable_bytes(path) for path in paths}


def _durable_bytes(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:  # a sealed file is durable
        os.fsync(stream.fileno())
    return whole_bytes(path)


def begun_files(paths: Iterable[Path]) -> list[tuple[Path, Begin]]:
    """Return those of the files of a ledger that count, each with its first entry (errors as `read_entries`)."""
    files: list[tuple[Path, Begin]] = []
    late: set[int] = set()
    for path in paths:
        begin = _begin(path)
        if begin is None:
            continue
        if files:
            newest, before = files[-1]
            # a process of an older attempt that came late is ignored, and so is one that continues its file after
            # another process has begun. Where the file that it continues is missing, the entry counts and names it
            passed = begin.continues and (begin.continues in late or begin.continues < file_number(newest.name))
            if begin.attempt < before.attempt or passed:
                late.add(file_number(path.name))
                continue
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
    for number, line in enumerate(_lines(path), 1):
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


def _lines(path: Path) -> Generator[bytes]:
    try:
        yield from lines_of_file(path)
    except SealedFileError as error:
        raise ValueError(f"{error.filename} is damaged: {error.strerror}") from error


def _begin(path: Path) -> Begin | None:
    """Return the first entry of a file; None where its writer was killed before that was complete."""
    lines = _lines(path)
    try:
        entry = _decoder.decode(next(lines, b""))
    except msgspec.DecodeError:
        return None
    finally:
        lines.close()
    if not isinstance(entry, Begin):
        raise ValueError(f"{path} does not begin with the entry 'begin'")
    if entry.format_version not in (FIRST_FORMAT, FORMAT_VERSION):
        known = f"{FIRST_FORMAT} and {FORMAT_VERSION}"
        raise ValueError(f"{path} has format {entry.format_version}, this hpcrl reads {known}")
    return entry

"""Finding versions that are announced and not durable, and opening versions of either form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import HandoffError
from hpcrl.weights.format.announcement import (
    ANNOUNCED_NAME,
    AnnouncedVersion,
    announced_name,
    decode_announcement,
)
from hpcrl.weights.format.fabric_record import FABRIC_DIR, decode_fabric_record, newest_writer
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.format.segments import manifest_digest
from hpcrl.weights.read.share import read_small
from hpcrl.weights.store import HandoffStore


def announced_versions(root: Path) -> list[int]:
    """Return the versions that the newest writer of a store has announced and serves, ascending, durable or not.

    Only listings are used. After the death of a trainer its announcements stay until the next attempt begins.
    """
    return sorted({version for _, version in _announced(root)})


def find_announced(root: Path, version: int) -> AnnouncedVersion | None:
    """Open a version that is announced; None where it is not, or not any more.

    Raises
    ------
    HandoffError
        Its announcement or its record cannot be read, or they contradict each other.
    """
    for directory, number in _announced(root):
        if number != version:
            continue
        record = decode_fabric_record(read_small(directory / f"v{version:06d}.json"))
        announcement = decode_announcement(read_small(directory / announced_name(version)), version)
        if record.version != version or record.digest != manifest_digest(announcement.announced):
            raise HandoffError(f"the record and the announcement of version {version} are of different versions")
        return AnnouncedVersion(HandoffStore(root).path_of(version), announcement, record)
    return None


def open_version(store: HandoffStore, version: int) -> OpenedVersion:
    """Open a version that is durable, or else announced (HandoffError: it is neither)."""
    try:
        return store.open(version)
    except HandoffError:
        if version not in store.versions() and (found := find_announced(store.root, version)) is not None:
            return found
        raise


def read_companion(version: OpenedVersion, name: str) -> bytes:
    """Return the content of a small file of a version (HandoffError where it cannot be read)."""
    return version.companion(name) if isinstance(version, AnnouncedVersion) else read_small(version.path / name)


def _announced(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directory and number of each version that has both files."""
    try:
        writers = newest_writer(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return
    for writer in writers:
        directory = root / writer / FABRIC_DIR
        try:
            names = set(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            match = ANNOUNCED_NAME.fullmatch(name)
            if match is not None and f"v{match[1]}.json" in names:
                yield directory, int(match[1])

"""Announcement of a version that ranks of the trainer serve and that is not durable (docs/handoff.md, "Fabric").

It lies next to the record of the version (`hpcrl.weights.format.fabric_record`), below the writer's hidden directory::

    weights/.writer-000002-5f0c1d9a/fabric/v000012.announced.json

It holds the manifest, by whose hashes readers verify what they pull, and those small files that engines need. It is
no manifest: a directory of the store has none before the version is durable, and code that takes a `Handoff` does not
take an `AnnouncedVersion`.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.storage.files import decode_versioned
from hpcrl.weights.format.fabric_record import FabricRecord
from hpcrl.weights.format.manifest import Manifest, OpenedVersion, WrongManifestError, chunk_digests

FORMAT_VERSION = 1
ANNOUNCED_NAME = re.compile(r"v(\d{6,})\.announced\.json", re.ASCII)


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file.

    Attributes
    ----------
    announced:
        Manifest of the version; that of the durable version is the same.
    companions:
        Contents of its small files that engines read, by name.
    """

    announced: Manifest
    companions: dict[str, bytes] = {}
    format_version: int = FORMAT_VERSION


class AnnouncedVersion(OpenedVersion):
    """Version that is served from memory and that is not durable: it ends with the trainer.

    Attributes
    ----------
    record:
        Where it is served.
    """

    def __init__(self, path: Path, announcement: Announcement, record: FabricRecord) -> None:
        """Remember them; ``path`` is where the version will be once it is durable."""
        super().__init__(path, announcement.announced)
        self.record, self._companions = record, announcement.companions

    @property
    def attempt(self) -> int:
        """Return the attempt whose trainer announced it."""
        return self.record.attempt

    def companion(self, name: str) -> bytes:
        """Return the content of a small file, as the manifest says (HandoffError where it is not there, or differs)."""
        data, file = self._companions.get(name), self.manifest.files.get(name)
        if data is None or file is None:
            raise HandoffError(f"version {self.version} was announced without {name}")
        if len(data) != file.bytes or chunk_digests(data, self.manifest.chunk_bytes) != file.xxh3_128:
            raise HandoffError(f"{name} of version {self.version} does not have the content that the manifest says")
        return data


def announced_name(version: int) -> str:
    """Return the name of the file."""
    return f"v{version:06d}.announced.json"


def decode_announcement(data: bytes, version: int) -> Announcement:
    """Read an announcement.

    Raises
    ------
    HandoffError
        It is torn, or of another format.
    WrongManifestError
        Its manifest contradicts itself, or is that of another version.
    """
    try:
        found = decode_versioned(data, Announcement, FORMAT_VERSION)
    except ValueError as error:
        raise HandoffError(f"the announcement of version {version} cannot be read: {error}") from error
    if found.announced.version != version:
        raise WrongManifestError(f"the announcement of version {version} is that of {found.announced.version}")
    if (problem := next(found.announced.problems(), None)) is not None:
        raise WrongManifestError(f"the announcement of version {version} is wrong: {problem}")
    return found

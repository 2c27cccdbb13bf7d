"""Single writer of a run's versions: it claims the store, and builds, publishes and withdraws versions in it.

Every change is a rename out of or into its own hidden directory (`hpcrl.storage.fence`). So an attempt that was
presumed dead and still runs can neither publish nor replace nor withdraw a version.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import FileRecord, atomic_write, fsync_dir, write_json
from hpcrl.storage.quarantine import put_aside
from hpcrl.weights.format.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Handoff,
    Kind,
    Manifest,
    Piece,
    TensorRecord,
    chunk_digests,
)
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.visibility import HIDDEN_PREFIX, missing_names

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
#: further files of a model directory besides weights; copied from the start model where present
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tiktoken.model",
    "tokenization_kimi.py",
)


class ParentGoneError(HandoffError):
    """Raised where a version's parent was collected before it was published; a full version can be published."""


class ShardResult(msgspec.Struct, frozen=True):
    """File of a version that is written and fsynced.

    Attributes
    ----------
    name:
        Name of the file.
    file:
        Its record.
    tensors:
        Tensors in it, by name.
    changes:
        Changes of tensors in it (of a delta).
    """

    name: str
    file: FileRecord
    tensors: dict[str, TensorRecord]
    changes: dict[str, tuple[Piece, ...]] = {}


class PreparedVersion(NamedTuple):
    """Manifest of a version and its small files by name, which its writer has in memory."""

    manifest: Manifest
    small: dict[str, bytes]


@dataclass(frozen=True)
class VersionCommitter:
    """Exclusive right to publish versions. Picklable, so that one rank claims for all.

    A publication: one rank calls `stage`; all ranks write files below its directory, fsync them and keep their records;
    one rank calls `publish` with all records. A publication that fails before `publish` returns does not create a
    version.
    """

    root: Path
    fence: Fence

    @classmethod
    def claim(cls, root: Path, attempt: int) -> VersionCommitter:
        """Become the single writer (`hpcrl.storage.fence.Fence.claim`); FencedError after a newer attempt's claim."""
        return cls(root, Fence.claim(root, attempt))

    @property
    def attempt(self) -> int:
        return self.fence.token

    @property
    def store(self) -> HandoffStore:
        return HandoffStore(self.root)

    def staged(self, version: int) -> Path:
        """Return the directory in which ``version`` is built."""
        return self.fence.path / _name(version)

    def stage(self, version: int) -> Path:
        """Make the empty directory in which ``version`` is built; remove the remains of an earlier failure.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        return self.fence.create(_name(version))

    def discard(self, version: int) -> None:
        """Remove the staged files."""
        self.fence.discard(_name(version))

    def publish(
        self,
        *,
        version: int,
        shards: list[ShardResult],
        model_dir: Path | None,
        producer: str,
        metadata: Mapping[str, bytes] | None = None,
        kind: Kind = "full",
        needs: tuple[int, ...] = (),
        parent_xxh3_128: str | None = None,
        tensors: Mapping[str, TensorRecord] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        before_commit: Callable[[Manifest], None] = lambda manifest: None,
    ) -> Handoff:
        """Complete a staged version and give it its name; called by one rank, after all files are written.

        Parameters
        ----------
        version:
            Policy version.
        shards:
            Written files.
        model_dir:
            Start model, for configuration and tokenizer files; None for an adapter, which has none.
        producer:
            For the manifest.
        metadata:
            Further small files by name; they take the place of the start model's.
        kind, needs, parent_xxh3_128:
            For the manifest.
        tensors:
            For a delta: all tensors of the version, which are in no file of it.
        chunk_bytes:
            Size of the hash chunks of what was written.
        before_commit:
            Called with the manifest, before the version has its name.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        FileExistsError
            The version is there already; it never changes.
        ParentGoneError
            What a delta or an adapter needs is not there any more.
        OSError, HandoffError
            The filesystem refused, or what was written contradicts itself. In all cases the staged files are removed
            and earlier versions are untouched.
        """

        def make() -> PreparedVersion:
            self.fence.check()
            return self.prepare(
                version=version,
                shards=shards,
                model_dir=model_dir,
                producer=producer,
                metadata=metadata,
                kind=kind,
                needs=needs,
                parent_xxh3_128=parent_xxh3_128,
                tensors=tensors,
                chunk_bytes=chunk_bytes,
            )

        return self.commit(version, make, before_commit)

    def prepare(
        self,
        *,
        version: int,
        shards: list[ShardResult],
        model_dir: Path | None,
        producer: str,
        metadata: Mapping[str, bytes] | None = None,
        kind: Kind = "full",
        needs: tuple[int, ...] = (),
        parent_xxh3_128: str | None = None,
        tensors: Mapping[str, TensorRecord] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> PreparedVersion:
        """Return the manifest and the small files of a version; nothing is written. Parameters: see `publish`.

        Raises
        ------
        OSError, HandoffError
            The start model cannot be read, or the manifest would contradict itself.
        """
        files = {shard.name: shard.file for shard in shards}
        stored = {name: record for shard in shards for name, record in shard.tensors.items()}
        small = _small_files(model_dir, metadata or {})
        if kind in ("full", "fp8"):
            small[_INDEX] = _index(stored)
        for name, data in small.items():
            files[name] = FileRecord(bytes=len(data), xxh3_128=chunk_digests(data, chunk_bytes))
        changes: dict[str, tuple[Piece, ...]] = {}
        for shard in shards:
            for name, pieces in shard.changes.items():
                changes[name] = (*changes.get(name, ()), *pieces)
        manifest = Manifest(
            version=version,
            kind=kind,
            parent=needs[-1] if needs else None,
            needs=needs,
            parent_xxh3_128=parent_xxh3_128,
            chunk_bytes=chunk_bytes,
            producer=producer,
            created_at_s=time.time(),
            tensors={**(tensors or {}), **stored},
            changes=changes,
            files=files,
        )
        problem = next(manifest.problems(), None)
        if problem is not None:
            raise HandoffError(f"version {version} was not published, its manifest would be wrong: {problem}")
        return PreparedVersion(manifest, small)

    def commit(
        self,
        version: int,
        make: Callable[[], PreparedVersion],
        before_commit: Callable[[Manifest], None] = lambda manifest: None,
    ) -> Handoff:
        """Give a staged version its small files, its manifest and its name; called by one rank, after all files.

        Parameters
        ----------
        version:
            Policy version.
        make:
            Returns its manifest and small files.
        before_commit:
            Called with the manifest, before the version has its name.

        Raises
        ------
        FencedError, FileExistsError, ParentGoneError, OSError, HandoffError
            See `publish`.
        """
        stage = self.staged(version)
        try:
            manifest, small = make()
            for name, data in small.items():
                atomic_write(stage / name, data)
            write_json(stage / MANIFEST, manifest)
            # a directory of this name without a valid manifest was never a version, and would block the name
            # permanently
            if version in self.store.versions() and not self.store.is_published(version):
                _log.warning("%s was not a version, and is put aside", self.store.path_of(version))
                self.put_aside(version)
            before_commit(manifest)
            self.fence.commit(_name(version), replace=False)
        except BaseException as error:
            self.discard(version)
            if isinstance(error, FileNotFoundError):
                # a newer attempt has removed the directory of this one: report that rather than the missing file
                self.fence.check()
            raise
        # checked after the commit: from now on the collector sees the manifest and keeps the parents
        self._has_parents(version, manifest.needs)
        return Handoff(self.store.path_of(version), manifest)

    def settle(self, version: int) -> Manifest | None:
        """Make a named version durable, where only the steps after its naming failed.

        Return None where the version, or one that it needs, does not exist any more.

        Raises
        ------
        OSError
            The filesystem refuses.
        """
        if version not in self.store.versions():
            return None
        fsync_dir(self.root)
        manifest = self.store.open(version).manifest
        try:
            self._has_parents(version, manifest.needs)
        except ParentGoneError:
            return None
        return manifest

    def _has_parents(self, version: int, needs: tuple[int, ...]) -> None:
        if missing := missing_names([self.store.path_of(needed) for needed in needs]):
            # the collector removed it after the parent was chosen: no reader could reconstruct this version
            self.remove(version)
            raise ParentGoneError(f"version {version} was not published: what it needs is gone: {missing[0]}")

    def remove(self, version: int) -> None:
        """Remove a version: out of sight at once, then deleted, so that no reader opens a half-deleted one.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        self._remove(_name(version))

    def put_aside(self, version: int) -> bool:
        """Quarantine a version (`hpcrl.storage.quarantine`); return whether there was one.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        return put_aside(self.fence, _name(version))

    def withdraw_after(self, version: int) -> list[int]:
        """Quarantine versions above ``version`` (`hpcrl.storage.quarantine`); return the withdrawn ones.

        A resumed trainer calls this before it continues: versions above the restored step belong to steps that are
        repeated. The collector deletes them when the run has published that version again.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        # newest first: the collector deletes a quarantined version once a newer one is published, and must not see that
        # here
        later = [v for v in reversed(self.store.versions()) if v > version]
        withdrawn = sorted(v for v in later if self.put_aside(v))
        for name in os.listdir(self.root):
            # hidden by a collector that died; a running one never hides the newest versions
            number = name.removeprefix(f"{HIDDEN_PREFIX}v")
            if number != name and number.isdecimal() and int(number) > version:
                self._remove(name)
        return withdrawn

    def _remove(self, name: str) -> None:
        if self.fence.hide(name):
            self.fence.delete(name)


def _name(version: int) -> str:
    return f"v{version:06d}"


def _small_files(model_dir: Path | None, metadata: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the small files of a version besides its tensors, by name."""
    small = dict(metadata)
    for name in COMPANION_FILES:
        if name not in small and model_dir is not None and (model_dir / name).is_file():
            small[name] = (model_dir / name).read_bytes()
    return small


def _index(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the Hugging Face index of tensors and their files."""
    index = {
        "metadata": {"total_size": sum(record.bytes for record in tensors.values())},
        "weight_map": {name: record.file for name, record in tensors.items()},
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"

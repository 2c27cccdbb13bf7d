"""The one writer of a run's versions: it claims the store, and builds, publishes and withdraws versions in it.

Everything that it changes goes through a rename out of or into its own hidden directory (`hpcrl.fence`), so an attempt
that is thought dead and is not can publish nothing, replace nothing and withdraw nothing any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.aside import put_aside
from hpcrl.errors import HandoffError
from hpcrl.fence import Fence
from hpcrl.fs import FileRecord, atomic_write, fsync_dir, write_json
from hpcrl.weights.format.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Handoff,
    Kind,
    Manifest,
    Piece,
    TensorRecord,
    hash_chunks,
)
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.visibility import HIDDEN_PREFIX, missing_names

__all__ = ["COMPANION_FILES", "HandoffWriter", "ParentGoneError", "ShardResult"]

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
#: what a model directory needs beside weights; copied from the start model where present
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
    """What a version needs was collected before the version had its name; a full one of the same can be published."""


class ShardResult(msgspec.Struct, frozen=True):
    """A file of a version that is written and fsynced.

    Attributes
    ----------
    name:
        Of the file.
    file:
        Its record.
    tensors:
        Tensors that lie in it, by name.
    changes:
        Changes of tensors that lie in it (of a delta).
    """

    name: str
    file: FileRecord
    tensors: dict[str, TensorRecord]
    changes: dict[str, tuple[Piece, ...]] = {}


@dataclass(frozen=True)
class HandoffWriter:
    """The right to publish versions. Picklable, so that one rank claims for all.

    A publication: one rank calls `stage`; all ranks write files below its directory, fsync them and keep their records;
    one rank calls `publish` with all records. What fails before `publish` returns is no version.
    """

    root: Path
    fence: Fence

    @classmethod
    def claim(cls, root: Path, attempt: int) -> HandoffWriter:
        """Become the one writer; see `hpcrl.fence.Fence.claim` (FencedError where a newer attempt was here)."""
        return cls(root, Fence.claim(root, attempt))

    @property
    def attempt(self) -> int:
        return self.fence.token

    @property
    def store(self) -> HandoffStore:
        return HandoffStore(self.root)

    def staged(self, version: int) -> Path:
        """Where ``version`` is built."""
        return self.fence.path / _name(version)

    def stage(self, version: int) -> Path:
        """Make the empty directory in which ``version`` is built; what a failure of ours had left there goes.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        return self.fence.create(_name(version))

    def discard(self, version: int) -> None:
        """Remove what was staged."""
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
    ) -> Handoff:
        """Complete a staged version and give it its name. Called by one rank, after all files are written.

        Parameters
        ----------
        version:
            Policy version.
        shards:
            What was written.
        model_dir:
            Start model, for configuration and tokenizer files; None for an adapter, which has none.
        producer:
            For the manifest.
        metadata:
            Further small files by name; they take the place of the start model's.
        kind, needs, parent_xxh3_128:
            For the manifest.
        tensors:
            Of a delta: all tensors of the version. They lie in no file of it.
        chunk_bytes:
            Size of the hash chunks of what was written.

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
        stage = self.staged(version)
        try:
            self.fence.check()
            files = {shard.name: shard.file for shard in shards}
            stored = {name: record for shard in shards for name, record in shard.tensors.items()}
            small = _small_files(model_dir, metadata or {})
            if kind in ("full", "fp8"):
                small[_INDEX] = _index(stored)
            for name, data in small.items():
                atomic_write(stage / name, data)
                files[name] = hash_chunks(stage / name, chunk_bytes)
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
            write_json(stage / MANIFEST, manifest)
            if version in self.store.versions() and not self.store.is_published(version):
                _log.warning("%s was no version, and is put aside", self.store.path_of(version))
                self.put_aside(version)
            self.fence.commit(_name(version), replace=False)
        except BaseException as error:
            self.discard(version)
            if isinstance(error, FileNotFoundError):
                self.fence.check()  # the likely reason
            raise
        self._has_parents(version, needs)
        return Handoff(self.store.path_of(version), manifest)

    def settle(self, version: int) -> Manifest | None:
        """Make a version durable that has got its name, where only what came after that failed; None where there is
        none, or what it needs is not there any more.

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
            # the collector took it between the choice of the parent and now: nobody could read what we made
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
        """Take a version out of the store and keep it (`hpcrl.aside`); whether there was one.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        return put_aside(self.fence, _name(version))

    def withdraw_after(self, version: int) -> list[int]:
        """Put versions above ``version`` aside (`hpcrl.aside`); returns what was withdrawn.

        A resumed trainer calls this before it goes on: versions above the restored step belong to a past
        that is being written again. The collector deletes them when the run has published that version again.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        """
        # the newest first: what is put aside must never seem to be passed by a newer one that is still there
        later = [v for v in reversed(self.store.versions()) if v > version]
        withdrawn = sorted(v for v in later if self.put_aside(v))
        for name in os.listdir(self.root):
            # a collector that died had hidden it; one that lives never hides the newest
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
    """What stands beside the tensors, by name."""
    small = dict(metadata)
    for name in COMPANION_FILES:
        if name not in small and model_dir is not None and (model_dir / name).is_file():
            small[name] = (model_dir / name).read_bytes()
    return small


def _index(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Hugging Face's list of which tensor lies in which file."""
    index = {
        "metadata": {"total_size": sum(record.bytes for record in tensors.values())},
        "weight_map": {name: record.file for name, record in tensors.items()},
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"

"""The directory of published policy versions: stage, publish, find, verify, collect.

One trainer publishes and one orchestrator collects; any number of engines read. A version directory is
complete or does not exist, and is a Hugging Face model directory that transformers and vLLM load as it is::

    weights/v000012/
      manifest.json                      format, version, parent, kind, tensors, files, producer, time
      model-00001-of-00002.safetensors   one shard a writer rank
      model.safetensors.index.json
      config.json  tokenizer.json …      copied from the start model
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.fs import FileRecord, NumberedDirectories, StagedDirectory, atomic_write, check_files, hash_file, write_json
from hpcrl.weights.shard import TensorRecord

__all__ = ["FORMAT_VERSION", "Handoff", "HandoffStore", "Manifest", "ShardResult"]

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_INDEX = "model.safetensors.index.json"
#: what a model directory needs beside weights; copied from the start model where present
_COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version directory contains.

    Attributes
    ----------
    format_version:
        Version of this structure.
    version:
        Policy version: optimizer steps done.
    parent:
        Version that a delta refers to; None for a full publication.
    kind:
        ``full`` (all tensors of the model).
    producer:
        Who wrote it, for example ``trainer attempt 2``.
    created_at_s:
        Seconds since the epoch by the producer's clock; for people, never for decisions.
    tensors, files:
        Records by name.
    """

    version: int
    parent: int | None
    kind: str
    producer: str
    created_at_s: float
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest itself excepted."""
        return sum(record.bytes for record in self.files.values())


class ShardResult(msgspec.Struct, frozen=True):
    """What one writer rank contributes to a version."""

    name: str
    file: FileRecord
    tensors: dict[str, TensorRecord]


class Handoff:
    """A published version that was opened: its manifest is read and well formed."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def shards(self) -> list[Path]:
        """Safetensors files in name order."""
        return sorted(self.path / name for name in self.manifest.files if name.endswith(".safetensors"))

    @classmethod
    def open(cls, path: Path) -> Handoff:
        """Read the manifest of a version directory.

        Raises
        ------
        HandoffError
            It is not a complete version of a format this code knows.
        """
        try:
            manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            raise HandoffError(f"{path} is no published version: it has no {_MANIFEST}") from error
        except msgspec.DecodeError as error:
            raise HandoffError(f"{path / _MANIFEST} cannot be read: {error}") from error
        if manifest.format_version != FORMAT_VERSION:
            raise HandoffError(
                f"{path} has hand-off format {manifest.format_version}, this hpcrl reads {FORMAT_VERSION}"
            )
        return cls(path, manifest)

    def verify(self, *, content: bool) -> None:
        """Compare files with the manifest: sizes only, or every byte with ``content``.

        Raises
        ------
        HandoffError
            Naming each file that differs.
        """
        problems = list(check_files(self.path, self.manifest.files, content=content))
        if problems:
            raise HandoffError(f"hand-off {self.path} is damaged: " + "; ".join(problems))


class HandoffStore:
    """All versions of a run, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories = NumberedDirectories(root, "v")

    def path_of(self, version: int) -> Path:
        return self._directories.path_of(version)

    def versions(self) -> list[int]:
        """Published versions, ascending. Sees new ones at once, also through a stale NFS cache."""
        return self._directories.numbers()

    def newest(self) -> int | None:
        """The highest published version; None where there is none."""
        versions = self.versions()
        return versions[-1] if versions else None

    def open(self, version: int) -> Handoff:
        """Open a version (see `Handoff.open`)."""
        return Handoff.open(self.path_of(version))

    def stage(self, version: int, *, token: str) -> StagedDirectory:
        """A staging directory for ``version``; ``token`` names the writer and is equal on all its ranks."""
        return self._directories.stage(version, token=token)

    def publish(
        self,
        stage: StagedDirectory,
        *,
        version: int,
        shards: list[ShardResult],
        model_dir: Path,
        producer: str,
        metadata: Mapping[str, bytes] | None = None,
    ) -> Handoff:
        """Complete a staged version and give it its name. Called by one rank, after all shards are written.

        Parameters
        ----------
        stage:
            From `stage`; holds the shards.
        version:
            Policy version.
        shards:
            What each rank wrote.
        model_dir:
            Start model, for configuration and tokenizer files.
        producer:
            For the manifest.
        metadata:
            Further small files by name; they take the place of the start model's.

        Raises
        ------
        OSError
            The filesystem refused; the staged files are removed and earlier versions are untouched.
        """
        try:
            files = {shard.name: shard.file for shard in shards}
            tensors = {name: record for shard in shards for name, record in shard.tensors.items()}
            index = {
                "metadata": {"total_size": sum(record.bytes for record in tensors.values())},
                "weight_map": {name: record.file for name, record in tensors.items()},
            }
            write_json(stage.path / _INDEX, index)
            small = dict(metadata or {})
            for name in _COMPANION_FILES:
                if name not in small and (model_dir / name).is_file():
                    small[name] = (model_dir / name).read_bytes()
            for name, data in small.items():
                atomic_write(stage.path / name, data)
            for name in (_INDEX, *small):
                files[name] = hash_file(stage.path / name)
            manifest = Manifest(
                version=version,
                parent=None,
                kind="full",
                producer=producer,
                created_at_s=time.time(),
                tensors=tensors,
                files=files,
            )
            write_json(stage.path / _MANIFEST, manifest)
            stage.commit()
        except BaseException:
            stage.discard()
            raise
        return Handoff(self.path_of(version), manifest)

    def remove(self, version: int) -> None:
        """Remove a version: hidden at once, then deleted, so that no reader opens a half-deleted one."""
        self._directories.remove(version)

    def withdraw_after(self, version: int) -> list[int]:
        """Remove versions above ``version`` and unfinished ones; returns what was withdrawn.

        A resumed trainer calls this before it goes on: versions above the restored step belong to a past
        that is being written again.
        """
        withdrawn = [v for v in self.versions() if v > version]
        for v in withdrawn:
            self.remove(v)
        self._directories.sweep()
        return withdrawn

    def collect(self, *, keep_last: int, in_use: set[int]) -> list[int]:
        """Remove all but the newest ``keep_last`` versions and those ``in_use``; returns what was removed."""
        versions = self.versions()
        doomed = [v for v in versions[: max(0, len(versions) - keep_last)] if v not in in_use]
        for v in doomed:
            self.remove(v)
        return doomed

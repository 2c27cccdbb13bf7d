"""Manifest of a published version: its content, locations, and the hashes that verify it (docs/handoff.md).

Content is hashed in chunks that do not depend on how many ranks wrote it: a shard file is its *head* (the
safetensors header) and then its tensors, and each of these is cut into chunks of ``chunk_bytes`` from its own
first byte. So each writer hashes what it writes, a reader verifies any tensor, any part of a file, or just
what it fetched, and equal tensors have equal hashes in all versions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import xxhash

from hpcrl.errors import HandoffError
from hpcrl.storage.files import FileRecord, decode_versioned
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
CHUNK_BYTES = 4 << 20
"""Chunk size in bytes of published versions; a reader takes it from the manifest."""

_DIGEST_HEX = 32  # XXH3-128 in hexadecimal

_MAX_NUMBER = 2**53
"""Maximum size, offset and dimension: larger integers are not exact in JSON of other programs, and files are shorter.
"""
_MAX_VERSION = 2**31 - 1
"""Maximum version: versions of tokens are int32."""
_NUMBERED = re.compile(r"(?:.*[^a-z0-9])?v([0-9]{6,})", re.DOTALL)
"""Name of a version's directory, also while the collector hides it."""

Kind = Literal["full", "fp8", "delta", "lora"]


class TensorRecord(msgspec.Struct, frozen=True):
    """Tensor of a version.

    Attributes
    ----------
    dtype:
        Name by torch, for example ``bfloat16``.
    shape:
        Dimensions.
    file:
        Shard that holds the whole tensor; empty in a delta, whose tensors must be reconstructed.
    offset:
        First byte of the data from the start of the file.
    bytes:
        Length of the data (little-endian, C order).
    xxh3_128:
        XXH3-128 of each ``chunk_bytes`` of the data, hexadecimal, concatenated. A tensor of at most one
        chunk has its plain hash here.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    xxh3_128: str


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Range of a delta file that holds changes of one tensor: ``[file, offset, bytes]`` in JSON."""

    file: str
    offset: int
    bytes: int


class Chunk(NamedTuple):
    """Range of a file, and its XXH3-128 in hexadecimal."""

    offset: int
    bytes: int
    xxh3_128: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a version directory.

    Attributes
    ----------
    format_version:
        Version of this structure.
    version:
        Policy version: optimizer steps done.
    kind:
        ``full``: a Hugging Face model. ``fp8``: the same, block-quantised. ``delta``: changes against ``parent``.
        ``lora``: a PEFT adapter of ``parent``.
    parent:
        Version that a delta changes, or that an adapter was trained on; None otherwise.
    needs:
        All versions that are required to reconstruct this one, oldest first: a whole one, then deltas up to ``parent``.
        Empty for a version that is whole itself.
    parent_xxh3_128:
        For an adapter: `content_digest` of ``parent``, whose number alone does not identify its content.
    chunk_bytes:
        Size of hashed chunks.
    producer:
        Writer of the version, for example ``trainer attempt 2``.
    created_at_s:
        Seconds since the epoch by the producer's clock; for people, never for decisions.
    tensors:
        All tensors of the version, also those that a delta leaves unchanged, by name.
    changes:
        For a delta: location of the changes of each tensor that changed.
    files:
        Size and hash of each file but the manifest. The hash is that of the file's head, in chunks: of the bytes before
        the first tensor, which is the whole of a file without tensors.
    """

    version: int
    kind: Kind
    parent: int | None
    producer: str
    created_at_s: float
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    needs: tuple[int, ...] = ()
    parent_xxh3_128: str | None = None
    changes: dict[str, tuple[Piece, ...]] = {}
    chunk_bytes: int = CHUNK_BYTES
    format_version: int = FORMAT_VERSION

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files, the manifest itself excepted."""
        return sum(record.bytes for record in self.files.values())

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of all tensors, once reconstructed."""
        return sum(record.bytes for record in self.tensors.values())

    def tensors_by_file(self) -> dict[str, list[tuple[str, TensorRecord]]]:
        """Return the tensors of each shard in the order of their bytes, so that a shard can be read sequentially."""
        result: dict[str, list[tuple[str, TensorRecord]]] = {}
        for name, record in self.tensors.items():
            if record.file:
                result.setdefault(record.file, []).append((name, record))
        for records in result.values():
            records.sort(key=lambda item: (item[1].offset, item[1].bytes))
        return result

    def chunks(self) -> dict[str, list[Chunk]]:
        """Return the hashed chunks of each file in order, without gaps."""
        by_file = self.tensors_by_file()
        return {name: list(self._chunks_of(name, by_file.get(name, []))) for name in self.files}

    def _chunks_of(self, name: str, tensors: list[tuple[str, TensorRecord]]) -> Iterator[Chunk]:
        record = self.files[name]
        head = tensors[0][1].offset if tensors else record.bytes
        yield from _cut(0, head, record.xxh3_128, self.chunk_bytes)
        for _, tensor in tensors:
            yield from _cut(tensor.offset, tensor.bytes, tensor.xxh3_128, self.chunk_bytes)

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each contradiction, so that readers may rely on offsets, names and lengths."""
        numbers = list(self._number_problems())
        yield from numbers
        if numbers:
            return
        has_parent = self.kind in ("delta", "lora")
        if has_parent != (self.parent is not None) or self.parent != (self.needs or (None,))[-1]:
            yield f"kind {self.kind}, parent {self.parent} and needs {list(self.needs)} do not fit each other"
        if (self.kind == "lora") != (self.parent_xxh3_128 is not None):
            yield f"kind {self.kind} and parent_xxh3_128 {self.parent_xxh3_128} do not fit each other"
        if any(later <= earlier for earlier, later in pairwise((*self.needs, self.version))):
            yield f"version {self.version} needs {list(self.needs)}: each must be older than the next"
        for name in self.files:
            if name != os.path.basename(name) or name in ("", ".", "..", MANIFEST) or not name.isprintable():
                yield f"{name!r} is not a name of a file of a version"
        ends: dict[str, int] = {}
        for file, tensors in self.tensors_by_file().items():
            if file not in self.files:
                yield f"tensor {tensors[0][0]} lies in {file}, which is not listed"
                continue
            ends[file] = tensors[0][1].offset
            for name, tensor in tensors:
                if tensor.offset != ends[file]:
                    yield f"tensor {name} does not begin where the one before it ends"
                ends[file] = tensor.offset + tensor.bytes
        yield from self._length_problems(ends)

    def _number_problems(self) -> Iterator[str]:
        """Yield one sentence for each number that is not a valid size, offset or version."""
        if not 1 <= self.chunk_bytes <= _MAX_NUMBER:
            yield f"chunk_bytes is {_shown(self.chunk_bytes)}"
        for version in (self.version, *self.needs):
            if not 0 <= version <= _MAX_VERSION:
                yield f"{_shown(version)} is not a version"
        for name, file in self.files.items():
            if not 0 <= file.bytes <= _MAX_NUMBER:
                yield f"{name} cannot have {_shown(file.bytes)} bytes"
        for name, tensor in self.tensors.items():
            if not all(0 <= number <= _MAX_NUMBER for number in (tensor.offset, tensor.bytes, *tensor.shape)):
                yield f"tensor {name} has a size or an offset that is not valid"
            elif tensor.dtype not in SAFETENSORS_DTYPES:
                yield f"tensor {name} has dtype {tensor.dtype!r}, which is not known"
            elif math.prod(tensor.shape) * SAFETENSORS_DTYPES[tensor.dtype][1] != tensor.bytes:
                yield f"tensor {name} has {tensor.bytes} bytes, and not those of {tensor.dtype} {list(tensor.shape)}"
        for name, pieces in self.changes.items():
            if not all(0 <= number <= _MAX_NUMBER for piece in pieces for number in (piece.offset, piece.bytes)):
                yield f"changes of tensor {name} have a size or an offset that is not valid"

    def _length_problems(self, ends: dict[str, int]) -> Iterator[str]:
        by_file = self.tensors_by_file()
        for name, file in self.files.items():
            head = by_file[name][0][1].offset if name in by_file else file.bytes
            if ends.get(name, file.bytes) != file.bytes:
                yield f"the tensors of {name} do not end with it"
            if len(file.xxh3_128) != _digest_length(head, self.chunk_bytes):
                yield f"the hash of {name} has the wrong length"
        for name, tensor in self.tensors.items():
            if len(tensor.xxh3_128) != _digest_length(tensor.bytes, self.chunk_bytes):
                yield f"the hash of tensor {name} has the wrong length"
            if not tensor.file and self.kind != "delta":
                yield f"tensor {name} lies in no file"
        for name, pieces in self.changes.items():
            if name not in self.tensors:
                yield f"changed tensor {name} is not listed"
            for piece in pieces:
                if piece.file not in self.files or piece.offset + piece.bytes > self.files[piece.file].bytes:
                    yield f"changes of tensor {name} lie outside of {piece.file}"


class WrongManifestError(HandoffError):
    """Raised where a manifest contradicts itself or its place: the version is permanently unusable."""


class OpenedVersion:
    """Version whose manifest is read and well formed, durable or not; ``path`` is its place in the store."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @property
    def version(self) -> int:
        return self.manifest.version


class Handoff(OpenedVersion):
    """Published version that was opened: all of its files are durable in ``path``."""

    @property
    def shards(self) -> list[Path]:
        """Return the safetensors files in name order."""
        return sorted(self.path / name for name in self.manifest.files if name.endswith(".safetensors"))

    @classmethod
    def open(cls, path: Path) -> Handoff:
        """Read the manifest of a version directory.

        Raises
        ------
        HandoffError
            It is not a complete version of a format this code knows.
        WrongManifestError
            It contradicts itself, or belongs to another version than its directory, which is then a copy.
        """
        try:
            text = (path / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise HandoffError(f"{path} is not a published version: it has no {MANIFEST}") from error
        except OSError as error:
            raise HandoffError(f"{path / MANIFEST} cannot be read: {error}") from error
        return cls.decoded(path, text)

    @classmethod
    def decoded(cls, path: Path, text: bytes) -> Handoff:
        """Return the version in ``path`` whose manifest was read already; errors as for `open`."""
        manifest = decode_manifest(text, str(path))
        named = _NUMBERED.fullmatch(path.name)
        if named is not None and int(named[1]) != manifest.version:
            raise WrongManifestError(
                f"{path}: {MANIFEST} is that of version {manifest.version}\n"
                "    hint: a copy of a version under another number is not a version; remove it"
            )
        return cls(path, manifest)

    def verify(self, *, content: bool) -> None:
        """Compare files with the manifest: sizes only, or every byte with ``content``.

        Raises
        ------
        HandoffError
            Naming each file that differs.
        """
        chunks = self.manifest.chunks()
        problems = [
            problem
            for name, record in self.manifest.files.items()
            if (problem := _file_problem(self.path / name, record.bytes, chunks[name] if content else []))
        ]
        if problems:
            raise HandoffError(f"hand-off {self.path} is damaged: " + "; ".join(problems))


def decode_manifest(text: bytes, where: str) -> Manifest:
    """Read and check the JSON of a manifest; ``where`` names it in errors.

    Raises
    ------
    HandoffError
        It is torn, or of another format.
    WrongManifestError
        It contradicts itself.
    """
    try:
        manifest = decode_versioned(text, Manifest, FORMAT_VERSION)
    except ValueError as error:
        raise HandoffError(f"{where}: {MANIFEST} cannot be read: {error}") from error
    problem = next(manifest.problems(), None)
    if problem is not None:
        raise WrongManifestError(f"{where}: {MANIFEST} is wrong: {problem}")
    return manifest


def _shown(number: int) -> str:
    """Return a number of any length for a message."""
    return str(number) if abs(number) < 10**18 else "a number of more than 18 digits"


def chunk_digests(data: memoryview | bytes | bytearray, chunk_bytes: int) -> str:
    """Return the digests of each ``chunk_bytes`` of ``data``, as in a manifest; empty without data."""
    view = memoryview(data)
    return "".join(
        xxhash.xxh3_128_hexdigest(view[start : start + chunk_bytes]) for start in range(0, view.nbytes, chunk_bytes)
    )


def content_digest(manifest: Manifest) -> str:
    """Return the XXH3-128 of a version's content: a line ``name dtype 2x3 hash`` per tensor, ordered by name."""
    lines = (
        f"{name} {record.dtype} {'x'.join(map(str, record.shape))} {record.xxh3_128}\n"
        for name, record in sorted(manifest.tensors.items())
    )
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _digest_length(size: int, chunk_bytes: int) -> int:
    return -(-size // chunk_bytes) * _DIGEST_HEX


def _cut(offset: int, size: int, digests: str, chunk_bytes: int) -> Iterator[Chunk]:
    for i, start in enumerate(range(0, size, chunk_bytes)):
        digest = digests[i * _DIGEST_HEX : (i + 1) * _DIGEST_HEX]
        yield Chunk(offset + start, min(chunk_bytes, size - start), digest)


def _file_problem(path: Path, size: int, chunks: list[Chunk]) -> str | None:
    """Return the problem of a file, in one sentence that begins with its name; None where there is none."""
    try:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno()).st_size
            if found != size:
                return f"{path.name} has {found} bytes, the manifest says {size}"
            for chunk in chunks:
                if xxhash.xxh3_128_hexdigest(stream.read(chunk.bytes)) != chunk.xxh3_128:
                    return f"{path.name} does not have the content that the manifest says (at byte {chunk.offset})"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except ValueError as error:  # a name that no file can have
        return f"{path.name!r} cannot be read: {error}"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    return None

"""Assemble the tensors of a version of any kind from its bytes; deltas are applied and verified (numpy)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from hpcrl.errors import HandoffError
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.manifest import OpenedVersion, TensorRecord, chunk_digests

Read = Callable[[int, str, int, int], memoryview]
"""(version, file, offset, bytes) → these bytes, verified."""


class StoredTensor(NamedTuple):
    """Tensor of a version.

    Attributes
    ----------
    name, record:
        Name and record of the manifest.
    data:
        Its bytes, little-endian and in C order.
    """

    name: str
    record: TensorRecord
    data: memoryview


class ServedVersion(NamedTuple):
    """Version that the reader has in memory: deltas that follow it need no other data from the shared filesystem.

    Attributes
    ----------
    version:
        Its number.
    copy:
        Returns a new copy of a tensor's bytes; None where it does not have them in the dtype of the record.
    """

    version: int
    copy: Callable[[str, TensorRecord], bytearray | None]


def assemble(
    chain: Sequence[OpenedVersion],
    read: Read,
    served: ServedVersion | None = None,
    *,
    check_all: bool = False,
    only: Collection[str] | None = None,
) -> Iterator[StoredTensor]:
    """Yield all tensors of the last version of ``chain``, one at a time, in the order that is fastest to read.

    Parameters
    ----------
    chain:
        A whole version and the deltas that lead to the wanted one, oldest first. An adapter is the only element: the
        tensors that it changes are not reconstructed here.
    read:
        Reads verified bytes of these versions.
    served:
        Version that the reader has in memory.
    check_all:
        Compare also tensors that no delta changes with their hashes, because ``read`` does not verify.
    only:
        Names of tensors to read. None: all.

    Raises
    ------
    HandoffError
        Raised by ``read``; or the versions do not fit each other, or a delta does not give the tensor whose hash the
        manifest has.
    """
    whole, *deltas = chain
    final = chain[-1]
    for i, handoff in enumerate(chain):
        needs = () if handoff.manifest.kind == "lora" else handoff.manifest.needs
        if needs != tuple(earlier.version for earlier in chain[:i]):
            raise HandoffError(f"{final.path} and {handoff.path} are of different histories: their needs differ")
    if whole.manifest.tensors.keys() != final.manifest.tensors.keys():
        raise HandoffError(f"{final.path} and {whole.path} differ in their tensors")
    for handoff in deltas:
        for name, record in handoff.manifest.tensors.items():
            first = whole.manifest.tensors.get(name)
            if first is None or (first.dtype, first.shape) != (record.dtype, record.shape):
                raise HandoffError(f"{handoff.path} and {whole.path} differ in dtype or shape of tensor {name}")
    versions = [handoff.version for handoff in chain]
    known = versions.index(served.version) if deltas and served is not None and served.version in versions else None
    for file, records in whole.manifest.tensors_by_file().items():
        for name, record in records:
            if only is not None and name not in only:
                continue
            data = served.copy(name, record) if served is not None and known is not None else None
            todo = deltas if data is None or known is None else deltas[known:]
            view = read(whole.version, file, record.offset, record.bytes) if data is None else memoryview(data)
            if data is not None or any(name in delta.manifest.changes for delta in todo):
                # the bytes may be shared with other readers: change a copy
                view = view if data is not None else memoryview(bytearray(view))
                for delta in todo:
                    _apply(delta, name, view, read)
                _check(final, name, view)
            elif check_all or final.manifest.tensors[name].xxh3_128 != record.xxh3_128:
                # no delta changes it, so its content must be that of the whole version
                _check(final, name, view)
            yield StoredTensor(name, final.manifest.tensors[name], view)


def _apply(delta: OpenedVersion, name: str, data: memoryview, read: Read) -> None:
    """Bring a tensor from the version before ``delta`` to that of ``delta``, in place."""
    pieces = delta.manifest.changes.get(name, ())
    if not pieces:
        return
    from hpcrl.weights.format.delta import apply_chunk, iter_records  # noqa: PLC0415 - numpy, only where there are deltas

    record, step = delta.manifest.tensors[name], delta.manifest.chunk_bytes
    if record.bytes != data.nbytes:
        raise HandoffError(f"{delta.path}: tensor {name} has another size than in the version before")
    width = SAFETENSORS_DTYPES[record.dtype][1]
    for piece in pieces:
        try:
            for number, change in iter_records(read(delta.version, piece.file, piece.offset, piece.bytes), width):
                apply_chunk(change, data[number * step : (number + 1) * step], width)
        except HandoffError as error:
            raise HandoffError(f"{delta.path / piece.file}: {error}") from error


def _check(handoff: OpenedVersion, name: str, data: memoryview) -> None:
    if chunk_digests(data, handoff.manifest.chunk_bytes) != handoff.manifest.tensors[name].xxh3_128:
        raise HandoffError(f"{handoff.path}: tensor {name} does not have the content that the manifest says")

"""Checks that an engine runs the weights of a version: samples of the version are read again and compared with them.

A label is only what an engine believes. The proof does not rely on it: it takes the version that the caller
names, reads some of its tensors from the share once more (over the fabric while it is not durable), verified against
the hashes of the manifest, does with them what loading does (deltas are applied, quantised tensors brought back,
adapters merged), and compares the result bit by bit with what the engine computes with now. The samples are those that
tell the version from the one before, where some do. Reading is done by a thread, so that the engine generates
meanwhile; a few MiB are read, whatever the model's size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from hpcrl.errors import HandoffError
from hpcrl.inference.adapters import Adapter, as_tensor
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.network.auth import Gate
from hpcrl.weights import Handoff, HandoffStore, TensorRecord
from hpcrl.weights.format.manifest import content_digest
from hpcrl.weights.format.quantise import FP8_DTYPE, scale_tensor
from hpcrl.weights.proof import WeightsProof
from hpcrl.weights.read.adapters import plan_merge
from hpcrl.weights.read.subscriber import ReaderSettings, Reading, Subscriber

_log = logging.getLogger(__name__)

_SAMPLES = 3
_SAMPLE_BYTES = 8 << 20
"""Maximum bytes of one sample: larger tensors are compared in part, or left out where they cannot be read in part."""
_SEGMENT_BYTES = 4 << 20
"""Bytes that are read at a time, and so the minimum cost of one sample."""


class TensorSample(NamedTuple):
    """Published sample that an engine must have: rows of a tensor from ``first_row`` on.

    Attributes
    ----------
    shape:
        Shape of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    tensor: Tensor


class _Samples(NamedTuple):
    """Samples that were read for a proof.

    Attributes
    ----------
    decisive:
        Whether the version that was served before has other bytes there.
    """

    samples: list[TensorSample]
    decisive: bool


class Proofs:
    """Proofs of one engine, or of one of its workers; the one that was asked for last is under way."""

    def __init__(
        self, can_compare: Callable[[str, TensorRecord], bool], root: Path | None, gate: Gate | None = None
    ) -> None:
        """Prepare; nothing is read.

        Parameters
        ----------
        can_compare:
            Whether the engine can give the tensor of that name as it was published.
        root:
            Directory in which versions must lie; None for anywhere.
        gate:
            Has the run's token, by which a version that is not durable is read over the fabric.
        """
        self._can_compare, self._root, self._gate = can_compare, root, gate
        self._reading: _SampleReading | None = None

    def prove(
        self, path: Path, before: Path | None, number: int, compare: Callable[[TensorSample], bool | None]
    ) -> WeightsProof:
        """Begin to read, report that reading is still in progress, or compare.

        Parameters
        ----------
        path:
            The version that should run.
        before:
            The version that ran before; None where that is not known.
        number:
            Number of the proof: others compare other tensors.
        compare:
            Returns whether the engine has a sample; None if it cannot tell. Called once all of them were read.
        """
        reading = self._reading
        if reading is None or reading.key != (path, before, number):
            if reading is not None:
                reading.unwanted.set()
            reading = _SampleReading(path, before, number, self._can_compare, self._root, gate=self._gate)
            self._reading = reading
        if not reading.done.is_set():
            return WeightsProof(state="reading")
        self._reading = None
        if reading.samples is None:
            return WeightsProof(state="unknown", why=reading.problem)
        found = [(sample.name, compare(sample)) for sample in reading.samples.samples]
        compared = [name for name, equal in found if equal is not None]
        if not compared:
            return WeightsProof(state="unknown", why="this engine holds no tensor of the version in its published form")
        wrong = [name for name, equal in found if equal is False]
        return WeightsProof(state="compared", compared=compared, wrong=wrong, decisive=reading.samples.decisive)


class _SampleReading:
    """A thread that reads samples. It is a daemon: a share that hangs must not keep the engine from ending."""

    def __init__(
        self,
        path: Path,
        before: Path | None,
        number: int,
        can_compare: Callable[[str, TensorRecord], bool],
        root: Path | None,
        *,
        gate: Gate | None,
    ) -> None:
        self.key = path, before, number
        self._gate = gate
        self.samples: _Samples | None = None
        self.problem = ""
        self.done, self.unwanted = threading.Event(), threading.Event()
        self._can_compare, self._root = can_compare, root
        threading.Thread(target=self._read, name=f"prove-{path.name}", daemon=True).start()

    def _read(self) -> None:
        path, before, number = self.key
        # not registered, and without the node's cache: other versions are on their way through that
        # from the share: few bytes, and another way than the one that the engine's weights may have come by; a version
        # that is not durable has only that one way
        settings = ReaderSettings(streams=1, segment_bytes=_SEGMENT_BYTES, fabric=False)
        try:
            path = path.resolve()
            if self._root is not None and path.parent != self._root:
                raise ValueError(f"{path} is outside of {self._root}")
            version = HandoffStore(path.parent).version_of(path)
            reader = Subscriber(path.parent, None, settings, gate=self._gate)
            with reader as subscriber, subscriber.reading(version) as reading:
                different = _different(reading, None if before is None else _opened(before))
                chosen = _choose(reading, different, number, self._can_compare)
                decisive = different is None or not different or any(name in different for name in chosen)
                samples = []
                for sample in _read_samples(reading, chosen, number):
                    if self.unwanted.is_set():
                        return
                    samples.append(sample)
                self.samples = _Samples(samples, decisive)
        except Exception as error:  # noqa: BLE001 - the version may be damaged or gone: the proof reports that
            _log.warning("%s cannot be compared with what runs: %s", path.name, error)
            self.problem = str(error) or type(error).__name__
        finally:
            self.done.set()


def _opened(path: Path) -> Handoff | None:
    """Open the version that was served before; None where it was removed meanwhile."""
    try:
        return Handoff.open(path)
    except HandoffError:
        return None


def _records(reading: Reading) -> Mapping[str, TensorRecord]:
    """Return the tensors of a whole model; for an adapter, those of its base."""
    handoff = reading.chain[-2] if reading.handoff.manifest.kind == "lora" else reading.handoff
    return handoff.manifest.tensors


def _different(reading: Reading, before: Handoff | None) -> frozenset[str] | None:
    """Return the tensors that differ between a version and the one before it; None if that is unknown."""
    if before is None:
        return None
    own, base = reading.handoff, reading.chain[-2] if len(reading.chain) > 1 else None
    kinds = (own.manifest.kind, before.manifest.kind)
    if "lora" not in kinds:
        return _other_content(own.manifest.tensors, before.manifest.tensors)
    if kinds[0] == "lora" and base is not None:
        changed = frozenset(plan_merge(own, base).parts)
        if kinds[1] != "lora":
            same_base = content_digest(before.manifest) == own.manifest.parent_xxh3_128
            return changed if same_base else None
        if before.manifest.parent_xxh3_128 == own.manifest.parent_xxh3_128:
            if not _other_content(own.manifest.tensors, before.manifest.tensors):
                return frozenset()
            return changed | frozenset(plan_merge(before, base).parts)
    return None


def _other_content(own: Mapping[str, TensorRecord], before: Mapping[str, TensorRecord]) -> frozenset[str]:
    def content(record: TensorRecord | None) -> tuple[object, ...]:
        return () if record is None else (record.dtype, record.shape, record.xxh3_128)

    return frozenset(name for name, record in own.items() if content(record) != content(before.get(name)))


def _choose(
    reading: Reading,
    different: Collection[str] | None,
    number: int,
    can_compare: Callable[[str, TensorRecord], bool],
) -> list[str]:
    """Choose tensors to compare: those that differ from the version before, and others in each proof.

    Raises
    ------
    HandoffError
        The engine can compare none.
    """
    records = _records(reading)
    possible = [
        name
        for name, record in records.items()
        if not _is_scale(name, records)
        and (record.bytes <= _SAMPLE_BYTES or _in_parts(reading, record))
        and record.bytes
        and can_compare(name, record)
    ]
    if not possible:
        raise HandoffError(f"{reading.handoff.path}: this engine holds no tensor of the version in its published form")

    def order(name: str) -> tuple[bool, int]:
        draw = xxhash.xxh3_64_intdigest(f"{reading.handoff.version}:{number}:{name}".encode())
        return different is not None and name not in different, draw

    return sorted(possible, key=order)[:_SAMPLES]


def _is_scale(name: str, records: Mapping[str, TensorRecord]) -> bool:
    weight = records.get(name.removesuffix("_scale_inv"))
    return name.endswith("_scale_inv") and weight is not None and weight.dtype == FP8_DTYPE


def _in_parts(reading: Reading, record: TensorRecord) -> bool:
    """Return whether rows of a tensor can be read separately: it is in a file of this version, unchanged."""
    kind = reading.handoff.manifest.kind
    return kind in ("full", "fp8") and record.dtype != FP8_DTYPE and len(record.shape) > 1


def _read_samples(reading: Reading, chosen: Sequence[str], number: int) -> Iterator[TensorSample]:
    """Yield samples of published tensors as loading converts them (HandoffError if they cannot be read)."""
    records = _records(reading)
    whole = [name for name in chosen if records[name].bytes <= _SAMPLE_BYTES]
    for name in chosen:
        if name not in whole:
            yield _rows_of(reading, name, records[name], number)
    if not whole:
        return
    if reading.handoff.manifest.kind == "lora":
        adapter = Adapter(reading.chain, reading.tensors())
        stored = reading.base_tensors(frozenset(whole))
        yield from (
            TensorSample(name, tuple(tensor.shape), 0, tensor.clone()) for name, tensor in adapter.merged(stored)
        )
        return
    scales = {name: scale_tensor(name, records[name].shape).name for name in whole if records[name].dtype == FP8_DTYPE}
    wanted = frozenset(whole) | frozenset(scales.values())
    found = {stored.name: as_tensor(stored).clone() for stored in reading.tensors(only=wanted)}
    for name in whole:
        tensor = found[name]
        whole_tensor = dequantise(tensor, found[scales[name]]) if name in scales else tensor
        yield TensorSample(name, tuple(records[name].shape), 0, whole_tensor)


def _rows_of(reading: Reading, name: str, record: TensorRecord, number: int) -> TensorSample:
    """Return some rows of a large tensor; each proof reads others."""
    row_bytes = record.bytes // record.shape[0]
    rows = max(1, min(record.shape[0], _SEGMENT_BYTES // row_bytes))
    draw = xxhash.xxh3_64_intdigest(f"{reading.handoff.version}:{number}:{name}:rows".encode())
    first = draw % (record.shape[0] - rows + 1)
    data = reading.read(reading.handoff.version, record.file, record.offset + first * row_bytes, rows * row_bytes)
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, record.dtype))
    return TensorSample(name, tuple(record.shape), first, tensor.view(rows, *record.shape[1:]))


def rows_of(sample: TensorSample, running: Tensor) -> Tensor:
    """Return those rows of a whole tensor that a sample has."""
    return running[sample.first_row : sample.first_row + len(sample.tensor)] if running.dim() else running


def same_bits(published: Tensor, running: Tensor) -> bool:
    """Return whether what runs has the bits that loading ``published`` gives."""
    expected = published.to(running.dtype)
    return running.shape == expected.shape and torch.equal(_bits(running), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host; NaNs then compare equal if their bits are."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)

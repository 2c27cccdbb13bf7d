"""Work of all ranks on a staged version once its bytes are in memory: allocate, write or compare, complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.config.recipe import HandoffConfig
from hpcrl.errors import HandoffError
from hpcrl.models.arch import read_model_config
from hpcrl.models.written import written_config
from hpcrl.storage.disk_space import ShortageError, find_shortage
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.fabric_serving import AnnouncedContent, FabricServing, ServedPart
from hpcrl.trainer.publish.plan import Window
from hpcrl.weights.format.layout import PublishedTensor, ShardLayout
from hpcrl.weights.format.manifest import Kind, TensorRecord, content_digest
from hpcrl.weights.format.quantise import quantization_config
from hpcrl.weights.write.handoff_writer import (
    COMPANION_FILES,
    ParentGoneError,
    PreparedVersion,
    ShardResult,
    VersionCommitter,
)
from hpcrl.weights.write.own_units import (
    Delta,
    Digests,
    delta_result,
    delta_tensors,
    encode_delta,
    full_results,
    hash_units,
    hashes_by_offset,
    write_units,
)
from hpcrl.weights.write.writer import FileWriter, preallocate

_SMALL_FILES = len(COMPANION_FILES) + 3
"""Files in addition to shards: configuration, tokenizer, index, manifest, and the directory."""


@dataclass
class Image:
    """Bytes of a version in this rank's units.

    Attributes
    ----------
    version:
        Policy version.
    needs:
        Versions that it is made from, if it was published as a delta.
    data:
        ``[bytes]`` of host memory.
    """

    version: int
    needs: tuple[int, ...]
    data: Tensor

    @property
    def view(self) -> memoryview:
        return self.data.numpy().data


@dataclass(frozen=True)
class AdapterForm:
    """Additional content of a version of kind ``lora``.

    Attributes
    ----------
    base:
        Number of the version that engines merge the adapters into; it is in the store.
    files:
        Contents of small files by name.
    """

    base: int
    files: Mapping[str, bytes]


class VersionWriter:
    """Writes versions with one layout. All ranks call every method together; nothing here is kept between versions.

    Where one rank fails, all raise: it its own error, an `OSError`, `HandoffError` (`ShortageError` is one) or
    `FencedError`, the others `PeerLostError`. What was staged is left for who called to remove.
    """

    def __init__(
        self,
        output: VersionCommitter,
        ranks: Ranks,
        *,
        windows: Sequence[Window],
        tensors: Sequence[PublishedTensor],
        model_dir: Path,
        dtype: torch.dtype,
        settings: HandoffConfig,
        chunk_bytes: int,
        fabric: FabricServing | None = None,
    ) -> None:
        """Prepare; nothing is written.

        Parameters
        ----------
        output:
            Store of the versions.
        ranks:
            Publishing ranks.
        windows:
            Windows with this rank's shares.
        tensors:
            All that is published.
        model_dir, dtype, settings, chunk_bytes:
            See `hpcrl.trainer.publish.publisher.Publisher`.
        fabric:
            Serves versions that are written from one image.
        """
        self._fabric = fabric
        self._output, self._ranks, self._windows, self._tensors = output, ranks, windows, tensors
        self._model_dir, self._dtype = model_dir, dtype
        self._settings, self._chunk_bytes = settings, chunk_bytes
        self._layouts: list[ShardLayout] = [shard for window in windows for shard in window.shards]
        self.adapter: AdapterForm | None = None
        """Adapter content of the next version; None if it is a version of the model itself."""

    def check_space(self) -> None:
        """Check that a full version fits on disk; only one rank calls this.

        Raises
        ------
        ShortageError
            It does not fit.
        """
        self._check_space(sum(shard.bytes for shard in self._layouts), len(self._layouts))

    def _check_space(self, size: int, files: int) -> None:
        small = sum(p.stat().st_size for name in COMPANION_FILES if (p := self._model_dir / name).is_file())
        # manifest and index: records with names and digests
        digests = sum(tensor.bytes // self._chunk_bytes + 1 for tensor in self._tensors)
        records = sum(len(tensor.name) * 2 + 400 for tensor in self._tensors)
        needed = size + small + 40 * digests + records + (64 << 10)
        shortage = find_shortage(self._output.root, size=needed, files=files + _SMALL_FILES)
        if shortage is not None:
            raise ShortageError(
                f"a version needs {shortage}\n"
                "    hint: free space there, keep fewer versions (handoff.keep_last), or point the run "
                "to a larger filesystem"
            )

    def write_windows(self, image: Image, fill: Callable[[Window, Tensor], None]) -> None:
        """Stage and write a few files at a time, in memory that is used again.

        Parameters
        ----------
        image:
            Image of the version; its ``data`` has room for the largest window.
        fill:
            Puts this rank's units of a window into the memory that it is given, ``[bytes]`` uint8.
        """
        ranks, what = self._ranks, f"writing version {image.version}"
        self._allocate(image.version)
        results: list[ShardResult] = []
        with FileWriter(self._output.staged(image.version), direct=self._settings.direct_io) as writer:
            for window in self._windows:
                fill(window, image.data)
                write = partial(write_units, writer, window.units, image.view, self._turn(window))
                reports = ranks.all_succeed(write, what)
                results += full_results(window.shards, reports, self._chunk_bytes)
            ranks.all_succeed(writer.sync, what)
        self._complete(image, results)

    def announce(self, image: Image) -> AnnouncedContent | None:
        """Serve a version from one image and announce it, before anything is written; None where it is not served.

        Raises
        ------
        FencedError
            A newer attempt has claimed the store.
        FileExistsError
            The store has the version already.
        """
        (window,), fabric, ranks = self._windows, self._fabric, self._ranks
        if fabric is None:
            return None
        what = f"announcing version {image.version}"
        digests = ranks.all_succeed(lambda: hash_units(window.units, image.view), what)
        self._serve(image.version, self._parts(image))
        prepared: PreparedVersion | None = None

        def announce() -> bool:
            nonlocal prepared
            self._output.fence.check()
            if image.version in self._output.store.versions():
                raise FileExistsError(f"{self._output.store.path_of(image.version)} exists already")
            results = full_results(window.shards, digests, self._chunk_bytes)
            prepared = self._prepared(image.version, results, kind=self._own_kind)
            return fabric.announce_early(*prepared)

        return AnnouncedContent(digests, prepared) if ranks.on_leader(announce, what) else None

    def write_full(self, image: Image, announced: AnnouncedContent | None = None) -> None:
        """Write a whole version from one image, which may be announced.

        Raises
        ------
        HandoffError
            What is written differs from what was announced.
        """
        (window,) = self._windows
        self._allocate(image.version)

        def write() -> Digests:
            with FileWriter(self._output.staged(image.version), direct=self._settings.direct_io) as writer:
                digests = write_units(writer, window.units, image.view, self._turn(window))
                writer.sync()
                return digests

        reports = self._ranks.all_succeed(write, f"writing version {image.version}")
        if announced is None:
            if self._fabric is not None:
                self._serve(image.version, self._parts(image))
            self._complete(image, full_results(window.shards, reports, self._chunk_bytes))
            return

        def commit() -> None:
            assert announced.prepared is not None
            if hashes_by_offset(reports) != hashes_by_offset(announced.digests):
                raise HandoffError(f"version {image.version} was announced with other bytes than were written")
            prepared = announced.prepared
            self._output.commit(image.version, lambda: prepared)

        self._ranks.on_leader(commit, f"completing version {image.version}")

    def _parts(self, image: Image) -> list[ServedPart]:
        """Return what this rank serves of a full version."""
        (window,) = self._windows
        view = image.view
        units = [ServedPart(unit.file, unit.offset, view[unit.at : unit.at + unit.bytes]) for unit in window.units]
        return [*self._heads(), *units]

    def _heads(self) -> list[ServedPart]:
        """Return the heads of those files that this rank allocates."""
        own = self._layouts[self._ranks.rank :: self._ranks.size]
        return [ServedPart(shard.file, 0, memoryview(shard.head)) for shard in own]

    def _serve(self, version: int, parts: Sequence[ServedPart]) -> None:
        """Copy what was hashed into the memory that the fabric serves."""
        assert self._fabric is not None
        (window,) = self._windows
        capacity = window.image_bytes + sum(head.data.nbytes for head in self._heads())
        self._fabric.fill(version, parts, capacity=capacity)

    def _turn(self, window: Window) -> int:
        return self._ranks.rank * len(window.units) // self._ranks.size

    def _allocate(self, version: int) -> None:
        """Ask for the space of all files: a full disk is known before data is written."""
        ranks = self._ranks

        def allocate() -> None:
            for shard in self._layouts[ranks.rank :: ranks.size]:
                preallocate(self._output.staged(version) / shard.file, shard.bytes, shard.head)

        ranks.all_succeed(allocate, "allocating space")

    def write_delta(self, image: Image, base: Image) -> str:
        """Write the changes since ``base``; why not, where a full version is better or the only way. Empty: written."""
        ranks, (window,) = self._ranks, self._windows
        share = self._settings.delta_max_share
        delta: Delta | None = None

        def encode() -> int | None:
            nonlocal delta
            limit = int(share * window.image_bytes)
            delta = encode_delta(window.units, base.view, image.view, limit=limit)
            return None if delta is None else delta.bytes

        sizes = ranks.all_succeed(encode, f"comparing version {image.version} with {base.version}")
        if any(size is None for size in sizes):
            return (
                f"a larger share changed since version {base.version} than handoff.delta_max_share ({share:g}) allows"
            )
        size = sum(size or 0 for size in sizes)
        ranks.on_leader(lambda: self._check_space(size, ranks.size), f"preparing version {image.version}")

        def write() -> tuple[ShardResult, Digests]:
            assert delta is not None
            name = f"delta-{ranks.rank + 1:05d}-of-{ranks.size:05d}.bin"
            directory = self._output.staged(image.version)
            return delta_result(directory, name, delta, self._chunk_bytes), delta.digests

        reports = ranks.all_succeed(write, f"writing version {image.version}")
        results, digests = [result for result, _ in reports], [digests for _, digests in reports]
        if self._fabric is not None:
            assert delta is not None
            self._serve(image.version, _delta_parts(results[ranks.rank].name, delta))
        needs = (*base.needs, base.version)

        def complete() -> str:
            tensors = delta_tensors(self._layouts, digests, self._chunk_bytes)
            try:
                self._publish(image.version, results, kind="delta", needs=needs, tensors=tensors)
            except ParentGoneError as error:
                return str(error)
            return ""

        reason = ranks.on_leader(complete, f"completing version {image.version}")
        if not reason:
            image.needs = needs
        return reason

    def _complete(self, image: Image, results: list[ShardResult]) -> None:
        """Give a full version its name; rank 0 does it, all know how it went."""
        publish = partial(self._publish, image.version, results, kind=self._own_kind)
        self._ranks.on_leader(publish, f"completing version {image.version}")

    @property
    def _own_kind(self) -> Kind:
        return self._settings.kind if self.adapter is None else "lora"

    def _publish(
        self,
        version: int,
        results: list[ShardResult],
        *,
        kind: Kind,
        needs: tuple[int, ...] = (),
        tensors: Mapping[str, TensorRecord] | None = None,
    ) -> None:
        def make() -> PreparedVersion:
            self._output.fence.check()
            return self._prepared(version, results, kind=kind, needs=needs, tensors=tensors)

        announce = (lambda manifest: None) if self._fabric is None else self._fabric.announce
        self._output.commit(version, make, announce)

    def _prepared(
        self,
        version: int,
        results: list[ShardResult],
        *,
        kind: Kind,
        needs: tuple[int, ...] = (),
        tensors: Mapping[str, TensorRecord] | None = None,
    ) -> PreparedVersion:
        prepare = partial(
            self._output.prepare,
            version=version,
            shards=results,
            producer=f"trainer attempt {self._output.attempt}",
            kind=kind,
            tensors=tensors,
            chunk_bytes=self._chunk_bytes,
        )
        if self.adapter is None:
            return prepare(model_dir=self._model_dir, metadata={"config.json": self._config()}, needs=needs)
        base = self._output.store.open(self.adapter.base).manifest
        return prepare(
            model_dir=None,
            metadata=self.adapter.files,
            needs=(*base.needs, base.version),
            parent_xxh3_128=content_digest(base),
        )

    def _config(self) -> bytes:
        config = written_config(
            read_model_config(self._model_dir),
            (tensor.name for tensor in self._tensors),
            dtype=str(self._dtype).removeprefix("torch."),
            quantisation=quantization_config(self._tensors) if self._settings.kind == "fp8" else None,
        )
        return json.dumps(config, indent=2).encode() + b"\n"


def _delta_parts(file: str, delta: Delta) -> list[ServedPart]:
    """Return the content of this rank's file of a delta."""
    parts, position = [], 0
    for _, record in delta.records:
        parts.append(ServedPart(file, position, memoryview(record)))
        position += len(record)
    return parts

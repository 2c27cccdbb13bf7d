"""Publishes the trainer's weights as a policy version: all ranks write in parallel, while training continues.

`Publisher.publish` copies this rank's share into host memory and returns; a thread writes it, and the version is
announced when it has its name. Where ranks serve it over the fabric, it is announced before it is written. Memory of
a rank besides the model: its share of the published bytes (its *image*), once with ``overlap``; twice with deltas,
which compare with the image of an earlier version; without both, ``staging_gib``, but at least its share of one shard
file. Encoded changes come on top, at most ``delta_max_share`` of the image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrl.config.recipe import HandoffConfig
from hpcrl.errors import DeadlineError, HandoffError
from hpcrl.modeling.spec import spec_of
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.publish.background import Background
from hpcrl.trainer.publish.durable_demand import DurableDemand
from hpcrl.trainer.publish.fabric_serving import AnnouncedContent, FabricPlace, FabricServing
from hpcrl.trainer.publish.images import Images
from hpcrl.trainer.publish.persistence import Persistence
from hpcrl.trainer.publish.plan import Window, held_blocks, plan_publication
from hpcrl.trainer.publish.published import OnPublished, Published
from hpcrl.trainer.publish.staging import Staging
from hpcrl.trainer.publish.version_writer import Image, VersionWriter
from hpcrl.weights.format.manifest import CHUNK_BYTES, Kind
from hpcrl.weights.format.quantise import QuantisedModules
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.handoff_writer import VersionCommitter

_log = logging.getLogger(__name__)

_CLOSE_S = 30.0


def tensor_bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> TensorBytes:
    """Return a whole (unsharded) ``tensor`` in its published form: its shape, converted to ``dtype``.

    No copy is made unless the conversion needs one: the bytes may be those of ``tensor``.
    """
    data = tensor.detach().to("cpu", dtype).contiguous()
    # bfloat16 has no numpy type: hand over bytes
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(name, str(dtype).removeprefix("torch."), tuple(data.shape), raw.data)


class Publisher:
    """Publishes versions of one model. All ranks call every method together."""

    def __init__(
        self,
        store: HandoffStore,
        parallel: Parallel,
        *,
        arch: ModelArch,
        model_dir: Path,
        dtype: torch.dtype,
        attempt: int,
        settings: HandoffConfig,
        quantised: QuantisedModules | None = None,
        acknowledged: Callable[[], int | None] | None = None,
        wanted: Callable[[], int | None] | None = None,
        on_wait: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda words: None,
        fabric: FabricPlace | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        beside: Publisher | None = None,
    ) -> None:
        """Become the one publisher of ``store``; no version is touched. Collective.

        Parameters
        ----------
        store:
            Store of the versions.
        parallel:
            The ranks of the trainer.
        arch:
            Architecture of the model.
        model_dir:
            Start model, whose configuration and tokenizer every version carries.
        dtype:
            Dtype of the published tensors.
        attempt:
            Number of the run's attempt: of two publishers that of the newer attempt wins (`hpcrl.storage.fence`).
        settings:
            Kind, overlap, deltas, limits.
        quantised:
            Modules that are in FP8 in versions of kind ``fp8``; None: all that can be.
        acknowledged:
            The newest version that every reader has loaded, None for none; asked on rank 0 before each publication.
            Without it the first full version stays the parent of all deltas until they grow too large.
        wanted:
            Returns the newest version that a reader asks for because it cannot pull it; asked on rank 0.
        on_wait:
            Called again and again while a call waits for a version that the filesystem refuses, and that is tried
            again.
        on_refused:
            Called on rank 0 when a version begins to be tried again, with words for people.
        fabric:
            Where versions are served over the fabric, in addition; None: nowhere.
        chunk_bytes:
            Size of hash chunks.
        beside:
            The publisher of the same ranks that has claimed the store already; never used at the same time.

        Raises
        ------
        FencedError
            A newer attempt publishes there.
        """
        self._store, self._dtype, self._chunk_bytes = store, dtype, chunk_bytes
        self._names = spec_of(arch).adapter(arch)
        self._kind: Kind = settings.kind
        self._only_file: str | None = None
        self._settings, self._acknowledged = settings, acknowledged
        self._quantised = quantised or QuantisedModules()
        self._device = parallel.device
        if beside is None:
            timeout = timedelta(seconds=settings.publish_timeout_s)
            # a group of their own, which carries host memory and may be used from a thread
            self._ranks = Ranks(dist.new_group(backend="gloo", timeout=timeout))
            self.output: VersionCommitter = self._ranks.on_leader(
                lambda: VersionCommitter.claim(store.root, attempt), "claiming the store of versions"
            )
        else:
            self._ranks, self.output = beside._ranks, beside.output
        self._persistence = Persistence(self._ranks, store.root, limit_s=settings.retry_s, on_refused=on_refused)
        self._on_wait = on_wait
        self._model: nn.Module | None = None
        self._windows: list[Window] = []
        self._staging: Staging | None = None
        self._writer: VersionWriter | None = None
        self._fabric = None if fabric is None else FabricServing(self._ranks, self.output, settings, fabric)
        self._new_writer = partial(
            VersionWriter,
            self.output,
            self._ranks,
            model_dir=model_dir,
            dtype=dtype,
            settings=settings,
            chunk_bytes=chunk_bytes,
            fabric=self._fabric,
        )
        self._background, self._demand = Background(), DurableDemand(self._ranks, wanted)
        self._pending = -1
        self._images = Images(settings.delta_chain, device=self._device, readers_answer=acknowledged is not None)

    def is_intact(self, version: int) -> bool:
        """Return whether ``version`` and the versions it needs are published and all bytes are correct. Local."""
        try:
            handoff = self._store.open(version)
            handoff.verify(content=True)
            for needed in handoff.manifest.needs:
                self._store.open(needed).verify(content=True)
        except HandoffError:
            return False
        return True

    def publish(
        self,
        model: nn.Module,
        version: int,
        on_published: OnPublished = lambda published: None,
        *,
        durable: bool = True,
    ) -> None:
        """Take a copy of a sharded ``model`` and make it ``version``.

        With ``overlap`` it returns when the copy is taken: the parameters may change, a thread writes. The
        previous version is waited for first, and its failure is raised here.

        Parameters
        ----------
        model:
            The same at each call.
        version:
            Policy version.
        on_published:
            Called on rank 0 when every reader can have the version; from the thread with ``overlap``. A version that is
            announced before it is durable is reported twice where it becomes durable, and once otherwise.
        durable:
            Write it to the store, also where ranks serve it. Otherwise it is written if a reader asks for it before the
            next version is published. The same on all ranks.

        Raises
        ------
        OSError, HandoffError, PeerLostError
            On every rank, when any rank failed, for this version or (with ``overlap``) for the previous one, also after
            it was tried again for ``retry_s``. What was staged is removed, earlier versions are untouched, and the next
            call works.
        FencedError
            A newer attempt publishes there.
        DeadlineError
            The previous version is still being written after ``publish_timeout_s`` and ``retry_s``.
        """
        self.wait()
        self._prepare(model)
        assert self._staging is not None
        base, why_whole = self._persistence.persist("the parent of a version", self._choose_base, self._on_wait)
        image = self._images.new(version, max(window.image_bytes for window in self._windows))

        def report(published: Published) -> None:
            if self._ranks.rank == 0:
                on_published(published)

        if len(self._windows) == 1:
            self._staging.fill(self._windows[0], image.data)

            def write() -> None:
                self._publish(image, base, why_whole, report, durable=durable)

            self._pending = version
            self._demand.begin()
            self._background.start(f"publishing version {version}", write)
        else:
            self._publish(image, None, "", report, durable=True)
        if not self._settings.overlap:
            self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written; raise errors of the previous version as `publish` does.

        ``timeout_s`` in seconds takes the place of ``publish_timeout_s`` and ``retry_s``.
        """
        self._demand.end()
        limit = self._settings.publish_timeout_s + self._settings.retry_s if timeout_s is None else timeout_s

        def look() -> None:
            if self._persistence.trying:
                self._on_wait()

        if not self._background.wait(limit, look):
            raise DeadlineError(
                f"version {self._pending} is still being written to {self._store.root} after {limit:g} s\n"
                "    hint: check the filesystem; raise handoff.publish_timeout_s if it is only slow"
            )

    def close(self) -> None:
        """Wait briefly for the current write at the end of the process; its failure is logged."""
        try:
            self.wait(_CLOSE_S)
        except Exception as error:  # noqa: BLE001 - another failure is under way, or the run is over
            _log.warning("the last version may be unpublished: %s", error)
        else:
            if self._fabric is not None:  # otherwise a thread may still use its memory, which ends with the process
                self._fabric.close()

    def _prepare(self, model: nn.Module) -> None:
        """Plan once the places of all tensors and their writers."""
        if self._model is not None:
            assert self._model is model
            return
        settings = self._settings
        whole = settings.overlap or settings.delta_chain > 0
        tensors = self._names.tensors(model)
        plan = plan_publication(
            model,
            self._names,
            held_blocks(tensors, self._ranks),
            self._ranks.rank,
            self._dtype,
            fp8=self._quantised if settings.kind == "fp8" else None,
            max_shard_bytes=int(settings.max_shard_gib * 2**30),
            chunk_bytes=self._chunk_bytes,
            window_bytes=None if whole else int(settings.staging_gib * 2**30) * self._ranks.size,
            only_file=self._only_file,
        )
        self._windows = plan.windows
        self._staging = Staging(tensors, plan.cut, self._dtype, self._ranks, device=self._device)
        self._writer = self._new_writer(windows=plan.windows, tensors=plan.tensors)
        self._model = model

    def _open_stage(self, version: int, base: Image | None) -> None:
        """Check the free space before any write (the size of a delta is only known later), and make the directory."""
        if base is None:
            assert self._writer is not None
            self._writer.check_space()
        self.output.stage(version)

    def _choose_base(self) -> tuple[Image | None, str]:
        """Return what `Images.choose_base` does, for what rank 0 knows of readers and of the store. Collective."""
        if not self._settings.delta_chain:
            return None, ""

        def ask() -> tuple[int | None, list[int]]:
            return self._acknowledged() if self._acknowledged else None, self._store.versions()

        acknowledged, present = self._ranks.on_leader(ask, "looking for acknowledgements")
        return self._images.choose_base(acknowledged, present)

    def _guarded(self, version: int, action: Callable[[], None]) -> None:
        """Run ``action``; if it fails, remove staged files, and name a newer attempt if that is the reason."""
        try:
            action()
        except BaseException as error:
            if self._ranks.rank == 0:
                self.output.discard(version)
            if isinstance(error, FileNotFoundError):
                self.output.fence.check()
            raise

    def _publish(self, image: Image, base: Image | None, why_whole: str, report: OnPublished, *, durable: bool) -> None:
        """Make a version from its image, again where the filesystem refuses for a while. Collective.

        A full version is announced first, where ranks serve it; it stays so without ``durable``.
        """
        version, failure = image.version, None
        try:
            announced = self._announce(image) if base is None and len(self._windows) == 1 else None
            if announced is not None:
                failure = _failure_of(partial(report, Published(version, self._kind, why_whole, durable=False)))
                durable = durable or self._demand.wait(version)
            if durable or announced is None:
                published = self._make_durable(image, base, why_whole, announced)
        except BaseException:
            self._images.release(image)
            raise
        self._images.keep(image, durable=durable or announced is None)
        if failure is not None:
            raise failure
        if durable or announced is None:
            if (fabric := self._fabric) is not None:
                published = published._replace(off_fabric=fabric.why, off_fabric_versions=fabric.failures)
            report(published)

    def _announce(self, image: Image) -> AnnouncedContent | None:
        assert self._writer is not None
        return self._writer.announce(image)

    def _make_durable(
        self, image: Image, base: Image | None, why_whole: str, announced: AnnouncedContent | None
    ) -> Published:
        version = image.version

        def attempt() -> Published:
            ranks, done = self._ranks, None
            # the try before may have renamed it already; at a first try, a version of this name is another writer's
            if self._persistence.trying:
                done = ranks.on_leader(lambda: self.output.settle(version), f"looking for version {version}")
            if done is not None:
                image.needs = done.needs
                return Published(version, done.kind, "" if done.kind == "delta" else why_whole)
            ranks.on_leader(lambda: self._open_stage(version, base), f"preparing version {version}")
            published: Published | None = None

            def write() -> None:
                nonlocal published
                published = self._write(image, base, why_whole, announced)

            self._guarded(version, write)
            assert published is not None
            return published

        # a thread must not report a wait: the caller that waits for it does
        told = self._on_wait if len(self._windows) > 1 else lambda: None
        return self._persistence.persist(f"version {version}", attempt, told)

    def _write(self, image: Image, base: Image | None, why_whole: str, announced: AnnouncedContent | None) -> Published:
        """Write a staged version, as a delta where there is a ``base`` and it pays."""
        assert self._writer is not None
        assert self._staging is not None
        if len(self._windows) > 1:
            self._writer.write_windows(image, self._staging.fill)
            return Published(image.version, self._kind)
        reason = why_whole if base is None else self._write_delta(image, base)
        if base is not None and not reason:
            return Published(image.version, "delta")
        self._writer.write_full(image, announced)
        return Published(image.version, self._kind, reason)

    def _write_delta(self, image: Image, base: Image) -> str:
        """Write the changes since ``base``; why not, where a full version has to be written instead."""
        assert self._writer is not None
        reason = self._writer.write_delta(image, base)
        if reason:
            # the full version that is written instead is the better parent
            self._images.drop_base()
            self._ranks.on_leader(lambda: self._open_stage(image.version, None), f"preparing version {image.version}")
        return reason


def _failure_of(report: Callable[[], None]) -> Exception | None:
    """Return what a report raises: rank 0 alone makes it, and the other ranks wait for rank 0 in the write."""
    try:
        report()
    except Exception as error:  # noqa: BLE001 - raised after the write
        return error
    return None

"""Publishing the trainer's weights as a policy version: all ranks write in parallel, while training goes on.

`Publisher.publish` copies this rank's share into host memory and returns; a thread writes it, and the version is
announced when it has its name. Memory of a rank, beside the model: its share of the published bytes (its *image*), once
with ``overlap``; twice with deltas, which compare with the image of an earlier version; without both,
``staging_gib``, but at least its share of one shard file. Encoded changes come on top, at most
``delta_max_share`` of the image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

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
from hpcrl.trainer.publish.images import Images
from hpcrl.trainer.publish.persistence import Persistence
from hpcrl.trainer.publish.plan import Window, held_blocks, make_plan
from hpcrl.trainer.publish.staging import Staging
from hpcrl.trainer.publish.version_writer import Image, VersionWriter
from hpcrl.weights.format.manifest import CHUNK_BYTES, Kind
from hpcrl.weights.format.quantize import QuantisedModules
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.handoff_writer import HandoffWriter

__all__ = ["Published", "Publisher", "PublisherSettings", "tensor_bytes"]

_log = logging.getLogger(__name__)

_CLOSE_S = 30.0


def tensor_bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> TensorBytes:
    """A whole (unsharded) ``tensor`` as it is written, in its shape, converted to ``dtype``.

    No copy is made where none is needed: the bytes may be those of ``tensor``.
    """
    data = tensor.detach().to("cpu", dtype).contiguous()
    # bfloat16 has no numpy type: hand over bytes
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(name, str(dtype).removeprefix("torch."), tuple(data.shape), raw.data)


class Published(NamedTuple):
    """A version that every reader can see.

    Attributes
    ----------
    version, kind:
        As in its manifest.
    instead_of_delta:
        Why it is whole, where a delta was wanted; empty else.
    """

    version: int
    kind: Kind
    instead_of_delta: str = ""


class PublisherSettings(TypedDict):
    """Keywords of `Publisher` beside the directory of the start model, for those who hand them on."""

    arch: ModelArch
    dtype: torch.dtype
    attempt: int
    settings: HandoffConfig
    quantised: NotRequired[QuantisedModules | None]
    acknowledged: NotRequired[Callable[[], int | None] | None]
    on_wait: NotRequired[Callable[[], None]]
    on_refused: NotRequired[Callable[[str], None]]
    chunk_bytes: NotRequired[int]


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
        on_wait: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda words: None,
        chunk_bytes: int = CHUNK_BYTES,
        beside: Publisher | None = None,
    ) -> None:
        """Become the one publisher of ``store``; no version is touched. Collective.

        Parameters
        ----------
        store:
            Where versions go.
        parallel:
            The ranks of the trainer.
        arch:
            Of the model.
        model_dir:
            Start model, whose configuration and tokenizer every version carries.
        dtype:
            Of the published tensors.
        attempt:
            Of the run: of two publishers that of the newer attempt wins (`hpcrl.fence`).
        settings:
            Kind, overlap, deltas, limits.
        quantised:
            What versions of kind ``fp8`` have in FP8; None: all that can be.
        acknowledged:
            The newest version that every reader has loaded, None for none; asked on rank 0 before each publication.
            Without it the first full version stays the parent of all deltas until they grow too large.
        on_wait:
            Called again and again while a call waits for a version that the filesystem refuses, and that is tried
            again.
        on_refused:
            Called on rank 0 when a version begins to be tried again, with words for people.
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
            self.output: HandoffWriter = self._ranks.on_leader(
                lambda: HandoffWriter.claim(store.root, attempt), "claiming the store of versions"
            )
        else:
            self._ranks, self.output = beside._ranks, beside.output
        self._persistence = Persistence(self._ranks, store.root, limit_s=settings.retry_s, on_refused=on_refused)
        self._on_wait = on_wait
        self._model: nn.Module | None = None
        self._windows: list[Window] = []
        self._staging: Staging | None = None
        self._writer: VersionWriter | None = None
        self._new_writer = partial(
            VersionWriter,
            self.output,
            self._ranks,
            model_dir=model_dir,
            dtype=dtype,
            settings=settings,
            chunk_bytes=chunk_bytes,
        )
        self._background = Background()
        self._pending = -1
        self._images = Images(settings.delta_chain, device=self._device, readers_answer=acknowledged is not None)

    def is_intact(self, version: int) -> bool:
        """Whether ``version``, and what it is made from, is published and every byte right (a local question)."""
        try:
            handoff = self._store.open(version)
            handoff.verify(content=True)
            for needed in handoff.manifest.needs:
                self._store.open(needed).verify(content=True)
        except HandoffError:
            return False
        return True

    def publish(
        self, model: nn.Module, version: int, on_published: Callable[[Published], None] = lambda published: None
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
            Called on rank 0 when every reader can see the version; from the thread with ``overlap``.

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
        if len(self._windows) == 1:
            self._staging.fill(self._windows[0], image.data)

            def write() -> None:
                published = self._publish(image, base, why_whole)
                if self._ranks.rank == 0:
                    on_published(published)

            self._pending = version
            self._background.start(f"publishing version {version}", write)
        else:
            published = self._publish(image, None, "")
            if self._ranks.rank == 0:
                on_published(published)
        if not self._settings.overlap:
            self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written; raises what `publish` says of the previous version.

        ``timeout_s`` in seconds takes the place of ``publish_timeout_s`` and ``retry_s``.
        """
        limit = self._settings.publish_timeout_s + self._settings.retry_s if timeout_s is None else timeout_s

        def look() -> None:
            if self._persistence.trying:
                self._on_wait()

        if not self._background.wait(limit, look):
            raise DeadlineError(
                f"version {self._pending} is still being written to {self._store.root} after {limit:g} s\n"
                "    hint: look at the filesystem; raise handoff.publish_timeout_s where it is just slow"
            )

    def close(self) -> None:
        """Let what is being written come to its end, for a moment; its failure is logged. For the way out."""
        try:
            self.wait(_CLOSE_S)
        except Exception as error:  # noqa: BLE001 - another failure is under way, or the run is over
            _log.warning("the last version may not be published: %s", error)

    def _prepare(self, model: nn.Module) -> None:
        """Plan once: where everything lies and who writes it."""
        if self._model is not None:
            assert self._model is model
            return
        settings = self._settings
        whole = settings.overlap or settings.delta_chain > 0
        tensors = self._names.tensors(model)
        plan = make_plan(
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
        """Look for space before anything is written (of a delta it is known only later), and make the directory."""
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
        """Run ``action``; where it fails, what was staged goes, and a newer attempt that is the reason is named."""
        try:
            action()
        except BaseException as error:
            if self._ranks.rank == 0:
                self.output.discard(version)
            if isinstance(error, FileNotFoundError):
                self.output.fence.check()
            raise

    def _publish(self, image: Image, base: Image | None, why_whole: str) -> Published:
        """Make a version from its image, again where the filesystem refuses for a while. Collective."""
        version = image.version

        def attempt() -> Published:
            ranks, done = self._ranks, None
            # the try before may have got as far as its name; before the first, a version of this name is not ours
            if self._persistence.trying:
                done = ranks.on_leader(lambda: self.output.settle(version), f"looking for version {version}")
            if done is not None:
                image.needs = done.needs
                return Published(version, done.kind, "" if done.kind == "delta" else why_whole)
            ranks.on_leader(lambda: self._open_stage(version, base), f"preparing version {version}")
            published: Published | None = None

            def write() -> None:
                nonlocal published
                published = self._write(image, base, why_whole)

            self._guarded(version, write)
            assert published is not None
            return published

        try:
            # from a thread nobody is told: who waits for it tells
            told = self._on_wait if len(self._windows) > 1 else lambda: None
            published = self._persistence.persist(f"version {version}", attempt, told)
        except BaseException:
            self._images.release(image)
            raise
        self._images.keep(image)
        return published

    def _write(self, image: Image, base: Image | None, why_whole: str) -> Published:
        """Write a staged version, as a delta where there is a ``base`` and it pays."""
        assert self._writer is not None
        assert self._staging is not None
        if len(self._windows) > 1:
            self._writer.write_windows(image, self._staging.fill)
            return Published(image.version, self._kind)
        reason = why_whole if base is None else self._write_delta(image, base)
        if base is not None and not reason:
            return Published(image.version, "delta")
        self._writer.write_full(image)
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

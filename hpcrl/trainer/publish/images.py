"""The images of versions that a publisher keeps in host memory: the parent of deltas, the newest, and spare memory."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from hpcrl.trainer.publish.staging import new_image
from hpcrl.trainer.publish.version_writer import Image


class Images:
    """This rank's images: one, or two where deltas are made (one of them is the parent of the next delta).

    Parameters
    ----------
    delta_chain:
        Maximum length of a chain of deltas; 0: none are made.
    device:
        Device of the model (`hpcrl.trainer.publish.staging.new_image`).
    readers_answer:
        Whether readers report the version that they have loaded. Otherwise the first full version stays the parent.
    """

    def __init__(self, delta_chain: int, *, device: torch.device, readers_answer: bool) -> None:
        self._delta_chain, self._device, self._readers_answer = delta_chain, device, readers_answer
        self._base: Image | None = None
        self._last: Image | None = None
        self._spare: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that are kept between two publications."""
        kept = [image.data for image in (self._base, self._last) if image is not None]
        return sum(data.nbytes for data in (*kept, *([] if self._spare is None else [self._spare])))

    def new(self, version: int, size: int) -> Image:
        """Return an image of ``size`` bytes for a version, in spare memory where there is some."""
        if self._spare is None:
            self._spare = new_image(size, self._device)
        data, self._spare = self._spare, None
        return Image(version, (), data)

    def keep(self, image: Image, *, durable: bool = True) -> None:
        """Note that the version of an image was published: once it is durable it may become the parent of deltas."""
        if self._delta_chain and durable:
            self._last = image
        else:
            self._spare = image.data

    def release(self, image: Image) -> None:
        """Note that an image is not needed: its memory takes the next version."""
        self._spare = image.data

    def drop_base(self) -> None:
        """Make the next published version the parent of deltas."""
        self._base = None

    def choose_base(self, acknowledged: int | None, present: Collection[int]) -> tuple[Image | None, str]:
        """Choose the version that a delta may be made against. It moves only to what all readers have.

        Parameters
        ----------
        acknowledged:
            The newest version that every reader has loaded; None for none.
        present:
            Versions in the store.

        Returns
        -------
        tuple
            The image, or None; and why there is none where one was there before, else empty.
        """
        if self._last is not None and (
            self._base is None or (acknowledged is not None and acknowledged >= self._last.version)
        ):
            self._base, self._last = self._last, self._base
        if self._last is not None:
            # its memory takes the next version
            self._spare, self._last = self._last.data, None
        base = self._base
        if base is None or (self._readers_answer and (acknowledged is None or acknowledged < base.version)):
            return None, ""
        gone = {*base.needs, base.version} - set(present)
        if not gone and len(base.needs) < self._delta_chain:
            return base, ""
        self._base, self._spare = None, base.data if self._spare is None else self._spare
        return None, f"version {min(gone)}, which it would need, was collected" if gone else ""

"""Merging an adapter into the version that it was trained on: for both engines, in float32, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hpcrl.errors import HandoffError
from hpcrl.inference.finite import all_finite
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.read.adapters import Contents, Product, contents_of, plan_merge
from hpcrl.weights.read.assemble import StoredTensor
from hpcrl.weights.read.subscriber import Reading


def as_tensor(stored: StoredTensor) -> Tensor:
    """Return a host tensor that shares the bytes that were read, in its published shape and dtype."""
    return torch.frombuffer(stored.data, dtype=getattr(torch, stored.record.dtype)).view(stored.record.shape)


class Adapter:
    """An adapter that fits its base, in memory.

    It is always merged into the base's own tensors, never into what another adapter has left: an engine that goes from
    one adapter to the next has exactly the weights of one that was started on the second.

    Attributes
    ----------
    contents:
        Contents of an engine that has merged the adapter.
    """

    def __init__(self, chain: Sequence[OpenedVersion], tensors: Iterable[StoredTensor]) -> None:
        """Check it, then read it.

        Parameters
        ----------
        chain:
            Versions that it needs, oldest first, itself last.
        tensors:
            Its own manifest, verified.

        Raises
        ------
        HandoffError
            It does not belong to the base or does not fit it (`hpcrl.weights.read.adapters.plan_merge`), or what
            ``tensors`` raises.
        """
        base, own = chain[-2:]
        self._merge = plan_merge(own, base)
        self.contents: Contents = contents_of(own, self._merge.parts)
        # copies: the buffers that were read may be shared with others, and are released
        self._factors = {stored.name: as_tensor(stored).clone() for stored in tensors}

    def merged(self, stored: Iterable[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's tensors by name, with the adapter's change, in the base's shape and dtype.

        Raises
        ------
        HandoffError
            A result is not finite: the adapter is broken, or overflows the dtype. Or what ``stored`` raises.
        """
        for tensor in stored:
            parts = self._merge.parts.get(tensor.name)
            yield tensor.name, as_tensor(tensor) if parts is None else self._changed(as_tensor(tensor), tensor, parts)

    def _changed(self, base: Tensor, stored: StoredTensor, parts: Collection[Product]) -> Tensor:
        total = base.to(torch.float32, copy=True)
        for part in parts:
            a = self._factors[part.a][part.a_rows].float()
            b = self._factors[part.b][part.b_rows, part.b_columns].float()
            into = total if part.expert is None else total[part.expert]
            into[part.rows].addmm_(b, a, alpha=self._merge.scale)
        result = total.to(base.dtype)
        if not all_finite(result) and all_finite(base):
            raise HandoffError(f"the adapter makes {stored.name} infinite or not a number in {stored.record.dtype}")
        return result


class KeptBase:
    """Cache of the base tensors that adapters have changed so far, so that the next adapter reads none from the share.

    Methods may be called from any thread: a cancelled read may still run when the next one begins.

    Attributes
    ----------
    bytes:
        Memory of the cached tensors in bytes.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Keep nothing yet.

        Parameters
        ----------
        limit_bytes:
            Maximum bytes of cached tensors; those that do not fit are read again each time. None: no limit.
        """
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._base = ""
        self._tensors: dict[str, StoredTensor] = {}
        self.bytes = 0

    def tensors(
        self, reading: Reading, base: str, names: Collection[str], keep: Collection[str]
    ) -> Iterator[StoredTensor]:
        """Yield tensors of the base; those that are not cached are read.

        The bytes of what is kept are not to be written to.

        Parameters
        ----------
        reading:
            Reading of an adapter.
        base:
            Digest of its base, as in `hpcrl.weights.read.adapters.Contents`. Tensors of another one are dropped.
        names:
            Tensors that are wanted.
        keep:
            Those that stay once they were read.

        Raises
        ------
        HandoffError
            See `hpcrl.weights.read.subscriber.Reading.read`.
        """
        with self._lock:
            if self._base != base:
                self._base, self._tensors, self.bytes = base, {}, 0
            kept = {name: stored for name, stored in self._tensors.items() if name in names}
        yield from kept.values()
        for stored in reading.base_tensors(frozenset(names) - kept.keys()):
            if stored.name in keep:
                self._keep(base, stored)
            yield stored

    def _keep(self, base: str, stored: StoredTensor) -> None:
        """Keep a tensor that was read, where there is room for it and its base is still that of the others."""
        with self._lock:
            after = self.bytes + stored.data.nbytes
            fits = self._limit is None or after <= self._limit
            if fits and self._base == base and stored.name not in self._tensors:
                # a copy: the buffer that was read may be shared with others, and is released
                self._tensors[stored.name] = stored._replace(data=memoryview(bytearray(stored.data)))
                self.bytes = after

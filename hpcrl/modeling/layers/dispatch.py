"""The way of tokens to their experts and back, on one rank or over the ranks among which experts are distributed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.modeling.layers.rows import RowOrder, copy_rows, inverse, mix_rows, permute_rows
from hpcrl.modeling.parallel.collectives import exchange_rows
from hpcrl.modeling.sums import count_rows


class Dispatched(NamedTuple):
    """Rows that the experts of this rank compute.

    Attributes
    ----------
    rows:
        ``[rows, hidden_size]``, sorted by expert; there may be none.
    counts:
        ``[experts of this rank]`` int64: rows of each; any may be 0.
    combine:
        Takes the experts' results for the rows, ``[rows, hidden_size]``, and returns ``[T, hidden_size]``: for each
        token of this rank the weighted sum over its experts.
    """

    rows: Tensor
    counts: Tensor
    combine: Callable[[Tensor], Tensor]


class Dispatcher(Protocol):
    """Brings tokens to the ranks of their experts."""

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Dispatched:
        """Send tokens away; a collective of the ranks that share experts, whatever the number of their tokens.

        Parameters
        ----------
        x:
            ``[T, hidden_size]``.
        weights:
            ``[T, k]`` float32.
        chosen:
            ``[T, k]`` int64: global numbers of experts.
        """
        ...


class LocalDispatcher:
    """All experts are here: tokens are sorted by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Dispatched:
        """See `Dispatcher`; no collective."""
        flat = chosen.reshape(-1)
        order = RowOrder.of(flat.argsort(stable=True), *chosen.shape)
        counts = count_rows(flat, self._experts)
        return Dispatched(copy_rows(x, order), counts, lambda y: mix_rows(y, order, weights))


class AllToAllDispatcher:
    """Experts are distributed in equal runs over the ranks of a group; one all-to-all takes tokens there, one back.

    Rows arrive in the order of ranks, and of tokens within one: equal input gives equal sums on every run.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        """Remember the group; ``experts`` is a multiple of its size."""
        assert experts % dist.get_world_size(group) == 0
        self._group, self._ranks, self._experts = group, dist.get_world_size(group), experts
        self._last: _Traffic | None = None

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Dispatched:
        """See `Dispatcher`. It waits for the device once: the host must know how many rows are sent and received.

        Where the same choice comes again, as the same object, because a layer is computed again for the backward pass,
        the host knows already.
        """
        flat = chosen.reshape(-1)
        order = RowOrder.of(flat.argsort(stable=True), *chosen.shape)
        if self._last is None or self._last.of() is not chosen:
            self._last = _Traffic(weakref.ref(chosen), *self._agree(flat))
        _, coming, sent, received = self._last
        rows = exchange_rows(copy_rows(x, order), sent, received, self._group)
        # from rank after rank to expert after expert
        local = torch.arange(coming.shape[1], device=x.device).repeat(self._ranks)
        by_expert = local.repeat_interleave(coming.flatten(), output_size=sum(received)).argsort(stable=True)
        by_rank = inverse(by_expert)

        def combine(y: Tensor) -> Tensor:
            back = permute_rows(y, by_rank, by_expert)
            return mix_rows(exchange_rows(back, received, sent, self._group), order, weights)

        return Dispatched(permute_rows(rows, by_expert, by_rank), coming.sum(0), combine)

    def _agree(self, flat: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return the counts of received rows ``[ranks, experts here]``, and rows sent to and received from ranks.

        Collective.
        """
        leaving = count_rows(flat, self._experts).view(self._ranks, -1)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self._group)
        sent, received = fetch_sizes(torch.stack((leaving.sum(1), coming.sum(1))))
        return coming, sent, received


class _Traffic(NamedTuple):
    """Row counts that `AllToAllDispatcher` found for the choice ``of``."""

    of: weakref.ref[Tensor]
    coming: Tensor
    sent: list[int]
    received: list[int]


def fetch_sizes(sizes: Tensor) -> list[list[int]]:
    """Copy device numbers ``[n, ranks]`` to host lists, which collectives with uneven parts need.

    The host waits for the device here, and nowhere else in a pass.
    """
    found: list[list[int]] = sizes.tolist()
    return found

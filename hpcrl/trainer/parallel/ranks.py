"""Ranks that meet in one group: what they tell each other on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.errors import PeerLostError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A group of ranks, of which this process is one.

    Attributes
    ----------
    group:
        Carries tensors of the host (and of the accelerator, where it was made for both).
    """

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """Return the number of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return dist.get_world_size(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values``, of one shape and dtype on all ranks, over the ranks: in place, and return it. Collective."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)
        return values

    def max(self, value: int) -> int:
        """Return the largest ``value`` of all ranks; it must fit int64. Collective."""
        box = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return int(box)

    def gather(self, value: T) -> list[T]:
        """Return the (picklable, small) ``value`` of each rank, on all ranks, in rank order. Collective."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_succeed(self, action: Callable[[], T], what: str) -> list[T]:
        """Run a local ``action`` on every rank; if it fails on one, all ranks raise.

        Without this a rank that fails alone would leave the others in their next collective until it
        times out. ``action`` itself must not enter collectives.

        Returns
        -------
        list
            The (picklable, small) result of each rank, on all ranks.

        Raises
        ------
        Exception
            On the rank that failed: its own error.
        PeerLostError
            On the others: what failed, and where.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below, after the others know of it
            failure = error
        reports = self.gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, report) in enumerate(reports):
            if report is not None:
                raise PeerLostError(f"{what} failed on trainer rank {rank}: {report}")
        return [cast("T", value) for value, _ in reports]

    def on_leader(self, action: Callable[[], T], what: str) -> T:
        """Run a local ``action`` on rank 0 alone; all ranks return its result, or raise as in `all_succeed`."""
        results = self.all_succeed(action if self.rank == 0 else lambda: None, what)
        return cast("T", results[0])

"""Ranks and their mesh. Model code sees a mesh, never a world size; collectives run in named groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcrl.errors import PeerLostError
from hpcrl.modeling.parallelize import FSDP_AXIS

__all__ = ["Parallel", "distributed", "is_lost_rank"]

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """Where this rank stands.

    Attributes
    ----------
    mesh:
        All ranks, with named axes.
    device:
        Where this rank computes.
    """

    mesh: DeviceMesh
    device: torch.device

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """The group of the sharding axis; carries tensors of the host and of the accelerator."""
        return self.mesh.get_group(FSDP_AXIS)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.fsdp_group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.fsdp_group)

    def sum(self, values: Tensor) -> Tensor:
        """``values`` added up over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.fsdp_group)
        return values

    def max(self, value: int) -> int:
        """The largest ``value`` of all ranks."""
        box = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.fsdp_group)
        return int(box)

    def gather(self, value: T) -> list[T]:
        """The (picklable, small) ``value`` of each rank, on all ranks, in rank order."""
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.fsdp_group)
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
        except Exception as error:  # noqa: BLE001 - raised below, after the others were told
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


def is_lost_rank(error: Exception) -> bool:
    """Whether ``error`` is how a collective says that another rank went away (a consequence, not a cause)."""
    if isinstance(error, dist.DistBackendError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and ("onnection" in text or "imeout" in text)


@contextmanager
def distributed(*, timeout_s: float) -> Iterator[Parallel]:
    """Join the ranks that torchrun started, or be the only one where there is no torchrun.

    Parameters
    ----------
    timeout_s:
        Longest time in one collective; longer than any wait that ranks may do apart, in seconds.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
        native = dist.get_default_backend_for_device(accelerator.type)
        backend = f"cpu:gloo,{accelerator.type}:{native}"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(FSDP_AXIS,))
        yield Parallel(mesh, device)
        # without it gloo ranks abort when a faster one closes its connections
        dist.barrier(group=mesh.get_group(FSDP_AXIS))
    finally:
        dist.destroy_process_group()

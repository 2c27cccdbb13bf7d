"""The ranks of a trainer and their groups, which have names by what they are for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hpcrl.config.recipe import TrainerParallelismConfig
from hpcrl.errors import PeerLostError
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.trainer.parallel.numa import bind_near
from hpcrl.trainer.parallel.ranks import Ranks


@dataclass(frozen=True)
class Parallel:
    """The ranks of the trainer, and the position of this one.

    Attributes
    ----------
    mesh:
        The named dimensions, and their meshes: what model code sees.
    device:
        Device of this rank.
    """

    mesh: ParallelDims
    device: torch.device

    @property
    def world(self) -> Ranks:
        """Return all ranks: the group for agreements, checkpoints and publishing."""
        assert dist.group.WORLD is not None
        return Ranks(dist.group.WORLD)

    @property
    def data(self) -> Ranks:
        """Return the data-parallel ranks; this rank's number is that of its shard of a batch.

        Ranks of one context-parallel group have the same number, and share the shard.
        """
        return Ranks(self.mesh.get_mesh("batch").get_group())

    @property
    def sharding(self) -> Ranks:
        """Return the ranks that together hold every parameter once, experts included, which are sharded differently."""
        return Ranks(self.mesh.get_mesh("fsdp").get_group())


def is_lost_rank(error: Exception) -> bool:
    """Return whether ``error`` is a collective's report that another rank is gone (a consequence, not a cause)."""
    if isinstance(error, dist.DistBackendError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and ("onnection" in text or "imeout" in text)


@contextmanager
def distributed(*, timeout_s: float, parallelism: TrainerParallelismConfig | None = None) -> Iterator[Parallel]:
    """Join the ranks that a launcher started, or be the only one where there is none.

    Parameters
    ----------
    timeout_s:
        Timeout of one collective in seconds; longer than any wait between the ranks' arrivals.
    parallelism:
        Parallelism of the ranks; None: parameters are sharded over all of them, and nothing else.

    Raises
    ------
    PeerLostError
        Rank 0, or ranks that it waited for, went away before all were there.
    ValueError
        The degrees of ``parallelism`` do not divide the ranks that there are.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
        bind_near(device)
        native = dist.get_default_backend_for_device(accelerator.type)
        backend = f"cpu:gloo,{accelerator.type}:{native}"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        _join(backend, timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        yield parallel_of(parallelism or TrainerParallelismConfig(), device)
        # without it gloo ranks abort when a faster one closes its connections
        dist.barrier()
    finally:
        dist.destroy_process_group()


def parallel_of(parallelism: TrainerParallelismConfig, device: torch.device) -> Parallel:
    """Return the meshes of ``parallelism`` over all ranks of the existing process group. Collective.

    Raises
    ------
    ValueError
        The number of ranks is not divisible accordingly.
    """
    size = dist.get_world_size()
    mesh = ParallelDims(world_size=size, dp_replicate=parallelism.dp_replicate, cp=parallelism.cp, ep=parallelism.ep)
    mesh.build_mesh(device.type)
    return Parallel(mesh, device)


def _join(backend: str, timeout: timedelta) -> None:
    """Join the process group at the store of rank 0."""
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistStoreError as error:
        raise PeerLostError(f"not all ranks of the trainer joined: {error}") from error
    except dist.DistNetworkError as error:
        if os.environ["RANK"] == "0":  # only rank 0 listens: the error is its own
            raise
        raise PeerLostError(f"rank 0 of the trainer is unreachable: {error}") from error

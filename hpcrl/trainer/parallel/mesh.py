"""The ranks of a trainer and their groups, which have names by what they are for."""

from __future__ import annotations

import contextlib
import os
import threading
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

_ABORT_S = 30.0
"""Maximum seconds that a rank that failed waits until its accelerator's communicators are aborted."""


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

    After an error communicators of an accelerator are aborted, and the process should end: destroying them would wait
    until other ranks join the collectives that are under way (``ProcessGroupNCCL::shutdown``), and they wait for this
    rank.

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
    device, backend = _device_and_backend()
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        _join(backend, timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        parallel = parallel_of(parallelism or TrainerParallelismConfig(), device)
        _limit_all_groups(timeout)
        yield parallel
        # without it gloo ranks abort when a faster one closes its connections
        dist.barrier()
    except BaseException:
        if device.type == "cpu":
            dist.destroy_process_group()
        else:
            _abort_communicators(device)
        raise
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


def _device_and_backend() -> tuple[torch.device, str]:
    """Return the device of this rank, which is made the current one, and the backends of its process groups."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu"), "gloo"
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    bind_near(device)
    native = dist.get_default_backend_for_device(accelerator.type)
    return device, f"cpu:gloo,{accelerator.type}:{native}"


def _groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank, the newest first."""
    return list(dist.distributed_c10d._world.pg_names)[::-1]


def _limit_all_groups(timeout: timedelta) -> None:
    """Give all groups the timeout of the group of all ranks: those of a mesh have torch's own, of 30 minutes."""
    for group in _groups():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _abort_communicators(device: torch.device) -> None:
    """End the collectives of this rank on ``device`` without the other ranks, for at most half a minute."""

    def abort() -> None:
        for group in _groups():
            with contextlib.suppress(RuntimeError):  # the others are aborted all the same
                group._get_backend(device).abort()

    # a thread: aborting waits for the device, and a failed rank must get to report its error
    thread = threading.Thread(target=abort, name="abort communicators", daemon=True)
    thread.start()
    thread.join(_ABORT_S)


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

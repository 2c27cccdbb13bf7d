"""How ranks leave their process groups, and how long groups wait. NCCL has a stand-in, which waits as NCCL does."""

import inspect
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hpcrl.trainer.parallel import mesh
from hpcrl.trainer.parallel.mesh import Parallel, distributed


class Communicator:
    """In place of ``ProcessGroupNCCL``: `abort` may hang."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        self.hangs, self.aborted = hangs, False

    def abort(self) -> None:
        if self.hangs is not None:
            self.hangs.wait(60)
        self.aborted = True


class Group:
    """In place of a group with a communicator on a GPU."""

    def __init__(self, communicator: Communicator | None) -> None:
        self.communicator = communicator

    def _get_backend(self, device: torch.device) -> Communicator:
        assert device.type == "cuda"
        if self.communicator is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.communicator


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Make a trainer's rank believe that it has a GPU, over gloo; `destroy_process_group` is counted."""
    device, destroyed = torch.device("cuda", 0), list[bool]()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(mesh, "_device_and_backend", lambda: (device, "gloo"))
    monkeypatch.setattr(mesh, "parallel_of", lambda parallelism, device: Parallel(None, device))
    monkeypatch.setattr(mesh, "_limit_all_groups", lambda timeout: None)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    yield destroyed
    destroy()


def test_a_rank_that_fails_aborts_its_communicators(on_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not destroy them: that waits for ranks that wait for this one. One without any stops no other."""
    first, last = Communicator(), Communicator()
    monkeypatch.setattr(mesh, "_groups", lambda: [Group(last), Group(None), Group(first)])
    with pytest.raises(ValueError, match="a wrong batch"), distributed(timeout_s=60):
        raise ValueError("a wrong batch")
    assert first.aborted
    assert last.aborted
    assert on_gpu == []


def test_a_rank_that_fails_reports_its_error_though_an_abort_hangs(on_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    communicator = Communicator(never)
    monkeypatch.setattr(mesh, "_groups", lambda: [Group(communicator)])
    monkeypatch.setattr(mesh, "_ABORT_S", 0.05)
    with pytest.raises(ValueError, match="a wrong batch"), distributed(timeout_s=60):
        raise ValueError("a wrong batch")
    assert not communicator.aborted
    never.set()


def test_a_rank_that_ends_well_destroys_its_groups(on_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = Communicator()
    monkeypatch.setattr(mesh, "_groups", lambda: [Group(communicator)])
    with distributed(timeout_s=60):
        pass
    assert on_gpu == [True]
    assert not communicator.aborted


def test_every_group_has_the_timeout_of_all_ranks_and_an_abort() -> None:
    """The groups of torch itself: a stand-in above has no method that a real one lacks."""
    store = HashStore()
    dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        group = dist.new_group([0])
        of_group = group._get_backend(torch.device("cpu"))
        assert of_group.options._timeout == timedelta(minutes=30)
        mesh._limit_all_groups(timedelta(seconds=78))
        assert mesh._groups() == [group, dist.group.WORLD]
        for each in mesh._groups():
            backend = each._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=78)
            assert callable(backend.abort)
        with pytest.raises(RuntimeError):
            group._get_backend(torch.device("cuda"))
    finally:
        dist.destroy_process_group()
    assert list(inspect.signature(Communicator.abort).parameters) == ["self"]

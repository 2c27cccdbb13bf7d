"""Binding a rank to the socket of its GPU: the lists of the kernel, and a real thread that is bound."""

import ctypes
import os
import platform
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.trainer.parallel import numa
from hpcrl.trainer.parallel.numa import bind_near, bind_to_node, pci_address, processors_of

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
ADDRESS = "0001:9b:00.0"


def system(root: Path, *lists: str, of_gpu: str = "0") -> Path:
    """A ``/sys`` with a NUMA node for each list of processors, and a GPU on one of them."""
    for number, processors in enumerate(lists):
        node = root / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{processors}\n")
    (root / "devices/system/node/has_cpu").touch()
    gpu = root / "bus/pci/devices" / ADDRESS
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{of_gpu}\n")
    return root


def in_thread(task: Any) -> Any:
    """What a task gives in a thread of its own: the others stay where they are."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(task()))
    thread.start()
    thread.join()
    return answers[0]


def memory_policy() -> tuple[int, int]:
    """The mode and the first nodes of this thread's policy, asked of the kernel."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, 0) == 0
    return mode.value, mask[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose properties say where it is, as torch's do."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "processors"),
    [("0-2,5,8-9\n", {0, 1, 2, 5, 8, 9}), ("3", {3}), ("\n", set()), ("0-47,96-143", {*range(48), *range(96, 144)})],
)
def test_lists_of_processors(text: str, processors: set[int]) -> None:
    assert processors_of(text) == processors


@pytest.mark.parametrize("text", ["0-", "a", "0x3", "1,,2", "-1"])
def test_what_is_not_a_list_of_processors(text: str) -> None:
    with pytest.raises(ValueError, match="not a range of processors"):
        processors_of(text)


def test_addresses_are_spelled_as_the_kernel_spells_them() -> None:
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    assert pci_address(known) == "0000:1a:00.0"
    for device in Path("/sys/bus/pci/devices").glob("*.0"):
        domain, bus, slot = (int(number, 16) for number in device.stem.split(":"))
        assert pci_address(SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=slot)) == device.name


def test_a_rank_runs_on_the_socket_of_its_gpu_and_takes_its_memory(tmp_path: Path, gpu: torch.device) -> None:
    mine = sorted(os.sched_getaffinity(0))
    sysfs = system(tmp_path, f"{mine[0]},4000-4010", "3000", of_gpu="0")

    def bound() -> tuple[int | None, set[int], set[int], tuple[int, int]]:
        node = bind_near(gpu, sysfs)
        # threads that begin later, such as those of torch, inherit it
        return node, os.sched_getaffinity(0), in_thread(lambda: os.sched_getaffinity(0)), memory_policy()

    assert in_thread(bound) == (0, {mine[0]}, {mine[0]}, (1, 1))
    assert sorted(os.sched_getaffinity(0)) == mine


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ((["0-3"], "0"), ""),  # one node: nothing to choose
        ((["0-3", "4-7"], "-1"), "is unknown: its rank is not bound"),
        ((["0-3", "4-7"], "text"), "is unknown: its rank is not bound"),
        ((["0-3", "4000"], "1"), "Slurm gave no processor of NUMA node 1"),
        ((["0-3", "4-"], "1"), "cannot be read"),
        ((["0-3", "4-7"], "2"), "cannot be read"),
    ],
)
def test_a_rank_that_cannot_be_bound_continues(
    machine: tuple[list[str], str], said: str, tmp_path: Path, gpu: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    lists, of_gpu = machine
    sysfs = system(tmp_path, *lists, of_gpu=of_gpu)
    before = os.sched_getaffinity(0)
    after = in_thread(lambda: (bind_near(gpu, sysfs), os.sched_getaffinity(0), memory_policy()))
    assert after == (None, before, (0, 0))
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_processors_are_not_bound() -> None:
    assert bind_near(torch.device("cpu")) is None


@pytest.mark.parametrize("calls", [{}, {platform.machine(): 100_000}], ids=["machine", "kernel"])
def test_memory_that_cannot_be_preferred_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: dict[str, int]
) -> None:
    """On a machine whose calls are not known here, or where the kernel has no such call."""
    monkeypatch.setattr(numa, "_SET_MEMPOLICY", calls)
    mine = min(os.sched_getaffinity(0))
    assert in_thread(lambda: bind_to_node(0, system(tmp_path, str(mine), "3000")))
    assert "memory of NUMA node 0 cannot be preferred: Function not implemented" in caplog.text

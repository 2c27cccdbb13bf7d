"""A trainer does not compute on processors where its plan has GPUs and the driver shows them."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpcrl.config.layout import JobComponent
from hpcrl.config.load import load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import UsageError
from hpcrl.trainer import device as trainer_device
from hpcrl.trainer import loop
from hpcrl.trainer.parallel.device_check import check_device, device_name, planned_gpus

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Group:
    """What is asked of a group of a plan."""

    def __init__(self, role: Role, component: int = 0) -> None:
        self.role, self.component = role, component


def plan_with(*gpus: int, trainer: int = 0) -> Plan:
    """A plan whose components have GPUs; the trainer is in one of them."""
    shape: dict[str, Any] = {"partition": "p", "gres": "gres", "exclusive": True, "cpus": 8, "memory_gib": 64.0}
    components = tuple(JobComponent(roles=(), nodes=1, gpus_per_node=each, **shape) for each in gpus)
    plan: Any = SimpleNamespace(
        layout=SimpleNamespace(components=components),
        groups=(Group(Role.ORCHESTRATOR), Group(Role.TRAINER, trainer)),
        component=lambda group: components[group.component],
    )
    return cast(Plan, plan)


def driver_of(directory: Path, gpus: int) -> Path:
    for number in range(gpus):
        (directory / f"0000:{number:02x}:00.0").mkdir()
    return directory


def refused(plan: Plan, driver: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_device(CPU, lambda: plan, driver)
    return str(caught.value)


def test_gpus_of_a_plan_that_torch_does_not_find_stop_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, plan = driver_of(tmp_path, 8), plan_with(0, 8, trainer=1)
    monkeypatch.setattr(torch.version, "cuda", None)
    said = refused(plan, driver)
    assert said.startswith("the driver shows 8 GPUs on the trainer's node, and torch finds none: torch 2.")
    assert "is built for processors\n    hint: " in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is empty" in refused(plan, driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040)")

    monkeypatch.setattr(torch.cuda, "init", old)
    assert "for CUDA 13.0: RuntimeError: The NVIDIA driver on your system is too old" in refused(plan, driver)


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        # a local run, a trainer on a partition without GPUs, and a virtual cluster on a machine with one
        ((), 8),
        ((0, 8), 8),
        ((8,), 1),
    ],
)
def test_a_plan_that_does_not_count_on_them_has_a_warning(
    gpus: tuple[int, ...], shown: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_device(CPU, lambda: plan_with(*gpus), driver_of(tmp_path, shown))
    assert f"the driver shows {shown} GPUs" in caplog.text
    assert "it trains on processors" in caplog.text


def test_a_node_without_a_driver_or_a_trainer_on_a_gpu_reads_no_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Plan:
        raise AssertionError("the plan was read")

    check_device(CPU, read, tmp_path / "nothing")
    check_device(CPU, read, tmp_path)
    check_device(GPU, read, driver_of(tmp_path, 8))
    assert caplog.text == ""


def test_gpus_are_those_of_the_trainers_nodes() -> None:
    assert planned_gpus(plan_with(4, 8, trainer=1)) == 8
    assert planned_gpus(plan_with(4, 8)) == 4
    assert planned_gpus(plan_with()) == 0


def test_a_trainer_asks_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(recipe=lambda: load_recipe("quickstart").value, recipe_path="recipe.yaml", plan=plan_with)
    asked = []

    def check(device: torch.device, plan: Any) -> None:
        asked.append((device.type, planned_gpus(plan())))
        raise UsageError("no GPU")

    def begin(*_: object) -> Any:
        raise AssertionError("the trainer began")

    monkeypatch.setattr(trainer_device, "check_device", check)
    with pytest.raises(UsageError, match="no GPU"):
        loop.run_trainer(SimpleNamespace(run=run), begin)  # type: ignore[arg-type]
    assert asked == [("cuda" if torch.cuda.is_available() else "cpu", 0)]


def test_devices_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 {device.index}")
    assert [device_name(each) for each in (CPU, GPU)] == ["cpu", "NVIDIA H200 0"]

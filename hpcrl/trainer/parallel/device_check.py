"""Refuse to train on processors where a plan counts on the GPUs of the node.

torch without an accelerator computes on processors, without a word. On a node with GPUs that is hardly ever meant: the
environment has a build for processors, the driver is too old for the build, or the job step was given no GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from hpcrl.config.plan import Plan, Role
from hpcrl.errors import UsageError

_log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver of NVIDIA has a directory here for each GPU, also in containers that were started without GPUs."""


def check_device(device: torch.device, plan: Callable[[], Plan], driver: Path = _DRIVER) -> None:
    """Find out whether the trainer leaves GPUs of its node unused. Where no plan counts on them, it is a log's warning.

    Parameters
    ----------
    device:
        Device of this rank.
    plan:
        Reads the plan of the run. It is not called if the device is an accelerator or the node has no driver.

    Raises
    ------
    UsageError
        The plan gives GPUs to the trainer, the driver shows as many, and torch finds none.
    """
    if device.type != "cpu":
        return
    try:
        count = len(list(driver.iterdir()))
    except OSError:
        return
    if not count:
        return
    what = f"the driver shows {count} GPUs on the trainer's node, and torch finds none: {_reason()}"
    # a virtual cluster's plan has more GPUs than the machine that it runs on
    if 0 < planned_gpus(plan()) <= count:
        raise UsageError(
            f"{what}\n    hint: `hpcrl cluster check NAME --job` tests interpreter, driver and GPUs of the nodes; "
            "the environment of the trainer is python_by_role.trainer of the profile, or container"
        )
    _log.warning("%s; it trains on processors", what)


def planned_gpus(plan: Plan) -> int:
    """Return the GPUs of a node that jobs ask for where the trainer runs; 0 without Slurm."""
    group = next((each for each in plan.groups if each.role is Role.TRAINER), None)
    if group is None or not plan.layout.components:
        return 0
    return plan.component(group).gpus_per_node


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _reason() -> str:
    """Return why torch finds no GPU, as far as it says so."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for processors"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty, so this process may use none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return f"torch {torch.__version__} for CUDA {torch.version.cuda}: {type(error).__name__}: {error}"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} gives no reason"

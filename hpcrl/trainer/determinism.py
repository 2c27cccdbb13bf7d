"""Settings with which torch computes the same numbers from the same batches."""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic

from hpcrl.errors import UsageError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_EQUAL_EACH_TIME = (":4096:8", ":16:8")
"""Workspaces with which torch trusts cuBLAS to compute the same each time; with others it refuses products."""


def settle_determinism(device: torch.device, *, wanted: bool) -> None:
    """Tell torch to compute the same each time: on processors, where it costs nothing, and where it is ``wanted``.

    Operations that cannot are refused by torch when they are called.

    Raises
    ------
    UsageError
        It is wanted on a GPU, and this process was started without what cuBLAS needs for it.
    """
    if device.type != "cpu" and not wanted:
        return
    found = os.environ.get(_WORKSPACE)
    if device.type == "cuda" and found not in _EQUAL_EACH_TIME:
        raise UsageError(
            f"trainer.deterministic: cuBLAS is deterministic only with {_WORKSPACE}={_EQUAL_EACH_TIME[0]}, and the "
            f"variable is {found or 'not set'}\n    hint: set it for the trainer; hpcrl submit does so"
        )
    torch.use_deterministic_algorithms(True)
    # a check for bugs, at the price of writing every new tensor twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

"""The trainer role: ``python -m torch.distributed.run --nproc-per-node N -m hpcrl.trainer``."""

from __future__ import annotations

from importlib.util import find_spec

from hpcrl.errors import MissingExtraError
from hpcrl.runs.role import RoleContext, run_role


def main(context: RoleContext) -> None:
    """Train (MissingExtraError where torch is not installed)."""
    if find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    from hpcrl.trainer.loop import train  # noqa: PLC0415 - imports torch

    train(context)


if __name__ == "__main__":
    run_role(main)

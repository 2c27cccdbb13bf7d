"""The trainer role: ``python -m hpcrl.trainer``, as `hpcrl.trainer.launcher` runs it where there are several ranks."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec

from hpcrl.errors import MissingExtraError
from hpcrl.processes.interpreter import bound_kernel_caches, lasting_imports
from hpcrl.runs.role import RoleContext, run_role


def main(context: RoleContext) -> None:
    """Train (MissingExtraError where torch is not installed)."""
    if find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    supervised = context.run.recipe().sft is not None
    bound_kernel_caches()
    with lasting_imports():
        # both import torch
        if supervised:
            from hpcrl.trainer.supervised.loop import train_supervised as train  # noqa: PLC0415
        else:
            from hpcrl.trainer.loop import train  # noqa: PLC0415

    train(context)


if __name__ == "__main__":
    try:
        run_role(main)
    except SystemExit as end:
        # Skip the interpreter's own exit: threads of process groups may still release a tensor there, and the process
        # would abort after a good end ("terminate called without an active exception")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))

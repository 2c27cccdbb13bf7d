"""``python -m hpcrl.slurm.batch FOLDER``: the batch process of a run. Looks whose the pickle is before it is loaded."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpcrl.ours import NotOursError, check_private, open_ours

__all__ = ["check_folder", "main"]


def check_folder(folder: Path) -> None:
    """See that submitit's folder and the run directory above it can be changed by nobody else (`NotOursError`).

    Logs in it are made by Slurm, with modes of its own.
    """
    check_private(folder.parent)
    check_private(folder)
    for path in folder.glob("*.pkl"):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_ours(path))


def main() -> None:
    """Check, then become submitit's process."""
    folder = Path(sys.argv[1])
    try:
        check_folder(folder)
    except NotOursError as error:
        sys.exit(f"hpcrl: {error}: its pickles are not loaded\n    hint: chmod -R go-w {folder.parent}")
    from submitit.core.submission import submitit_main  # noqa: PLC0415 - nothing of submitit before the check

    submitit_main()


if __name__ == "__main__":
    main()

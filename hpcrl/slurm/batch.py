"""``python -m hpcrl.slurm.batch FOLDER``: the batch process of a run. Looks whose the pickle is before it is loaded."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpcrl.storage.trusted_paths import NotOursError, check_private, open_trusted


def check_folder(folder: Path) -> None:
    """Raise NotOursError where other users can change submitit's folder or the run directory above it.

    Slurm creates the logs in it, with its own modes.
    """
    check_private(folder.parent)
    check_private(folder)
    for path in folder.glob("*.pkl"):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_trusted(path))


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

"""The package ``mooncake``, where it is installed: its client, and the program of its master."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError, MissingExtraError

__all__ = ["load_client", "program_of_master"]


def load_client() -> Any:
    """The module ``mooncake.store``.

    Raises
    ------
    MissingExtraError
        It is not installed.
    HpcrlError
        It cannot be loaded: a library of the system is missing.
    """
    try:
        from mooncake import store  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtraError("store", "mooncake") from error
    except ImportError as error:
        raise HpcrlError(
            f"mooncake cannot be loaded: {error}\n    hint: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
        ) from error
    return store


def program_of_master() -> str:
    """Mooncake's master of this environment (MissingExtraError where there is none)."""
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.is_file() else shutil.which("mooncake_master")
    if found is None:
        raise MissingExtraError("store", "mooncake")
    return found

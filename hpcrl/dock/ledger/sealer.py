"""Seals the files of a ledger that have ended: a thread of their writer compresses them, away from all work.

A file has ended when a later file counts, which says how many of its bytes are believed. The newest file is never
sealed, and a process seals only as long as its own file is the newest. A file with other bytes behind the believed ones
stays as it is (`hpcrl.storage.sealed_files`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from hpcrl.dock.ledger.entries import begun_files, ledger_files, trusted_sizes
from hpcrl.storage.sealed_files import remove_remains, seal_file

_log = logging.getLogger(__name__)
_SETTLE_S = 60.0
"""Pause in seconds before a new process seals files of earlier ones: it restores first, and a late process shows."""
_CLOSE_S = 2.0


def seal_ended_files(directory: Path, *, newest: str, stop: Callable[[], bool] = lambda: False) -> list[str]:
    """Seal the files of a ledger before the newest one; return the names of those that were sealed now.

    Temporary files of processes that were killed while they sealed are removed.

    Parameters
    ----------
    newest:
        File of the caller; nothing is sealed where another one is the newest that counts.
    stop:
        As for `hpcrl.storage.sealed_files.seal_file`.

    Raises
    ------
    OSError, ValueError
        A file cannot be read or written; it stays as it is.
    """
    sealed: list[str] = []
    files = begun_files(ledger_files(directory))
    if not files or files[-1][0].name != newest:
        return sealed
    remove_remains(directory)
    sizes = trusted_sizes(files)
    for path, _ in files[:-1]:
        if path.is_file() and not stop() and seal_file(path, size=sizes.get(path.name, -1), stop=stop):
            sealed.append(path.name)
    return sealed


class LedgerSealer:
    """Thread that seals ended files of a ledger when it is asked to; its failures cost only space."""

    def __init__(self, directory: Path, newest: Callable[[], str]) -> None:
        """Start; files of earlier processes are sealed after a while.

        Parameters
        ----------
        newest:
            Returns the name of the file that is written now.
        """
        self._directory, self._newest = directory, newest
        self._asked, self._ends, self._refused = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ledger-sealer", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Ask for a look at the files; the caller does not wait."""
        self._asked.set()

    def close(self) -> None:
        """End; a file that is being sealed stays as it is."""
        self._ends.set()
        self._asked.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self._asked.wait(_SETTLE_S)
        while not self._ends.is_set():
            self._asked.clear()
            self._seal()
            self._asked.wait()

    def _seal(self) -> None:
        try:
            seal_ended_files(self._directory, newest=self._newest(), stop=self._ends.is_set)
        except (OSError, ValueError) as error:
            if not self._refused:
                _log.warning("files of the ledger of rollouts are not compressed now: %s", error)
            self._refused = True
        else:
            self._refused = False

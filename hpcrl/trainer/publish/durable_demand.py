"""Waiting for a reader that asks for a version which is only announced: ranks have its bytes until the next version."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hpcrl.errors import HandoffError
from hpcrl.trainer.parallel.ranks import Ranks

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Seconds between two looks at what readers ask for; the next version waits for the end of one."""


class DurableDemand:
    """Looks for requests of readers while nothing else is published. All ranks call `wait` together."""

    def __init__(self, ranks: Ranks, wanted: Callable[[], int | None] | None) -> None:
        """Prepare; nothing is read.

        Parameters
        ----------
        ranks:
            Publishing ranks.
        wanted:
            Returns the newest version that a reader asks for; called on rank 0. None: no reader can ask.
        """
        self._ranks, self._wanted = ranks, wanted
        self._ended = threading.Event()

    def begin(self) -> None:
        """Allow the next `wait` to last."""
        self._ended.clear()

    def end(self) -> None:
        """End a `wait` on all ranks, soon: another version, or the end of the process, needs the thread."""
        self._ended.set()

    def wait(self, version: int) -> bool:
        """Return whether a reader asks for ``version``; False once `end` was called on any rank. Collective."""
        if self._wanted is None:
            return False
        while True:
            ended = self._ended.wait(_LOOK_S)
            asked = self._ranks.rank == 0 and self._is_wanted(version)
            answers = self._ranks.gather((ended, asked))
            if any(asked for _, asked in answers):
                return True
            if any(ended for ended, _ in answers):
                return False

    def _is_wanted(self, version: int) -> bool:
        assert self._wanted is not None
        try:
            return self._wanted() == version
        except HandoffError as error:
            _log.warning("whether a reader asks for version %d is not known: %s", version, error)
            return False

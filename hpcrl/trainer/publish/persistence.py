"""Retries of transient refusals of a filesystem: a full disk, a used-up quota, a stale handle.

All ranks retry together. The rank that failed decides whether its failure is transient, and rank 0 how long it has
lasted, so that all ranks decide alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcrl.errors import HandoffError, PeerLostError
from hpcrl.storage.disk_space import ShortageError, describe_space
from hpcrl.storage.retry import is_transient
from hpcrl.trainer.parallel.mesh import is_lost_rank
from hpcrl.trainer.parallel.ranks import Ranks

_log = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class Persistence:
    """Repeats what all ranks do together.

    Parameters
    ----------
    ranks:
        Ranks that retry together.
    root:
        Directory of the writes; its free space is reported if they fail.
    limit_s:
        Timeout in seconds of all tries; 0: one try.
    on_refused:
        Called once for what is tried again, on rank 0, with words for people.

    Attributes
    ----------
    trying:
        Whether a refused write is being retried: a caller that waits for it is not hung.
    """

    def __init__(self, ranks: Ranks, root: Path, *, limit_s: float, on_refused: Callable[[str], None]) -> None:
        self._ranks, self._root, self._limit_s, self._on_refused = ranks, root, limit_s, on_refused
        self.trying = False

    def persist(self, what: str, action: Callable[[], T], on_retry: Callable[[], None] = lambda: None) -> T:
        """Return what ``action`` does, the first time that it works. Collective.

        Parameters
        ----------
        what:
            Description of the write, for messages.
        action:
            Fails on all ranks or on none, as `hpcrl.trainer.parallel.ranks.Ranks.all_succeed` does.
        on_retry:
            Called before each new try.

        Raises
        ------
        HandoffError
            It was refused for ``limit_s``: the message names the rank, the duration and the free space.
        Exception
            Of ``action``, where trying again is of no use.
        """
        if not self._limit_s:
            return action()
        began, tries, pause_s = time.monotonic(), 0, _FIRST_PAUSE_S
        try:
            while True:
                tries += 1
                try:
                    result = action()
                except Exception as error:
                    if is_lost_rank(error):
                        raise  # the ranks can no longer agree: one of them is lost
                    self._agree_on_retry(error, what, tries, time.monotonic() - began)
                else:
                    if tries > 1 and self._ranks.rank == 0:
                        _log.warning("%s was written after %.1f s, at try %d", what, time.monotonic() - began, tries)
                    return result
                self.trying = True
                on_retry()
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            self.trying = False

    def _agree_on_retry(self, error: Exception, what: str, tries: int, lasted_s: float) -> None:
        """Return if all ranks retry; raise the error if they do not. Collective."""
        # a rank that lost a peer has no failure of its own: the failed rank decides whether it is transient
        own = None if isinstance(error, PeerLostError) else is_transient(error) or isinstance(error, ShortageError)
        said = "" if own is None else f"{error}; {describe_space(self._root)}"
        reports = self._ranks.gather((own, said, lasted_s))
        failures = [own for own, _, _ in reports if own is not None]
        if not failures or not all(failures):
            raise error
        over = reports[0][2] >= self._limit_s
        if own is None and over:
            raise error
        if over:
            raise HandoffError(
                f"{what} could not be written in {lasted_s:.0f} s ({tries} tries): {said}\n"
                "    hint: check space, quota and servers of the filesystem, then hpcrl resume; "
                "handoff.retry_s is the time for which a write is tried again"
            ) from error
        if self._ranks.rank == 0 and tries == 1:
            first = next(said for _, said, _ in reports if said)
            words = f"{what} cannot be written, trying again for {self._limit_s:g} s: {first}"
            _log.warning("%s", words)
            self._on_refused(words)

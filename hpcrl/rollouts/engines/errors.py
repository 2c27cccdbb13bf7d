"""Errors of requests to an engine."""

from __future__ import annotations

from hpcrl.errors import HpcrlError


class EngineError(Exception):
    """Raised where an engine did not answer a request, or answered with an error.

    Attributes
    ----------
    retryable:
        Whether it may work elsewhere or later. A request that the engine understood and refused will not.
    unreachable:
        Whether there was no answer, or not the end of one.
    refused:
        Whether the connection was refused: the process is gone, or not ready yet.
    forgot:
        Whether the engine answered with weights that this run did not load into it: it was restarted.
    untaken:
        Whether a router reports that none of its engines accepts requests now: the request was not processed.
    timed_out:
        Whether the request timed out: the engine may be running and hang.
    status:
        Status of the answer; None where there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        unreachable: bool = False,
        refused: bool = False,
        forgot: bool = False,
        timed_out: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.timed_out, self.status, self.untaken = timed_out, status, False
        self.retryable, self.unreachable, self.refused, self.forgot = retryable, unreachable, refused, forgot


class EngineProtocolError(EngineError, HpcrlError):
    """Raised where training cannot use an answer: damaged, no version, no log-probabilities, wrong counts.

    The request is repeated on another engine, and the answer counts against the engine (`hpcrl.rollouts.engines.pool`).
    """

"""What goes wrong with a request to an engine."""

from __future__ import annotations

from hpcrl.errors import HpcrlError

__all__ = ["EngineError", "EngineProtocolError"]


class EngineError(Exception):
    """An engine did not answer a request, or answered with an error.

    Attributes
    ----------
    retryable:
        Whether it may work elsewhere or later. A request that the engine understood and refused will not.
    unreachable:
        Whether there was no answer, or not the end of one.
    refused:
        Whether nobody listens there: the process is gone, or not ready yet.
    forgot:
        Whether the engine answered with weights that it was not given by us: it was started anew.
    untaken:
        Whether a router says that none of its engines takes requests now: nobody has worked on it.
    timed_out:
        Whether the time for an answer ran out: the engine may live, and hang.
    status:
        Of the answer; None where there was none.
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
    """An engine answers in a way that training cannot use: damaged, no version, no log-probabilities, wrong counts.

    The request is made elsewhere, and the answer counts against the engine (`hpcrl.rollouts.engines.pool`).
    """

"""Authentication of all HTTP servers of hpcrl: a request without the run's token is refused, on every path.

Unknown paths are refused like known ones, and before the body of a request is read. Refusals are counted, and logged
at a bounded rate, so that strangers cannot fill the disk with them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.errors import UsageError
from hpcrl.network.connection_limits import PendingConnections
from hpcrl.network.credentials import Credentials, Refusal
from hpcrl.reporting.log_limits import MAX_CHARACTERS, LogBudget
from hpcrl.reporting.screen_text import visible_line

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware

_log = logging.getLogger(__name__)


class RefusedRequest(NamedTuple):
    """A refusal that is logged.

    Attributes
    ----------
    server:
        Name of the server.
    peer:
        Address that the request came from.
    requests:
        Refused requests that this one stands for, itself included.
    """

    server: str
    peer: str
    method: str
    path: str
    reason: str
    requests: int


Report = Callable[[RefusedRequest], None]


class Gate:
    """Decides which requests a server answers.

    Attributes
    ----------
    credentials:
        Credentials of the run; None outside of one.
    refused:
        Requests that were refused so far.
    pending:
        Connections of the server that brought no request yet which is answered.
    """

    def __init__(
        self,
        server: str,
        credentials: Credentials | None,
        *,
        report: Report = lambda refused: None,
        open_health: bool = False,
    ) -> None:
        """Prepare.

        Parameters
        ----------
        server:
            Name of the server, for reports.
        credentials:
            Credentials of the run. None: outside of a run; every request is answered, see `check_host`.
        report:
            Called with refusals.
        open_health:
            Answer ``GET /health`` without a token. Its answer must be empty.
        """
        self.credentials = credentials
        self._server, self._report = server, report
        self._open_health = open_health
        self._budget = LogBudget()
        self._untold: RefusedRequest | None = None
        self._later: asyncio.TimerHandle | None = None
        self.refused = 0
        self.pending = PendingConnections()

    @property
    def headers(self) -> dict[str, str]:
        """Return headers for requests to the same kind of server elsewhere in the run."""
        return {} if self.credentials is None else self.credentials.headers

    def check_host(self, host: str) -> None:
        """Check that the server may listen on ``host``.

        Raises
        ------
        UsageError
            The server has no credentials and ``host`` is reachable from other machines.
        """
        if self.credentials is None and not is_loopback(host):
            raise UsageError(
                f"{self._server} would answer every client that reaches {host}\n"
                "    hint: listen on 127.0.0.1, or --token-file FILE (mode 0600, 64 hexadecimal digits)"
            )

    def refusal(
        self, method: str, path: str, authorization: str | None, peer: str, *, connection: Hashable = None
    ) -> Refusal | None:
        """Return why a request is not answered, and report that; None where it is answered.

        Parameters
        ----------
        connection:
            Key of the connection in `pending`. It is admitted once a request proves that it belongs to the run.
        """
        refusal = None
        if self.credentials is not None:
            if self.is_open(method, path):
                return None
            refusal = self.credentials.refusal(method, path, authorization)
        if refusal is None:
            self.pending.admitted(connection)
        else:
            self._tell(peer, method, path, refusal.reason)
        return refusal

    def is_open(self, method: str, path: str) -> bool:
        """Return whether such a request is answered without a token; the connection must be closed after it."""
        return self.credentials is not None and self._open_health and method == "GET" and path == "/health"

    def middleware(self) -> Middleware:
        """Make the middleware for aiohttp's servers; it must be the outermost one."""
        from aiohttp import web  # noqa: PLC0415 - not needed by other servers

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            authorization = request.headers.get("Authorization")
            refusal = self.refusal(
                request.method, request.path, authorization, request.remote or "", connection=request.transport
            )
            if refusal is None:
                response = await handler(request)
                if self.is_open(request.method, request.path):
                    response.force_close()
                return response
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            answer = web.Response(status=refusal.status, text=refusal.message, headers=headers)
            answer.force_close()  # the rest of the request is not waited for
            return answer

        return guard

    def _tell(self, peer: str, method: str, path: str, reason: str) -> None:
        """Count a refusal, and report it now or with those that follow."""
        self.refused += 1
        requests = 1 if self._untold is None else self._untold.requests + 1
        method, path = visible_line(method, MAX_CHARACTERS), visible_line(path, MAX_CHARACTERS)
        self._untold = RefusedRequest(self._server, peer, method, path, reason, requests)
        if self._budget.take():
            self._now(self._untold)
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(self._budget.wait_s(), self._at_last)

    def _at_last(self) -> None:
        """Report what was refused since the last report."""
        self._later = None
        if self._untold is not None:
            self._budget.take()
            self._now(self._untold)

    def _now(self, refused: RefusedRequest) -> None:
        self._untold = None
        _log.warning(
            "refused %d requests, the last: %s %s from %s (%s)",
            refused.requests,
            refused.method,
            refused.path,
            refused.peer,
            refused.reason,
        )
        try:
            self._report(refused)
        except OSError as error:  # the disk's trouble must not become that of an answer
            _log.warning("a refusal cannot be recorded: %s", error)


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on ``host`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

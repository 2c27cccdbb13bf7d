"""Access to a board: for the bearer of its token, by names of this machine, with requests that change nothing.

A browser sends requests of any page that it shows to a server on this machine. The token keeps other users and pages
out. The ``Host`` header keeps out pages whose name was pointed at this machine (DNS rebinding). Nothing that a page
contains comes from elsewhere, and no other page can frame it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlencode

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from markupsafe import escape

from hpcrl.network.connection_limits import PendingConnections

_log = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine for itself; a forwarded port has them, too."""
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?", re.IGNORECASE)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WELCOME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">
<link rel="icon" href="data:,"><title>hpcrl board</title></head><body><p><a href="{url}">The board</a></p></body></html>
"""


class BoardAccess:
    """Decides which requests a board answers.

    Parameters
    ----------
    token:
        The secret of the link.
    names:
        Names of hosts by which it may be asked, in addition to those of loopback.
    """

    def __init__(self, token: str, names: Collection[str] = ()) -> None:
        self._token = token
        self._names = LOOPBACK_NAMES | {name.lower() for name in names}
        # a name for each board: cookies do not know ports, and several boards may be open in a browser
        self._cookie = f"hpcrl-board-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        self.pending = PendingConnections()

    def refusal(self, host: str, method: str, cookie: str | None) -> tuple[HTTPStatus, str] | None:
        """Return the status and the reason why a request is refused; None where it is answered."""
        found = _HOST.fullmatch(host)
        name = "" if found is None else (found["six"] or found["name"]).lower()
        if name not in self._names:
            return HTTPStatus.FORBIDDEN, "this board has another host name: use the link that `hpcrl board` printed"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "this board is read-only: it answers GET and HEAD"
        if cookie is None or not self.is_token(cookie):
            return HTTPStatus.FORBIDDEN, "this board needs the link that `hpcrl board` printed, with its token"
        return None

    def is_token(self, given: str) -> bool:
        """Return whether a text is the token, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())

    def middleware(self) -> Middleware:
        """Return the middleware, which must be the outermost one."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.query.get("token")
            cookie = request.cookies.get(self._cookie) if given is None else given
            refusal = self.refusal(request.headers.get("Host", ""), request.method, cookie)
            response: web.StreamResponse
            if refusal is not None:
                status, reason = refusal
                response = web.Response(status=status, text=f"{reason}\n")
                response.force_close()  # the rest of the request is not waited for
            else:
                self.pending.admitted(request.transport)
                response = self._welcome(request) if given is not None else await _answer(request, handler)
            response.headers.update(_HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
            return response

        return guard

    def _welcome(self, request: web.Request) -> web.Response:
        """Return a page that keeps the token as a cookie, and goes to the address without it.

        A redirect would not do: a browser that comes from another site sends no such cookie with what follows it.
        """
        rest = urlencode([(name, value) for name, value in request.query.items() if name != "token"])
        # a path of two slashes would name another server
        url = "/" + request.rel_url.raw_path.lstrip("/") + (f"?{rest}" if rest else "")
        response = web.Response(text=_WELCOME.format(url=escape(url)), content_type="text/html")
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict", path="/")
        return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.Response(status=error.status, text=f"{error.reason}\n")

"""HTTP calls of one engine or router: each has a time limit, a maximum size of its answer, and one kind of error."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus

import aiohttp

from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.limits import CONTROL_BYTES


class EngineHttp:
    """Address of a server, and calls of it that fail with an `EngineError`."""

    def __init__(self, session: aiohttp.ClientSession, *, name: str, url: str) -> None:
        """Remember the address; nothing is sent."""
        self.name, self.url = name, url.rstrip("/")
        self._session = session

    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        max_bytes: int = CONTROL_BYTES,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """Send a request and read its answer whole.

        A request that is not a GET has its own connection. vLLM's server closes a connection after an answer 500, to
        this request or to an earlier one, and a request on such a connection fails as if the engine were gone. aiohttp
        repeats a GET by itself.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            session = self._session
            if method != "GET":
                connector = aiohttp.TCPConnector(force_close=True)
                fresh = aiohttp.ClientSession(connector=connector, headers=self._session.headers)
                session = await stack.enter_async_context(fresh)
            answer = await stack.enter_async_context(
                self._answer(method, path, body, headers, timeout, session=session)
            )
            data = await self._body(path, answer, max_bytes)
        if answer.status != 200:
            raise self._refusal(path, answer.status, data)
        return data

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: bytes | bytearray | None,
        headers: dict[str, str] | None,
        timeout: aiohttp.ClientTimeout,
        *,
        session: aiohttp.ClientSession | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response while it arrives; convert every failure to `EngineError`."""
        try:
            async with (session or self._session).request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                yield answer
        except TimeoutError as error:
            limit_s = timeout.total or timeout.sock_read
            what = f"no answer to {path} within {limit_s:g} s"
            raise EngineError(f"{self.name}: {what}", unreachable=True, timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            refused = isinstance(error, aiohttp.ClientConnectorError)
            raise EngineError(f"{self.name}: {path} failed: {what}", unreachable=True, refused=refused) from error

    async def _body(self, path: str, answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """Return the whole body of an answer (EngineProtocolError where it is too long)."""
        return b"".join([piece async for piece in self._pieces(path, answer, max_bytes)])

    async def _pieces(self, path: str, answer: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield a body as it arrives. Its length is bounded: a peer may send without end, or a few bytes of gzip."""
        left = max_bytes if answer.status == HTTPStatus.OK else CONTROL_BYTES
        async for piece in answer.content.iter_any():
            left -= len(piece)
            if left < 0:
                raise EngineProtocolError(f"{self.name}: {path} answered with more bytes than the maximum")
            yield piece

    def _refusal(self, path: str, status: int, data: bytes) -> EngineError:
        text = data[:500].decode(errors="replace").strip()
        # 429 and 5xx may be transient; other refusals concern the request itself
        retryable = status == 429 or status >= 500
        return EngineError(f"{self.name}: {path} answered {status}: {text}", retryable=retryable, status=status)

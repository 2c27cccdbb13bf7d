"""Client of a router: requests go to its one address, engines are added to it and removed from it.

The admin calls are vllm-router's. It forwards unknown calls to an arbitrary engine, so calls that change an engine are
never sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

import aiohttp
import msgspec

from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.limits import AnswerLimits
from hpcrl.storage.msgspec_types import decode_json

_UPSTREAM = frozenset({502, 503, 504})
"""Statuses that mean that no engine accepted the request, or that one was lost with it."""


class Worker(msgspec.Struct, frozen=True):
    """Engine as the router sees it.

    Attributes
    ----------
    is_healthy:
        Result of the router's health checks; it sends requests only to healthy engines.
    load:
        Requests that it has sent to the engine and that were not answered yet.
    """

    url: str
    is_healthy: bool = True
    load: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class _Workers(msgspec.Struct, frozen=True):
    workers: list[Worker]


class RouterClient(EngineClient):
    """Client of a router, with the interface of an engine for requests.

    Attributes
    ----------
    behind:
        The engines behind it, from which rows of answers are fetched directly.
    """

    # it chooses by the prompt, and reads JSON
    alone_reads_requests = False

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        name: str,
        url: str,
        hands_on_content_types: bool = False,
        limits: AnswerLimits | None = None,
    ) -> None:
        """Remember the address of the router; nothing is sent.

        Parameters
        ----------
        session, name, url, limits:
            Same as for `EngineClient`.
        hands_on_content_types:
            Whether the content type of an answer is the engine's. vllm-router labels every stream as events, so that
            frames could not be distinguished from them.
        """
        super().__init__(session, name=name, url=url, limits=limits)
        self.behind: Callable[[], Sequence[EngineClient]] = tuple
        if not hands_on_content_types:
            self.accepts = "application/json, text/event-stream"

    def server_at(self, address: str) -> EngineClient | None:
        """See `EngineClient.server_at`."""
        return next((found for client in self.behind() if (found := client.server_at(address)) is not None), None)

    async def workers(self, *, timeout_s: float) -> dict[str, Worker]:
        """Return the engines that the router knows, by URL (EngineError where it does not answer)."""
        data = await self._request("GET", "/workers", timeout_s=timeout_s)
        try:
            return {worker.url.rstrip("/"): worker for worker in decode_json(data, _Workers).workers}
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.name}: its list of engines cannot be read: {error}") from error

    async def add(self, url: str, *, timeout_s: float) -> None:
        """Send requests to an engine from now on (EngineError where it does not take it)."""
        await self._request("POST", f"/add_worker?url={quote(url, safe='')}", timeout_s=timeout_s)

    async def remove(self, url: str, *, timeout_s: float) -> None:
        """Send no new requests to an engine; its running requests are still answered."""
        await self._request("POST", f"/remove_worker?url={quote(url, safe='')}", timeout_s=timeout_s)

    def _refusal(self, path: str, status: int, data: bytes) -> EngineError:
        error = super()._refusal(path, status, data)
        error.unreachable = status in _UPSTREAM
        error.untaken = status == HTTPStatus.SERVICE_UNAVAILABLE
        return error

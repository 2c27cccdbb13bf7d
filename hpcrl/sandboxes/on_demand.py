"""A daemon of sandboxes that is started with its first use, and anew where it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from hpcrl.sandboxes.client import local_sandboxes
from hpcrl.sandboxes.interface import SandboxHost, SandboxLostError

_Starter = TypeVar("_Starter")
_Started = TypeVar("_Started")
_log = logging.getLogger(__name__)


class SandboxesOnDemand(Generic[_Starter]):
    """Keeps what starts sandboxes, and replaces it when its daemon has ended.

    Parameters
    ----------
    make:
        Makes it of the host of a new daemon.
    backend:
        Program that makes sandboxes, as of `hpcrl.sandboxes.client.SandboxDaemon`.
    """

    def __init__(self, make: Callable[[SandboxHost], _Starter], *, backend: str = "bubblewrap") -> None:
        """Prepare; nothing is started."""
        self._make, self._backend = make, backend
        self._starter: _Starter | None = None
        self._starting: asyncio.Lock | None = None
        self._open = contextlib.AsyncExitStack()

    async def start(self, call: Callable[[_Starter], Awaitable[_Started]]) -> tuple[_Starter, _Started]:
        """Start a sandbox; where the daemon has ended, with a new one.

        Parameters
        ----------
        call:
            Starts the sandbox.

        Returns
        -------
        tuple
            What started it, and the sandbox.

        Raises
        ------
        SandboxError
            It cannot be started; with the new daemon neither.
        """
        starter = await self._ready()
        try:
            return starter, await call(starter)
        except SandboxLostError as error:
            _log.warning("sandboxes are started anew: %s", error)
        if self._starter is starter:
            # all sandboxes of the old one are lost already
            self._starter, lost, self._open = None, self._open, contextlib.AsyncExitStack()
            await lost.aclose()
        starter = await self._ready()
        return starter, await call(starter)

    async def aclose(self) -> None:
        """End the daemon and all its sandboxes."""
        await self._open.aclose()

    async def _ready(self) -> _Starter:
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._starter is None:
                self._starter = self._make(await self._open.enter_async_context(local_sandboxes(backend=self._backend)))
            return self._starter

"""Readiness: asking a replica whether it does its work now. One of several servers is ready when all of them are."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp

from hpcrl.config.plan import FileProbe, HttpProbe
from hpcrl.network.credentials import Credentials
from hpcrl.supervisor.launch.replica_launcher import Address

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_REQUEST_TIMEOUT_S = 5.0


class Prober:
    """Waits until one replica is ready. `problem` is the result of the last probe, for the message of a deadline."""

    def __init__(
        self, probe: HttpProbe | FileProbe, *, address: Address, ready_file: Path, credentials: Credentials
    ) -> None:
        self._probe, self._address, self._ready_file = probe, address, ready_file
        self._headers = credentials.headers
        self.problem = "not probed yet"

    async def wait(self) -> None:
        """Probe until the replica is ready. The caller sets the deadline."""
        pause_s = _FIRST_PAUSE_S
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        # no proxy from the environment: roles of a run talk to each other directly
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False, headers=self._headers) as session:
            while not await self._once(session):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    async def _once(self, session: aiohttp.ClientSession) -> bool:
        if isinstance(self._probe, FileProbe):
            return await asyncio.to_thread(self._file_is_there)
        path = self._probe.path
        problems = await asyncio.gather(*(_problem(session, url + path) for url in self._address.urls))
        found = [problem for problem in problems if problem]
        if found:
            others = len(found) - 1
            more = f" (and {others} other{'s' if others > 1 else ''} of {len(problems)} servers)" if others else ""
            self.problem = found[0] + more
        return not found

    def _file_is_there(self) -> bool:
        # a listing, because an NFS client may remember for a minute that a name did not exist
        self.problem = f"it has not written {self._ready_file.name}"
        try:
            return self._ready_file.name in os.listdir(self._ready_file.parent)
        except OSError as error:  # asked again until the deadline
            self.problem += f", as far as can be seen: {error}"
            return False


async def _problem(session: aiohttp.ClientSession, url: str) -> str:
    """Return why ``GET url`` did not answer 200; empty if it did."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return "" if response.status == 200 else f"GET {url} answered {response.status}"
    except TimeoutError:
        return f"GET {url} had no answer for {_REQUEST_TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        return f"GET {url}: {error}"

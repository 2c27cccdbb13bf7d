"""The file by which roles find each other: written before any of them starts, and when elastic members change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hpcrl.config.plan import Role
from hpcrl.errors import DeadlineError
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.role import Endpoints, Member
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.launch.replica_launcher import Address

_WRITTEN_S = 60.0


class EndpointsFile:
    """The endpoints of an attempt (`hpcrl.runs.role.Endpoints`)."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._file = ReportedFile(Endpoints.path(run, attempt))
        self._urls: dict[str, list[str]] = {}
        self._servers: dict[str, list[tuple[str, ...]]] = {}

    def add(self, role: Role, address: Address) -> None:
        """Add the address of a replica, which does not change during the attempt."""
        self._urls.setdefault(role.value, []).append(address.url)
        if address.servers:
            self._servers.setdefault(role.value, []).append(address.urls)

    def write(self, members: Mapping[str, Sequence[Member]]) -> None:
        """Write the added addresses and the elastic members by role to the file; never waits or fails."""
        found = {role: list(there) for role, there in members.items()}
        self._file.put(Endpoints(urls=self._urls, servers=self._servers, members=found).encode())

    async def wait_written(self) -> None:
        """Wait for the file: without it no role can begin (DeadlineError where the filesystem refuses it)."""
        if not await asyncio.to_thread(self._file.flush, _WRITTEN_S):
            raise DeadlineError(
                f"{self._file.path} could not be written within {_WRITTEN_S:g} s\n"
                "    hint: look at the filesystem of the run; then hpcrl resume"
            )

"""Client of a wide replica: several ranks with an API server each, which are used and updated as one engine.

Its ranks share their experts, so that every step of the model is one of all ranks. All ranks must compute with the same
weights, and a call that pauses or resumes ranks is answered when all have received it: vLLM's ranks agree on a pause
among themselves, and wait for each other before they resume. So each call that changes state goes to all servers at
once, and later calls wait for the answers of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import aiohttp

from hpcrl.rollouts.core.prompts import PromptTokens
from hpcrl.rollouts.engines.answers import OnPart
from hpcrl.rollouts.engines.client import EngineClient, EngineError, Generation, SamplingParams
from hpcrl.rollouts.engines.limits import AnswerLimits

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_SESSIONS = 4096
"""Maximum number of remembered sessions; a forgotten one may miss the prefix that another rank has cached."""


def client_of(
    session: aiohttp.ClientSession,
    *,
    name: str,
    url: str,
    servers: Sequence[str],
    limits: AnswerLimits | None = None,
) -> EngineClient:
    """Return the client of a replica, for its one server or for all of them.

    Parameters
    ----------
    session:
        Shared by all engines; closed by its owner.
    name:
        ``<role>-<replica>``, for messages.
    url:
        URL of the first server.
    servers:
        URLs of all servers in the order of ranks; may be empty where there is one.
    limits:
        Limits of the answers of the model.
    """
    if len(servers) < 2:
        return EngineClient(session, name=name, url=url, limits=limits)
    return ReplicaClient(session, name=name, urls=servers, limits=limits)


class ReplicaClient(EngineClient):
    """Calls of one replica of several servers. To the rest of the orchestrator it is one engine.

    A request goes to one server, and those of its session after it. All other calls go to all servers, at once; they
    fail with the first that does.
    """

    def __init__(
        self, session: aiohttp.ClientSession, *, name: str, urls: Sequence[str], limits: AnswerLimits | None = None
    ) -> None:
        """Remember where the servers are; nothing is sent.

        Parameters
        ----------
        urls:
            At least two, in the order of ranks.
        limits:
            Limits of the answers of its model.
        """
        assert len(urls) > 1, "use EngineClient for a replica of one server"
        super().__init__(session, name=name, url=urls[0], limits=limits)
        self._servers = tuple(
            EngineClient(session, name=f"{name} rank {rank}", url=url, limits=limits) for rank, url in enumerate(urls)
        )
        self._in_flight = [0] * len(urls)
        #: rank of each session, the one that was used last at the end
        self._ranks: OrderedDict[str, int] = OrderedDict()
        self._sessions = [0] * len(urls)

    @property
    def servers(self) -> tuple[EngineClient, ...]:
        """Return the servers (see `EngineClient.servers`)."""
        return self._servers

    async def generate(
        self,
        token_ids: PromptTokens,
        params: SamplingParams,
        *,
        cache_salt: str,
        session_id: str,
        timeout_s: float,
        on_part: OnPart = lambda tokens, logprobs, experts: None,
        rows: bool = True,
    ) -> Generation:
        """See `EngineClient.generate`; a new session goes to the server with the least to do."""
        rank = self._rank_of(session_id)
        self._in_flight[rank] += 1
        try:
            return await self._servers[rank].generate(
                token_ids,
                params,
                cache_salt=cache_salt,
                session_id=session_id,
                timeout_s=timeout_s,
                on_part=on_part,
                rows=rows,
            )
        finally:
            self._in_flight[rank] -= 1

    def _rank_of(self, session_id: str) -> int:
        rank = self._ranks.pop(session_id, None)
        if rank is None:
            ranks = range(len(self._servers))
            rank = min(ranks, key=lambda r: (self._in_flight[r], self._sessions[r]))
            self._sessions[rank] += 1
        self._ranks[session_id] = rank
        if len(self._ranks) > _SESSIONS:
            _, forgotten = self._ranks.popitem(last=False)
            self._sessions[forgotten] -= 1
        return rank

    async def problem(self, *, timeout_s: float) -> EngineError | None:
        """Return the combined error of the servers that do not answer 200; None where all do.

        One such server is enough: without it no other rank can compute.
        """
        found = await asyncio.gather(*(server.problem(timeout_s=timeout_s) for server in self._servers))
        problems = [problem for problem in found if problem is not None]
        if not problems:
            return None
        # the most serious one: connection refused, then an invalid answer, then a timeout
        worst = min(problems, key=lambda problem: (not problem.refused, problem.unreachable))
        message = f"{len(problems)} of {len(self._servers)} servers are not healthy: {worst}"
        return EngineError(message, unreachable=worst.unreachable, refused=worst.refused, timed_out=worst.timed_out)

    async def weight_labels(self, *, timeout_s: float) -> list[str | None]:
        """See `EngineClient.weight_labels`."""
        return list(await asyncio.gather(*(server.weight_version(timeout_s=timeout_s) for server in self._servers)))

    async def is_paused(self, *, timeout_s: float) -> bool:
        """Return whether all servers report that requests are frozen.

        A rank reports this before it has stopped: it runs empty steps until the other ranks have been asked as well.
        """
        return all(await asyncio.gather(*(server.is_paused(timeout_s=timeout_s) for server in self._servers)))

    async def freeze(self, *, timeout_s: float) -> asyncio.Task[Any] | None:
        """Freeze requests on all ranks; when this returns no rank computes any more.

        Nothing less than the answers of all says so: `is_paused` is true of a rank that still takes part in steps.
        """
        await self.control("/pause?mode=keep&clear_cache=false", timeout_s=timeout_s)
        return None

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """Send a control call to all servers at once with ``POST``; return their common answer.

        Raises
        ------
        EngineError
            Of the first server that fails; or they answer differently.
        """
        answers = await _all(server.control(path, value, timeout_s=timeout_s) for server in self._servers)
        return self._common(path, answers)

    def _common(self, path: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one combined answer; values of workers are listed rank after rank."""
        common, *rest = [{key: value for key, value in answer.items() if key != "results"} for answer in answers]
        for rank, other in enumerate(rest, 1):
            if other != common:
                raise EngineError(f"{self.name}: rank {rank} answers {path} with {other}, rank 0 with {common}")
        results = [result for answer in answers for result in answer.get("results", ())]
        return {**common, "results": results} if results else common


async def _all(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of all calls; the first failure cancels the others, which may wait for the failed one."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # each result is retrieved, because asyncio logs exceptions that are never retrieved
        await asyncio.gather(*tasks, return_exceptions=True)

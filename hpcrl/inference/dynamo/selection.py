"""Dynamo's choice of an engine: by what each has computed of a prompt already, and by what each has to do.

Dynamo's selection service runs in this process. Engines publish what enters and leaves their KV cache; it keeps an
index of that, and an account of the requests that it has placed. It forwards nothing: requests go to vLLM's own
servers, whose answers say which version of the weights sampled each token, and which take weight updates themselves.

Checked with ai-dynamo-runtime 1.6: an engine that publishes nothing is chosen by its load alone, and cached blocks
count only for requests with the ``cache_salt`` that they were computed with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hpcrl.errors import HpcrlError
from hpcrl.inference.dynamo.events import SaltedEvents

_log = logging.getLogger(__name__)

_INDEX_THREADS = 4
_LEAST_TTL_S = 1.0
"""Minimum time to live in seconds that Dynamo accepts."""


class NoEngineError(HpcrlError):
    """No engine can take a request now."""


@dataclass
class CandidateEngine:
    """An engine that requests can be sent to.

    Attributes
    ----------
    number:
        Its name in Dynamo; an engine that returns has a new one, because its cache is empty. None while it is not
        chosen.
    load:
        Requests that were sent there and not answered yet.
    failures:
        Consecutive health checks that it did not answer.
    """

    url: str
    number: int | None = None
    load: int = 0
    failures: int = 0


@dataclass(frozen=True)
class EngineChoice:
    """The engine that a request is sent to, and why.

    Attributes
    ----------
    cached_tokens:
        Tokens at the start of its prompt that are in the engine's cache.
    """

    worker: CandidateEngine
    selection_id: str
    cached_tokens: int


class Selection:
    """Engines to choose from. Belongs to one event loop."""

    def __init__(self, *, model: str, block_size: int, events_offset: int, session_ttl_s: float | None) -> None:
        """Begin without engines.

        Parameters
        ----------
        model:
            Name that engines serve.
        block_size:
            Tokens of a KV block, of all engines.
        events_offset:
            Offset of the port on which an engine publishes its KV events from that of its server.
        session_ttl_s:
            Seconds in which requests of a session go to the engine of its last one; None: cache and load decide.
        """
        # engines' environments have it, the control plane has not
        from dynamo._core import SelectionService  # noqa: PLC0415

        ttl_s = None if session_ttl_s is None else max(_LEAST_TTL_S, session_ttl_s)
        self._service = SelectionService(indexer_threads=_INDEX_THREADS, session_affinity_ttl_secs=ttl_s)
        self._model, self._block_size, self._events_offset = model, block_size, events_offset
        self.workers: dict[str, CandidateEngine] = {}
        self._chosen: dict[int, CandidateEngine] = {}
        self._events: dict[int, SaltedEvents] = {}
        self._numbers, self._ids = itertools.count(1), itertools.count(1)
        self._changes = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def enter(self, worker: CandidateEngine) -> None:
        """Let an engine be chosen from now on. It completes even if its caller disconnects meanwhile."""
        await asyncio.shield(self._in_background(self._enter(worker)))

    async def leave(self, worker: CandidateEngine) -> None:
        """Stop choosing an engine; its running requests continue. Completes like `enter`."""
        await asyncio.shield(self._in_background(self._leave(worker)))

    async def _enter(self, worker: CandidateEngine) -> None:
        async with self._changes:
            if worker.number is not None:
                return
            address, number = urlsplit(worker.url), next(self._numbers)
            events = SaltedEvents(f"tcp://{address.hostname}:{(address.port or 0) + self._events_offset}")
            try:
                await self._service.upsert_worker(
                    {
                        "worker_id": number,
                        "model_name": self._model,
                        "endpoint": worker.url,
                        "block_size": self._block_size,
                        "data_parallel_start_rank": 0,
                        "data_parallel_size": 1,
                        "kv_events_endpoints": {0: events.endpoint},
                    }
                )
            except BaseException:
                await events.close()
                raise
            worker.number, self._chosen[number], self._events[number] = number, worker, events

    async def _leave(self, worker: CandidateEngine) -> None:
        async with self._changes:
            number, worker.number = worker.number, None
            if number is not None:
                del self._chosen[number]
                await self._service.delete_worker(number)
                await self._events.pop(number).close()

    @contextlib.asynccontextmanager
    async def chosen(
        self, token_ids: list[int], *, salt: str | None, session: str | None
    ) -> AsyncIterator[EngineChoice]:
        """Choose the engine of a request, which counts as its load while the context is open.

        Raises
        ------
        NoEngineError
            No engine is available.
        """
        selection_id = str(next(self._ids))
        request: dict[str, Any] = {"selection_id": selection_id, "model_name": self._model, "token_ids": token_ids}
        if salt is not None:
            request["cache_salt"] = salt
        if session is not None:
            request["session_id"] = session
        # not awaited directly: if the client disconnects meanwhile, the booking must still be released
        booking = asyncio.ensure_future(self._book(request))
        worker: CandidateEngine | None = None
        try:
            choice = await asyncio.shield(booking)
            worker = choice.worker
            worker.load += 1
            yield choice
        finally:
            if worker is not None:
                worker.load -= 1
            self._in_background(self._free(selection_id, booking))

    async def prefilled(self, choice: EngineChoice) -> None:
        """Reduce the load of a request whose prompt has been computed."""
        with self._tolerant(choice.selection_id):
            await self._service.prefill_complete(choice.selection_id)

    async def close(self) -> None:
        """End Dynamo's listeners."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self._chosen.values()):
            await self.leave(worker)
        self._service.shutdown()

    async def _book(self, request: dict[str, Any]) -> EngineChoice:
        if not self._chosen:
            raise NoEngineError("no engine can be chosen: none was added, or none is healthy")
        from dynamo._core import SelectionServiceError  # noqa: PLC0415

        try:
            answer = await self._service.select_and_reserve(request)
        except SelectionServiceError as error:
            raise NoEngineError(f"no engine can be chosen: {error}") from error
        worker = self._chosen.get(answer["worker_id"])
        if worker is None:
            raise NoEngineError("the engine that was chosen has just gone away")
        return EngineChoice(worker, request["selection_id"], answer["overlap"]["longest_matched"])

    async def _free(self, selection_id: str, booking: asyncio.Future[EngineChoice]) -> None:
        await asyncio.wait([booking])
        if not booking.cancelled() and booking.exception() is None:
            with self._tolerant(selection_id):
                await self._service.free_reservation(selection_id)

    @contextlib.contextmanager
    def _tolerant(self, selection_id: str) -> Iterator[None]:
        """Ignore errors of load accounting: it is advisory, and an engine that left has no account any more."""
        from dynamo._core import SelectionServiceError  # noqa: PLC0415

        try:
            yield
        except SelectionServiceError as error:
            _log.debug("request %s: %s", selection_id, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

"""One engine as the orchestrator knows it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcrl.rollouts.engines.client import EngineClient, EngineError

__all__ = ["Engine"]

_T = TypeVar("_T")


@dataclass(eq=False)
class Engine:
    """One engine and what is known of it.

    Attributes
    ----------
    version:
        Policy version it serves; -1 before the first.
    load:
        Rollouts assigned to it.
    open_for_new:
        Cleared while its weights change: a rollout that starts then could not say which version's cache it may
        use.
    unreachable_since:
        By the monotonic clock; None while it answers.
    away:
        It is gone or does not answer; what it was given is forgotten.
    missed:
        It went away, and has served nothing since. One that answers and cannot load what others serve is asked again
        and again, which is one absence.
    life:
        Counts how often it went away, and was found to be another process.
    refused:
        Nobody has listened there since it went away.
    proved_s:
        When it was seen last with the weights that we gave it, by the monotonic clock.
    stuck:
        It has requests and samples nothing: nothing new is sent there while another engine serves.
    why:
        What was wrong with it last.
    work:
        Calls of it that are under way.
    """

    client: EngineClient
    version: int = -1
    load: int = 0
    open_for_new: asyncio.Event = field(default_factory=asyncio.Event)
    unreachable_since: float | None = None
    away: bool = False
    missed: bool = False
    life: int = 0
    refused: bool = False
    proved_s: float = -math.inf
    stuck: bool = False
    why: str = ""
    work: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def serving(self) -> bool:
        """Whether something may be sent to it."""
        return self.version >= 0 and not self.away and self.unreachable_since is None

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something with the engine, for as long as it does not go away.

        Raises
        ------
        EngineError
            It went away meanwhile (``unreachable``), or what ``work`` raises.
        """
        life, task = self.life, asyncio.create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if life == self.life or (current is not None and current.cancelling()):
                raise
            raise EngineError(f"{self.name}: went away during a request", unreachable=True) from None

"""Environments that workers host, as the orchestrator sees them."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from hpcrl.config.environments import HostedEnv
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.process_calls import EnvironmentCalls, EnvironmentLostError
from hpcrl.rollouts.environments.workers.link import LinkEvents, WorkerLink
from hpcrl.runs.fleet import WorkerView
from hpcrl.runs.role import Member

_log = logging.getLogger(__name__)

_HOMES = 1 << 14
"""Maximum number of prompts of an environment whose worker is known."""


class EnvironmentWorkers:
    """All workers of an attempt.

    Attributes
    ----------
    links:
        The workers, by number; empty before `start`.
    """

    def __init__(self, *, events: LinkEvents, wait_timeout_s: float) -> None:
        """Prepare; `start` connects to the workers.

        Parameters
        ----------
        events:
            What is called when a worker is lost, or comes back.
        wait_timeout_s:
            Longest wait for a worker where none is there.
        """
        self.links: list[WorkerLink] = []
        self._events, self._wait_timeout_s = events, wait_timeout_s
        self._choices = itertools.count(1)

    def start(
        self,
        members: Sequence[Member],
        http: aiohttp.ClientSession,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> list[asyncio.Task[None]]:
        """Watch the workers, in tasks that ``spawn`` begins and that this returns.

        Parameters
        ----------
        http:
            Session for addresses of the run.
        """
        self.links = [WorkerLink(each.replica, each.url, http=http, events=self._events) for each in members]
        return [spawn(link.run()) for link in self.links]

    def views(self) -> list[WorkerView]:
        """Return what is known of each worker now."""
        return [
            WorkerView(replica=link.replica, up=link.up, calls=link.load, losses=link.losses) for link in self.links
        ]

    async def choose(self, name: str) -> WorkerLink:
        """Return the worker with the fewest calls for environment ``name``; wait for one where none is there.

        Raises
        ------
        EnvironmentLostError
            None came back in time.
        """
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                while not any(link.up for link in self.links):
                    await self._wait_any()
        except TimeoutError:
            message = f"no worker of environments was there for {self._wait_timeout_s:g} s"
            raise EnvironmentLostError(message, ("env", sum(link.losses for link in self.links))) from None
        up = [link for link in self.links if link.up]
        # a worker whose process cannot be made has the fewest calls, and would get all
        good = [link for link in up if link.offers(name)] or up
        found = min(good, key=lambda link: (link.load, link.chosen))
        found.chosen = next(self._choices)
        return found

    async def _wait_any(self) -> None:
        waits = [asyncio.create_task(link.changed.wait()) for link in self.links]
        for link in self.links:
            link.changed.clear()
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def aclose(self) -> None:
        """End all connections."""
        await asyncio.gather(*(link.aclose() for link in self.links))


class RemoteEnvironment:
    """Environment that workers host. Rollouts of a prompt stay at the worker that made it, as long as it is there."""

    def __init__(self, config: HostedEnv, workers: EnvironmentWorkers) -> None:
        self.name, self._config, self._workers = config.name, config, workers
        self._homes: collections.OrderedDict[tuple[Split, int], WorkerLink] = collections.OrderedDict()

    def prompt(self, split: Split, index: int) -> Prompt:
        """Refuse: prompts of workers are awaited (`fetch_prompt`)."""
        raise NotImplementedError(f"environment {self.name!r} is hosted by workers: use await prompt_of(...)")

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Refuse: demonstrations are made where the environment has a process here."""
        raise NotImplementedError(f"environment {self.name!r} is hosted by workers, which give no demonstrations")

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt, of the worker with the fewest calls.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised, or did not answer within ``answer_timeout_s`` seconds.
        EnvironmentLostError
            Its process or the worker died or hung.
        """
        link, calls = await self._connected(split, index)
        try:
            return await calls.fetch_prompt(split, index)
        except EnvironmentLostError as error:
            # all rollouts of a group wait for their prompt, which another worker can make; once, and not where the
            # prompt may have ended the process
            if not link.lost_by(error):
                raise
        link, calls = await self._connected(split, index)
        return await calls.fetch_prompt(split, index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """See `hpcrl.rollouts.environments.Environment`.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised.
        EnvironmentLostError
            Its process or the worker died or hung.
        Exception
            What the policy raised, but for ValueError, which the environment sees.
        """
        _, calls = await self._connected(prompt.split, prompt.index)
        return await calls.rollout(prompt, policy)

    async def _connected(self, split: Split, index: int) -> tuple[WorkerLink, EnvironmentCalls]:
        """Return the worker of a prompt, and its calls; another one where the first gives no process."""
        link = await self._home(split, index)
        try:
            return link, await link.calls(self._config)
        except EnvironmentLostError as error:
            _log.warning("%s; another worker is asked", error)
        link = await self._home(split, index)
        return link, await link.calls(self._config)

    async def _home(self, split: Split, index: int) -> WorkerLink:
        """Return the worker of a prompt: the one that had it, or another where that one is away."""
        link = self._homes.get((split, index))
        if link is None or not link.offers(self.name):
            link = await self._workers.choose(self.name)
        self._homes[split, index] = link
        self._homes.move_to_end((split, index))
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        return link

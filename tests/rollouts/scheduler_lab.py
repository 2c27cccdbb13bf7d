"""One attempt of an orchestrator without processes: scheduler and desk are the real ones, and nothing is written.

Engines are a list of requests that a test answers in an order of its own, so that a batch can be waited for, built or
handed out for as long as it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from harness import make_recipe

from hpcrl.config.recipe import Recipe
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.rollouts.batches.build import Batch
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.server import BatchServer
from hpcrl.rollouts.core.records import Group, Rollout, StoredRollout
from hpcrl.rollouts.core.saved_turns import SavedTurn
from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.engines.client import Generation
from hpcrl.rollouts.environments import build_environments
from hpcrl.rollouts.environments.data_order import DataOrder, GroupTask
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.rendering import Parsed
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.scheduler import Scheduler

GROUPS, SIZE, BOUND = 3, 2, 1
TWO = [{"name": "a", "kind": "words"}, {"name": "b", "kind": "words", "task": "sort"}]


class Pool:
    """Requests that wait until they are answered, with the version that is served when they are sent."""

    def __init__(self, version: int) -> None:
        self.version, self.incarnation, self.name = version, 1, "pool"
        self.waiting: list[asyncio.Future[None]] = []
        #: groups whose requests are not answered
        self.slow: set[int] = set()
        #: version of the oldest request of each group
        self.versions: dict[int, int] = {}
        #: how often engines were told that something has changed
        self.notified = 0
        #: members of groups that have ended
        self.left = 0

    def session(self, key: str, rollouts: int = 1) -> Any:
        return SimpleNamespace(engine=self, index=int(key.removeprefix("group-")), leave=self._leave)

    def _leave(self) -> None:
        self.left += 1

    async def wait_open(self, session: Any) -> Pool:
        return self

    async def notify(self) -> None:
        self.notified += 1

    async def generate(
        self, session: Any, tokens: list[int], params: Any, *, cache_salt: Callable[[], Awaitable[str]], rows: bool
    ) -> Generation:
        version = int(await cache_salt())
        self.versions[session.index] = min(version, self.versions.get(session.index, version))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if session.index not in self.slow:
            self.waiting.append(answer)
        try:
            await answer
        finally:
            if answer in self.waiting:
                self.waiting.remove(answer)
        ids, logprobs = np.array([7, 2], np.int32), np.array([-0.5, -0.5], np.float32)
        return Generation(ids, logprobs, np.full(2, version, np.int32), "stop")


RENDERER: Any = SimpleNamespace(
    opening=lambda messages, *, tools: [7, 8],
    parse=lambda token_ids, *, said, tools, turn: Parsed("x"),
    stop_token_ids=(2,),
    cuts_thinking=False,
)


FILES: Any = SimpleNamespace(write=lambda step, lines, wait_s: None)


class Unwritten:
    """A journal that writes nothing, and remembers what became of groups."""

    full = False

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    async def finished(self, task: GroupTask, rollout: Rollout) -> StoredRollout:
        return StoredRollout.of(rollout, PayloadPlace("nowhere", 0, 0, ""))

    def turn(self, task: GroupTask, member: int, number: int, turn: SavedTurn) -> None:
        pass

    def kept(self, group: int) -> None:
        self.ended.append((group, "kept"))

    def dropped(self, group: int, members: Sequence[int], why: str, *, step: int | None = None) -> None:
        self.ended.append((group, f"{why}: {list(members)}, step {step}"))

    async def taken(self, step: int, groups: Sequence[Group]) -> None:
        pass

    def trained(self, step: int) -> None:
        pass


def through_bytes(state: OrchestratorState) -> OrchestratorState:
    """As from a checkpoint, with the finished groups that the ledger of rollouts gives it."""
    back = OrchestratorState.decode(state.encode())
    assert [group.index for group in back.logged] == [group.index for group in state.finished]
    return msgspec.structs.replace(back, finished=state.finished, logged=[])


class Desk(BatchServer):
    """Builds wait for a gate."""

    gate: threading.Event

    def _build_and_write(self, groups: list[Group], step: int, counters: dict[str, float], waited_s: float) -> Batch:
        assert self.gate.wait(20.0)
        return super()._build_and_write(groups, step, counters, waited_s)


class Life:
    """One attempt: scheduler, desk, and a trainer that has trained the steps before."""

    def __init__(self, recipe: Recipe, state: OrchestratorState, **more: Any) -> None:
        bound = recipe.rollouts.max_off_policy_steps
        self.step, self.trained = state.step, {}  # type: ignore[var-annotated]
        self.pool, self.journal = Pool(state.step), Unwritten()
        order = DataOrder(recipe, build_environments(recipe))
        self.scheduler = Scheduler(
            config=recipe.rollouts,
            order=order,
            sampler=Sampler(
                self.pool,  # type: ignore[arg-type]
                RENDERER,
                temperature=1.0,
                sampling=recipe.rollouts.sampling,
                max_model_len=64,
            ),
            account=StalenessAccount(
                groups_per_step=GROUPS, max_off_policy_steps=bound, step=state.step, waiting=len(state.finished)
            ),
            counters=state.counters,
            next_index=state.next_index,
            restart=state.groups_to_redispatch(order),
            finished=state.finished,
            journal=self.journal,
            **more,
        )
        self.desk = Desk(
            recipe=recipe,
            scheduler=self.scheduler,
            counters=state.counters,
            gauges=dict,
            columns=RolloutColumns(Path("nowhere"), lambda: None, decode=lambda tokens: ""),
            files=FILES,
            journal=self.journal,
            spawn=asyncio.create_task,
        )
        self.desk.gate = threading.Event()

    async def turn(self, rng: random.Random) -> None:
        """Some answers arrive, in any order."""
        for _ in range(rng.randrange(4)):
            if self.pool.waiting:
                self.pool.waiting.pop(rng.randrange(len(self.pool.waiting))).set_result(None)
            await asyncio.sleep(0)
        for _ in range(6):
            await asyncio.sleep(0)

    def serve(self, version: int) -> None:
        """Engines have the version."""
        self.pool.version = version
        self.scheduler.serve(version)

    async def ask(self, step: int, *, ahead: bool = False) -> bool:
        """Whether the batch of ``step`` is handed out now."""
        return await self.desk.batch(step, rank=0, world_size=1, wait_s=0.0005, ahead=ahead) is not None

    def indices(self, step: int) -> list[int]:
        taken = self.scheduler._taken.find(step)
        assert taken is not None
        return [group.index for group in taken.groups]


@contextlib.asynccontextmanager
async def living(recipe: Recipe, state: OrchestratorState, **more: Any) -> AsyncIterator[Life]:
    """Run one attempt; ``more`` is what else its scheduler is made with."""
    life = Life(recipe, state, **more)
    work = asyncio.create_task(life.scheduler.run())
    try:
        yield life
    finally:
        life.desk.gate.set()
        builds = [*life.desk._builds.values()]
        for task in (work, *builds):
            task.cancel()
        await asyncio.gather(work, *builds, return_exceptions=True)


def small_recipe(tmp_path: Path, **changes: Any) -> Recipe:
    rollouts = {
        "rollouts_per_step": GROUPS * SIZE,
        "group_size": SIZE,
        "max_in_flight": 7 * SIZE,
        "max_off_policy_steps": BOUND,
        "zero_variance": "keep",
    }
    return make_recipe(tmp_path, **{"rollouts": rollouts, "environments": TWO, **changes})

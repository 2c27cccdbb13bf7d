"""Snapshots at any moment: going on from one trains every group once, and loses none.

The scheduler, the desk and the state are the real ones. Engines are a list of requests that a test answers in an order
of its own, so that a batch can be waited for, built or handed out for as long as it wants.
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
import pytest
import yaml
from harness import Loop, make_recipe, make_run, running
from patience import patience
from stub_engine import StubEngine

from hpcrl.config.recipe import Recipe
from hpcrl.credentials import Credentials
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.wire import BatchShard
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.batches import server as batch_server
from hpcrl.rollouts.batches.build import Batch
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.batches.server import BatchServer, ConflictError
from hpcrl.rollouts.engines.client import Generation
from hpcrl.rollouts.environments import build_environments
from hpcrl.rollouts.records import Group, Rollout, StoredRollout
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.data_order import DataOrder, GroupTask
from hpcrl.rollouts.sampling.scheduler import Scheduler
from hpcrl.rollouts.sampling.staleness import StalenessAccount
from hpcrl.rollouts.saved_turns import SavedTurn
from hpcrl.rollouts.state import OrchestratorState

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

    def session(self, key: str, rollouts: int = 1) -> Any:
        return SimpleNamespace(engine=self, index=int(key.removeprefix("group-")), leave=lambda: None)

    async def wait_open(self, session: Any) -> Pool:
        return self

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


TRANSCRIPT: Any = SimpleNamespace(opening=lambda messages: [7, 8], text=lambda tokens: "x", eos_token_id=2)


FILES: Any = SimpleNamespace(write=lambda step, lines, wait_s: None)


class Unwritten:
    """A journal of nothing: these tests are about snapshots alone."""

    full = False

    async def finished(self, task: GroupTask, rollout: Rollout) -> StoredRollout:
        return StoredRollout.of(rollout, PayloadPlace("nowhere", 0, 0, ""))

    def turn(self, task: GroupTask, member: int, number: int, turn: SavedTurn) -> None:
        pass

    def kept(self, group: int) -> None:
        pass

    def dropped(self, group: int, members: Sequence[int], why: str, *, step: int | None = None) -> None:
        pass

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

    def _build_and_write(self, groups: list[Group], step: int, counters: dict[str, float]) -> Batch:
        assert self.gate.wait(20.0)
        return super()._build_and_write(groups, step, counters)


class Life:
    """One attempt: scheduler, desk, and a trainer that has trained the steps before."""

    def __init__(self, recipe: Recipe, state: OrchestratorState) -> None:
        bound = recipe.rollouts.max_off_policy_steps
        self.step, self.trained = state.step, {}  # type: ignore[var-annotated]
        self.pool = Pool(state.step)
        order = DataOrder(recipe, build_environments(recipe))
        self.scheduler = Scheduler(
            config=recipe.rollouts,
            order=order,
            sampler=Sampler(
                self.pool,  # type: ignore[arg-type]
                TRANSCRIPT,
                temperature=1.0,
                sampling=recipe.rollouts.sampling,
                max_model_len=64,
            ),
            account=StalenessAccount(
                groups_per_step=GROUPS, max_off_policy_steps=bound, step=state.step, waiting=len(state.finished)
            ),
            counters=state.counters,
            next_index=state.next_index,
            restart=state.deal_again(order),
            finished=state.finished,
            journal=Unwritten(),
        )
        self.desk = Desk(
            recipe=recipe,
            scheduler=self.scheduler,
            counters=state.counters,
            gauges=dict,
            columns=RolloutColumns(Path("nowhere"), lambda: None, decode=lambda tokens: ""),
            files=FILES,
            journal=Unwritten(),
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
async def living(recipe: Recipe, state: OrchestratorState) -> AsyncIterator[Life]:
    life = Life(recipe, state)
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


def check(state: OrchestratorState, trained: Sequence[int], versions: dict[int, int]) -> None:
    """Every group that was dealt out has one place, or became too old by the steps that the state has consumed."""
    finished = [group.index for group in state.finished]
    placed = [*trained, *finished, *state.restart]
    assert len(placed) == len(set(placed)), (sorted(trained), finished, state.restart)
    lost = set(range(state.next_index)) - set(placed)
    assert all(versions[index] < state.step - BOUND for index in lost), (state.step, lost, versions)
    assert [each.index for each in state.dealt] == state.restart
    assert state.counters.consumed == SIZE * len(trained)


@pytest.mark.parametrize("seed", range(12))
async def test_every_group_is_trained_once_wherever_a_run_goes_on(tmp_path: Path, seed: int) -> None:
    rng, recipe = random.Random(seed), small_recipe(tmp_path)
    saved, history, old = OrchestratorState.fresh(recipe), list[int](), dict[int, int]()
    moments: set[str] = set()
    while saved.step < 14 or (len(moments) < 5 and saved.step < 400):
        trained = list(history)
        async with living(recipe, through_bytes(saved)) as life:
            versions = life.pool.versions
            versions.update({index: version for index, version in old.items() if index not in saved.restart})
            for step in range(saved.step + 1, saved.step + 1 + rng.randrange(1, 6)):
                moment = rng.choice(("before", "waiting", "building", "fetched", "ahead"))
                began_s = asyncio.get_running_loop().time()
                while True:
                    # the trainer has trained `step - 1`, and one of its ranks asks for the next
                    assert asyncio.get_running_loop().time() - began_s < 30.0, "the batch never came"
                    await life.turn(rng)
                    if rng.random() < 0.2:
                        life.serve(step - 1)
                    now = "before"
                    if step in life.desk._builds:
                        now = "building" if life.desk.step == step else "waiting"
                        now = "fetched" if life.desk._handed_out == step else now
                    if now == moment and rng.random() < 0.7:
                        moment = "done"
                        saved, history, old = life.desk.snapshot(step - 1), list(trained), dict(versions)
                        check(saved, trained, versions)
                        moments.add(now)
                    if now == "building" and rng.random() < 0.5:
                        life.desk.gate.set()
                    if (now != "before" or rng.random() < 0.3) and await life.ask(step):
                        break
                if moment == "ahead":
                    await life.turn(rng)
                    saved, history, old = life.desk.snapshot(step - 1), list(trained), dict(versions)
                    check(saved, trained, versions)
                    moments.add(moment)
                trained += life.indices(step)
                assert len(set(trained)) == len(trained)
                life.desk.gate.clear()
                # while it trains, its rank asks for the next, and may have it before the step is trained
                for _ in range(rng.randrange(12)):
                    await life.turn(rng)
                    if rng.random() < 0.3:
                        life.desk.gate.set()
                    if await life.ask(step + 1, ahead=True):
                        break
                assert len(life.desk._builds) <= 2
    assert moments == {"before", "waiting", "building", "fetched", "ahead"}


async def test_states_that_are_gone_or_to_come_are_refused(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        assert life.desk.snapshot(0).next_index == 0
        for step in (1, 2, 3):
            while not await life.ask(step):
                await life.turn(rng)
                life.desk.gate.set()
            life.serve(step)
        assert [life.desk.snapshot(step).step for step in (2, 3)] == [2, 3]
        life.desk.gate.clear()
        while life.desk.step == 3:  # built and not handed out
            await life.ask(4)
            await life.turn(rng)
        for step in (1, 2, 4, 5):
            with pytest.raises(ConflictError, match=f"snapshot of step {step} .* handed out is 3"):
                life.desk.snapshot(step)


async def test_a_batch_is_taken_ahead_only_where_no_group_in_flight_is_lost_by_it(tmp_path: Path) -> None:
    base, rng = small_recipe(tmp_path), random.Random(0)
    recipe = small_recipe(tmp_path, rollouts={**base.rollouts.model_dump(), "max_off_policy_steps": 2})
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.desk.gate.set()
        life.pool.slow.add(0)
        for step in (1, 2):
            while not await life.ask(step):
                await life.turn(rng)
        life.serve(1)
        # all that may be asked for now is answered, but for the one group
        while life.scheduler.account.waiting < GROUPS or life.pool.waiting or life.scheduler.account.running > 1:
            await life.turn(rng)
        # step 2 trains; by step 3 the group of version 0 that is still in flight would be too old
        for _ in range(20):
            assert not await life.ask(3, ahead=True)
        assert life.desk.step == 2
        assert life.scheduler.pending(2).counters.cancelled_stale == 0  # type: ignore[union-attr]
        # the trainer itself waits: now it is taken, and the old one given up
        life.desk.trained(2)
        while not await life.ask(3, ahead=True):
            await asyncio.sleep(0.001)
        assert 0 not in life.indices(3)
        assert life.scheduler.pending(3).counters.cancelled_stale == SIZE  # type: ignore[union-attr]
        assert life.desk.snapshot(2).restart[0] == 0


async def test_finished_groups_that_a_step_makes_too_old_are_kept_for_a_snapshot_before_it(tmp_path: Path) -> None:
    """As after a resume with a lower bound: more has finished than one step can use, and then nothing may be old."""
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        while len(life.desk.snapshot(0).finished) < 2 * GROUPS:
            await life.turn(rng)
        state, versions = life.desk.snapshot(0), life.pool.versions
    strict = small_recipe(tmp_path, rollouts={**recipe.rollouts.model_dump(), "max_off_policy_steps": 0})
    async with living(strict, through_bytes(state)) as life:
        life.desk.gate.set()
        while not await life.ask(1):
            await life.turn(rng)
        assert life.scheduler.pending(1).counters.dropped_stale == GROUPS * SIZE  # type: ignore[union-attr]
        before = life.desk.snapshot(0)
        assert {group.index for group in before.finished} >= {group.index for group in state.finished}
        assert before.counters.dropped_stale == 0
        check(before, [], versions)


async def test_where_memory_is_full_a_batch_in_order_still_gets_the_group_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore a group has to start again, and more than a batch has finished behind it: the batch waits for
    that group, so it must start, or neither would ever go on."""
    ordered = {**small_recipe(tmp_path).rollouts.model_dump(), "order": "deterministic", "max_off_policy_steps": 3}
    recipe, rng = small_recipe(tmp_path, rollouts=ordered), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.pool.slow = {0}
        async with asyncio.timeout(20.0 * patience()):
            while len(life.desk.snapshot(0).finished) < GROUPS:
                await life.turn(rng)
        state = life.desk.snapshot(0)
    assert 0 in state.restart
    monkeypatch.setattr(Unwritten, "full", True)
    async with living(recipe, through_bytes(state)) as life:
        life.desk.gate.set()
        async with asyncio.timeout(20.0 * patience()):
            while not await life.ask(1):
                await life.turn(rng)
        assert life.indices(1) == [0, 1, 2]


async def test_a_resume_with_a_lower_bound_trains_nothing_that_is_older(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.desk.gate.set()
        # a batch of version 0, and what has finished of it beside that
        while not (await life.ask(1) and len(life.desk.snapshot(1).finished) == GROUPS):
            await life.turn(rng)
        state = life.desk.snapshot(1)
    strict = small_recipe(tmp_path, rollouts={**recipe.rollouts.model_dump(), "max_off_policy_steps": 0})
    async with living(strict, through_bytes(state)) as life:
        life.desk.gate.set()
        while not await life.ask(2):
            await life.turn(rng)
        taken = life.scheduler._taken.find(2)
        assert taken is not None
        assert {group.version for group in taken.groups} == {1}
        assert life.desk.snapshot(2).counters.dropped_stale == GROUPS * SIZE


async def test_groups_start_again_with_what_they_had_when_weights_change(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        await life.turn(rng)
        had = {i: running.task for i, running in life.scheduler._running.items()}
        state = OrchestratorState.decode(life.desk.snapshot(0).encode())
    assert {task.environment.name for task in had.values()} == {"a", "b"}
    # another order, other weights, one more
    other = [{"name": "c", "kind": "words", "weight": 99.0}, {**TWO[1], "weight": 5.0}, TWO[0]]
    changed = small_recipe(tmp_path, environments=other)
    order = DataOrder(changed, build_environments(changed))
    assert any(order.task(i).environment.name != task.environment.name for i, task in had.items())
    again = state.deal_again(order)
    found = {task.index: (task.environment.name, task.prompt_index) for task in again}
    assert found == {i: (task.environment.name, task.prompt_index) for i, task in had.items() if i in found}
    assert len(found) == len(state.restart) > 0
    gone = small_recipe(tmp_path, environments=TWO[:1])
    with pytest.raises(CheckpointError, match=r"no longer has: 'b' \(\d+ groups\)\n    hint: .*1e-9"):
        state.deal_again(DataOrder(gone, build_environments(gone)))


def test_a_state_of_the_first_format_is_dealt_by_its_indices(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    order = DataOrder(recipe, build_environments(recipe))
    first = OrchestratorState(
        step=0,
        seed=recipe.seed,
        group_size=SIZE,
        next_index=3,
        restart=[0, 2],
        finished=[],
        counters=OrchestratorState.fresh(recipe).counters,
        format_version=1,
    )
    assert OrchestratorState.decode(first.encode()).deal_again(order) == [order.task(0), order.task(2)]


async def test_a_request_that_is_cut_off_while_the_batch_is_built_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: the trainer's connection breaks, it polls through a long build, and saves meanwhile."""
    built: list[int] = []
    begun, gate = threading.Event(), threading.Event()
    build = batch_server.build_batch

    def slow(groups: Sequence[Group], *, step: int, **keywords: Any) -> Batch:
        built.append(step)
        if step == 2:
            begun.set()
            assert gate.wait(30.0)
        return build(groups, step=step, **keywords)

    monkeypatch.setattr(batch_server, "build_batch", slow)
    async with running(make_run(tmp_path), StubEngine()) as loop:
        await loop.train(1, 1)
        trained = {group.index for group in loop.last_groups()}
        path = "/dock/batch/2?rank=0&world_size=1&wait_s=20"
        reader, writer = await asyncio.open_connection(loop.client._host, loop.client._port)
        headers = {"Host": "dock", **Credentials.of_run(loop.run.path, loop.attempt).headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        assert await asyncio.to_thread(begun.wait, 20.0)
        writer.close()
        # the orchestrator hears of the end, and cancels the handler
        await asyncio.sleep(0.2)
        assert reader.at_eof() or not gate.is_set()
        assert (await loop.ask("_request", "GET", path.replace("wait_s=20", "wait_s=0.05")))[0] == 204
        state = OrchestratorState.decode(await loop.ask("snapshot", 1))
        gate.set()
        first: BatchShard = await loop.batch(2)
        bodies = [(await loop.ask("_request", "GET", path))[1] for _ in range(2)]
        assert bodies[0] == bodies[1]
        assert first.step == 2
        assert built == [1, 2]
        taken = {group.index for group in loop.last_groups()}
        finished = {group.index for group in state.logged}
        assert taken <= finished
        assert not trained & (finished | set(state.restart))
        assert trained | finished | set(state.restart) == set(range(state.next_index))
        await loop.publish(2)
        assert (await loop.train(3, 4))[-1].step == 4


async def test_a_run_goes_on_with_other_weights_and_refuses_to_lose_an_environment(tmp_path: Path) -> None:
    run, stub = make_run(tmp_path, environments=TWO), StubEngine()
    # two batches and some more; the rest of the rollouts stays in flight
    stub.request_s = lambda number: 0.0 if number <= 40 else 30.0
    async with running(run, stub) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: len(loop.orchestrator._scheduler._running) >= 2)
        state = await loop.checkpoint(2)
    had = {each.index: each.environment for each in state.dealt}
    assert had

    def change(environments: list[dict[str, Any]]) -> None:
        value = yaml.safe_load(run.recipe_path.read_text())
        run.recipe_path.write_text(yaml.safe_dump({**value, "environments": environments}))
        run.start_attempt()

    change([{**TWO[1], "weight": 1e-9}, TWO[0]])
    again = Loop(run, [stub])
    await again.orchestrator._restore()
    assert {task.index: task.environment.name for task in again.orchestrator._restart} == had
    # what was not dealt out yet follows the new weights
    assert {again.orchestrator._order.task(state.next_index + i).environment.name for i in range(50)} == {"a"}
    used = {*had.values(), *(group.environment for group in state.finished)}
    change([{"name": "c", "kind": "words"}])
    gone = Loop(run, [stub])
    with pytest.raises(CheckpointError, match=f"no longer has: '{min(used)}' .*\n    hint: keep them"):
        await gone.orchestrator._restore()


async def test_a_build_that_fails_ends_the_orchestrator_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Batch:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_server, "build_batch", fail)
    async with running(make_run(tmp_path), StubEngine()) as loop:
        ask = asyncio.create_task(loop.batch(1))
        assert loop.work is not None
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(asyncio.shield(loop.work), 20.0)
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)

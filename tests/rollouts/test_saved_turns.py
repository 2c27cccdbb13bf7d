"""Rollouts in progress go on from the turns that they had: nothing of them is asked for again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Loop, make_run, running
from stub_engine import SEVERAL as REPLIES
from stub_engine import StubEngine
from stub_engine import several_turns as in_turns

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Kept, PayloadPlace, TurnSaved, read_entries
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.rollouts.core.records import Rollout, Turn, decode_rollout
from hpcrl.rollouts.core.saved_turns import SavedTurn, TurnKeeper, decode_turn, encode_turn
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.environments.data_order import DataOrder
from hpcrl.rollouts.environments.sandbox import ProgramRunner
from hpcrl.rollouts.ledger.ledger import RolloutLedger
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import verify_rollouts

ENVIRONMENT = {"name": "calculator", "kind": "calculator", "max_turns": 8}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the tool says, without a process for it."""

    def say(text: str) -> None:
        async def run(self: ProgramRunner, program: str) -> str:
            return text

        monkeypatch.setattr(ProgramRunner, "run", run)

    say("12")
    return say


def new_run(path: Path, **rollouts: Any) -> RunDir:
    return make_run(path, environments=[ENVIRONMENT], rollouts={"max_off_policy_steps": 3, **rollouts})


@asynccontextmanager
async def killed_in_the_middle(run: RunDir, requests: int = 80) -> AsyncIterator[Loop]:
    """A run whose engine stops answering; what it leaves is what was on disk then, as after SIGKILL."""
    engine = StubEngine(answer=in_turns)
    engine.request_s = lambda number: 0.0 if number <= requests else 60.0
    async with running(run, engine) as loop:
        scheduler = loop.parts.scheduler
        await loop.until(lambda: engine.in_flight == scheduler.in_flight > 0 and engine.started > requests)
        yield loop
        await asyncio.to_thread(shutil.copytree, run.rollouts_dir, run.path / "then")
    shutil.rmtree(run.rollouts_dir)
    shutil.move(run.path / "then", run.rollouts_dir)
    run.start_attempt()


def replay_of(run: RunDir) -> Replay:
    return Replay(read_entries(run.rollouts_dir / "ledger"))


def saved_of(run: RunDir) -> dict[tuple[int, int], list[SavedTurn]]:
    payload = run.rollouts_dir / "payload"
    return {
        name: [decode_turn(read_payload(payload, turn.payload)) for turn in each.turns]
        for name, each in replay_of(run).unfinished.items()
    }


def finished_of(run: RunDir) -> dict[tuple[int, int], Rollout]:
    payload = run.rollouts_dir / "payload"
    return {held.id: decode_rollout(read_payload(payload, held.entry.payload)) for held in replay_of(run).rollouts}


async def test_a_rollout_continues_with_the_next_turn(tmp_path: Path, tool: Callable[[str], None]) -> None:
    run = new_run(tmp_path)
    async with killed_in_the_middle(run) as loop:
        pass
    saved = saved_of(run)
    assert len(saved) >= 4
    assert {len(turns) for turns in saved.values()} <= set(range(1, REPLIES))
    verdict = verify_rollouts(run)
    assert (verdict.problems, verdict.unfinished) == ([], len(saved))
    assert verdict.turns == sum(map(len, saved.values()))
    engine = StubEngine(answer=in_turns)
    async with running(run, engine) as loop:
        order = DataOrder(loop.recipe, loop.environments)
        await loop.train(1, 2)
        await loop.until(lambda: not loop.parts.scheduler.in_flight)
        counters = loop.parts.counters
        assert (counters.turns_recalled, counters.turns_given_up) == (verdict.turns, 0)
    asked = [request["sampling_params"]["seed"] for request in engine.requests]
    finished = finished_of(run)
    for name, turns in saved.items():
        rollout, seed = finished[name], order.rollout_seed(*name)
        seeds = [stable_hash("turn", seed, number) for number in range(REPLIES)]
        assert [asked.count(each) for each in seeds] == [0] * len(turns) + [1] * (REPLIES - len(turns))
        # the very tokens of before, with their log-probabilities and versions
        before = np.concatenate([part for turn in turns for part in (turn.said, turn.token_ids)])
        assert (rollout.token_ids[: len(before)] == before).all()
        sampled = rollout.sampled[: len(before)] == 1
        for column in ("logprobs", "versions"):
            was = np.concatenate([getattr(turn, column) for turn in turns])
            assert (getattr(rollout, column)[: len(before)][sampled] == was).all()
        assert rollout.turns[: len(turns)] == [turn.turn for turn in turns]
        assert len(rollout.turns) == REPLIES
    verdict = verify_rollouts(run)
    assert (verdict.problems, verdict.unfinished) == ([], 0)


async def test_what_ends_in_order_keeps_the_newest_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool works when the run is stopped: the turn before it is written at the end at the latest."""

    async def hang(self: ProgramRunner, program: str) -> str:
        await asyncio.sleep(60.0)
        return ""

    monkeypatch.setattr(ProgramRunner, "run", hang)
    run = new_run(tmp_path)
    async with running(run, StubEngine(answer=in_turns)) as loop:
        scheduler = loop.parts.scheduler
        await loop.until(lambda: sum(bool(k._due) for r in scheduler._running.values() for k in r.keepers) >= 8)
        waiting = scheduler.in_flight
    assert {len(each.turns) for each in replay_of(run).unfinished.values()} == {1}
    assert len(replay_of(run).unfinished) >= 8 <= waiting


async def test_an_environment_that_says_something_else_continues_from_there(
    tmp_path: Path, tool: Callable[[str], None]
) -> None:
    run = new_run(tmp_path)
    async with killed_in_the_middle(run):
        pass
    saved = saved_of(run)
    tool("13")
    async with running(run, StubEngine(answer=in_turns)) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: not loop.parts.scheduler.in_flight)
        counters = loop.parts.counters
        # the first turn follows the prompt, which is the same
        assert counters.turns_recalled == len(saved)
        assert counters.turns_given_up == sum(len(turns) - 1 for turns in saved.values())
    finished = finished_of(run)
    assert all(len(finished[name].turns) == REPLIES for name in saved)
    replay = replay_of(run)
    assert not replay.problems
    assert not replay.unfinished


async def test_a_turn_that_is_damaged_is_sampled_again_with_those_behind_it(
    tmp_path: Path, tool: Callable[[str], None]
) -> None:
    run = new_run(tmp_path)
    async with killed_in_the_middle(run):
        pass
    each = next(each for each in replay_of(run).unfinished.values() if len(each.turns) > 1)
    place = each.turns[1].payload
    path = run.rollouts_dir / "payload" / place.file
    data = bytearray(path.read_bytes())
    data[place.offset + place.bytes - 1] ^= 1
    path.write_bytes(data)
    (problem,) = verify_rollouts(run).problems
    assert f"turn 1 of rollout {each.turns[0].group}/{each.turns[0].member} was saved, and cannot be read" in problem
    async with running(run, StubEngine(answer=in_turns)) as loop:
        await loop.train(1, 1)
        assert loop.parts.counters.turns_given_up == len(each.turns) - 1
    assert not replay_of(run).problems


async def test_columns_of_turns_go_with_their_rollouts(tmp_path: Path, tool: Callable[[str], None]) -> None:
    run = new_run(tmp_path)
    payload = run.rollouts_dir / "payload"
    engine = StubEngine(answer=in_turns)
    # the second turn of one of the first rollouts
    engine.request_s = lambda number: 60.0 if number == 50 else 0.0
    async with running(run, engine) as loop:
        loop.parts.restored.ledger._log._payload._file_bytes = 1
        await loop.train(1, 3)
    entries = list(read_entries(run.rollouts_dir / "ledger"))
    turns = {entry.payload.file for entry in entries if isinstance(entry, TurnSaved)}
    rollouts = {held.entry.payload.file for held in replay_of(run).rollouts}
    assert len(turns - rollouts) > 4
    left = {path.name for path in payload.iterdir()}
    needed = {turn.payload.file for each in replay_of(run).unfinished.values() for turn in each.turns}
    newest = max(left)
    assert needed
    assert needed <= left
    # those that ended since the last batch was taken are looked at with the next one
    assert len(turns - rollouts - needed - {newest} & left) < len(turns - rollouts) / 2


def turn(group: int, member: int, number: int, first: int, last: int | None = None) -> TurnSaved:
    return TurnSaved(
        group=group,
        member=member,
        turn=number,
        environment="calculator",
        prompt_index=3,
        tokens=5,
        first_version=first,
        last_version=first if last is None else last,
        payload=PayloadPlace("f", 0, 0, ""),
    )


def begin(restored: int) -> Begin:
    return Begin(attempt=1, restored=restored, time_s=0.0, believed={})


def unfinished(*entries: Entry) -> dict[tuple[int, int], int]:
    replay = Replay(entries)
    assert not replay.problems, replay.problems
    return {name: len(each.turns) for name, each in replay.unfinished.items()}


def test_which_turns_a_rollout_continues_from() -> None:
    two = [begin(0), turn(4, 1, 0, 0), turn(4, 1, 1, 1)]
    assert unfinished(*two) == {(4, 1): 2}
    assert unfinished(*two, turn(4, 1, 0, 2)) == {(4, 1): 1}
    assert unfinished(*two, turn(4, 1, 1, 2), turn(4, 1, 2, 2)) == {(4, 1): 3}
    for end in (Kept(group=4), Dropped(group=4, members=[], why="too old", step=3)):
        assert unfinished(*two, end) == {}
        # one that was being written when its group was given up
        assert unfinished(*two, end, turn(4, 1, 2, 1)) == {}
    assert Replay([begin(0), turn(6, 0, 1, 0)]).problems == [
        "turn 1 of rollout 6/0 was saved, and of those before it only 0"
    ]
    assert Replay(two).next_index == 5


def test_turns_of_steps_that_were_undone_count_as_older_by_as_much() -> None:
    (each,) = Replay([begin(0), turn(0, 0, 0, 3), turn(0, 0, 1, 5), begin(4)]).unfinished.values()
    assert each.mirrored
    assert each.version == 3
    (each,) = Replay([begin(0), turn(0, 0, 0, 3), turn(0, 0, 1, 6), begin(4), turn(0, 0, 2, 4)]).unfinished.values()
    assert each.version == 2


@pytest.mark.parametrize(("bound", "replays", "left"), [(2, False, 1), (0, False, 0), (2, True, 0)])
def test_a_rollout_that_is_too_old_now_starts_again(tmp_path: Path, bound: int, replays: bool, left: int) -> None:
    def ledger(restored: int) -> RolloutLedger:
        return RolloutLedger(
            tmp_path, attempt=1, restored=restored, bound=bound, limit_s=1.0, checkpoints=list, replays=replays
        )

    first = ledger(0)
    saved = SavedTurn(
        said=np.arange(3, dtype=np.int32),
        token_ids=np.arange(2, dtype=np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.asarray([5, 5], np.int32),
        finish_reason="stop",
        salt=5,
        turn=Turn(3, 2, 0.0, 0.0),
        experts=np.ones((4, 2, 2), np.uint8),
    )

    def entry(place: PayloadPlace) -> Entry:
        known = turn(2, 1, 0, 5)
        return TurnSaved(**{name: getattr(known, name) for name in known.__struct_fields__} | {"payload": place})

    first._log.finish(*encode_turn(saved), entry).result(10.0)
    first.close()
    after = ledger(4)
    found = after.find(4)
    after.close()
    assert found.given_up == 1 - left
    assert found.next_index == 3
    assert found.parts[2].prompt_index == 3
    if left:
        (again,) = found.turns[2, 1]
        assert (again.versions.tolist(), again.salt) == ([3, 3], 3)
        assert again.experts is not None
        assert (again.experts == saved.experts).all()
    else:
        assert not found.turns
    assert State.WAITING not in {held.state for held in after._replay.rollouts}


@pytest.mark.parametrize("elsewhere", [Turn(3, 0, 0.0, 0.0, 2, 4), Turn(3, 0, 0.0, 0.0, 1, 5)])
def test_a_turn_of_another_sequence_or_behind_another_prefix_is_not_recalled(elsewhere: Turn) -> None:
    said = np.arange(3, dtype=np.int32)
    saved = SavedTurn(
        said=said,
        token_ids=said,
        logprobs=np.zeros(3, np.float32),
        versions=said,
        finish_reason="stop",
        salt=0,
        turn=Turn(3, 3, 0.0, 0.0, 1, 4),
    )
    again = decode_turn(b"".join(bytes(piece) for piece in encode_columns(*encode_turn(saved))))
    assert again.turn == saved.turn
    keeper = TurnKeeper(lambda number, turn: None, [again])
    assert keeper.recall(0, said, elsewhere) is None
    assert (keeper.recalled, keeper.given_up) == (0, 1)
    keeper = TurnKeeper(lambda number, turn: None, [again])
    assert keeper.recall(0, said, Turn(3, 0, 9.0, 9.0, 1, 4)) is again


async def test_a_turn_is_written_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    said = np.arange(3, dtype=np.int32)
    block = b"".join(
        encode_columns(
            *encode_turn(
                SavedTurn(
                    said=said,
                    token_ids=said,
                    logprobs=np.zeros(3, np.float32),
                    versions=said,
                    finish_reason="stop",
                    salt=0,
                    turn=Turn(3, 3, 0.0, 0.0),
                )
            )
        )
    )
    one = decode_turn(block)
    written: list[int] = []
    keeper = TurnKeeper(lambda number, turn: written.append(number), [one, one])
    here = Turn(3, 0, 0.0, 0.0)
    assert keeper.recall(0, said, here) is one
    assert keeper.recall(1, said[:2], here) is None
    assert keeper.recall(1, said, here) is None
    assert (keeper.recalled, keeper.given_up) == (1, 1)
    keeper.ended(1, one)
    assert written == []
    keeper.flush()
    keeper.flush()
    keeper.ended(2, one)
    keeper.close()  # the rollout has ended: this turn is written with it
    keeper.flush()
    assert written == [1]

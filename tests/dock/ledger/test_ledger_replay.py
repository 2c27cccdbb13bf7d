"""What the entries of a ledger of rollouts come to: which rollouts wait, were trained or dropped."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from ledger_entries import begin, finished

from hpcrl.dock.ledger.entries import Dropped, Entry, Kept, PayloadPlace, Taken
from hpcrl.dock.ledger.replay import Replay, State


def states(replay: Replay) -> dict[tuple[int, int], tuple[str, int | None]]:
    return {held.id: (held.state.value, held.step) for held in replay.rollouts}


def test_rollouts_wait_are_trained_or_dropped() -> None:
    replay = Replay(
        [begin(), *(finished(g, m) for g in range(3) for m in range(2)), Taken(step=1, groups=[(0, [0, 1])])]
    )
    replay.add(Dropped(group=1, members=[0, 1], why="too old", step=1))
    assert not replay.problems
    trained, dropped, waiting = ("trained", 1), ("dropped", 1), ("waiting", None)
    assert list(states(replay).values()) == [trained, trained, dropped, dropped, waiting, waiting]
    assert replay.over_groups() == {0, 1}
    assert (replay.step, replay.next_index) == (1, 3)


def test_a_restore_takes_back_what_later_steps_did() -> None:
    replay = Replay([begin(), *(finished(g, 0) for g in range(4))])
    replay.add(Taken(step=1, groups=[(0, [0])]))
    replay.add(Taken(step=2, groups=[(1, [0])]))
    replay.add(Dropped(group=2, members=[0], why="too old", step=2))
    replay.add(Dropped(group=3, members=[0], why="no variance in its group"))
    replay.add(begin(restored=1, attempt=2))
    found = states(replay)
    assert found == {
        (0, 0): ("trained", 1),
        (1, 0): ("waiting", None),
        (2, 0): ("waiting", None),
        (3, 0): ("dropped", None),
    }
    assert replay.over_groups() == {0, 3}
    replay.add(Taken(step=2, groups=[(2, [0])]))
    assert not replay.problems


def long_run(steps: int) -> Iterator[Entry]:
    """A group a step, of which the next is in flight; a file of columns for each ten steps."""
    yield begin()
    for step in range(1, steps + 1):
        place = PayloadPlace(f"000001-{step // 10:06d}.columns", 0, 1, "")
        yield from (finished(step - 1, member, version=step - 1, place=place) for member in range(2))
        yield Kept(group=step - 1)
        if step > 1:
            yield Taken(step=step - 1, groups=[(step - 2, [0, 1])])


def test_of_a_long_run_what_a_restore_can_use_is_remembered() -> None:
    """The same waits, is over and comes next as where all is remembered; memory is that of some hundred steps."""
    steps, there = 3000, {f"000001-{number:06d}.columns" for number in range(290, 301)}
    whole, short = Replay(long_run(steps)), Replay.of_long_run(long_run(steps), there)
    assert short.problems == whole.problems == []
    assert list(short.waiting()) == list(whole.waiting()) == [steps - 1]
    assert (short.step, short.next_index) == (whole.step, whole.next_index) == (steps - 1, steps)
    assert len(short.rollouts) + short.forgotten == len(whole.rollouts) == 2 * steps
    assert len(short.rollouts) < 2 * 1100
    # nothing whose columns are there is left out
    held = {each.id for each in whole.rollouts if each.entry.payload.file in there}
    assert held <= {each.id for each in short.rollouts}
    for replay in (whole, short):
        replay.add(begin(restored=steps - 6, attempt=2))
    assert list(short.waiting()) == list(whole.waiting()) == list(range(steps - 6, steps))
    assert max(whole.over_groups()) == max(short.over_groups())


def test_what_is_forgotten_is_gone_and_long_over() -> None:
    replay = Replay(long_run(5))
    replay.forget(lambda file: True, over_before=3)
    assert [held.id[0] for held in replay.rollouts if held.id[1] == 0] == [2, 3, 4]
    replay.forget(lambda file: False)
    assert len(replay.rollouts) == 6
    replay.forget(lambda file: True)
    assert (replay.rollouts, replay.forgotten, replay.next_index) == ([], 10, 5)


def test_versions_ahead_of_a_restore_are_mirrored_there() -> None:
    replay = Replay([begin(), finished(0, 0, version=3), finished(1, 0, version=4, last=6), finished(2, 0, version=8)])
    replay.add(begin(restored=5, attempt=2))
    by_group = {held.entry.group: held for held in replay.rollouts}
    assert [by_group[g].version for g in range(3)] == [3, 4, 2]
    assert by_group[1].pivots == [5]  # one token is of version 6, which counts as 4
    replay.add(begin(restored=3, attempt=3))
    assert [by_group[g].version for g in range(3)] == [3, 2, 2]
    # what was sampled after a restore is of the branch that goes on
    replay.add(finished(3, 0, version=4))
    assert next(held for held in replay.rollouts if held.id == (3, 0)).version == 4


def test_a_group_that_starts_again_keeps_what_became_of_its_first_rollouts() -> None:
    replay = Replay([begin(), finished(0, 0), Dropped(group=0, members=[0], why="too old after a restore", again=True)])
    replay.add(finished(0, 0, version=2))
    replay.add(Taken(step=1, groups=[(0, [0])]))
    assert not replay.problems
    assert [(held.state, held.why) for held in replay.rollouts] == [
        (State.DROPPED, "too old after a restore"),
        (State.TRAINED, ""),
    ]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([finished(0, 0)], "0/0 finished again, and was waiting already"),
        ([Dropped(group=0, members=[0], why="too old"), finished(0, 0)], "0/0 finished again, and was dropped already"),
        ([Taken(step=1, groups=[(0, [0, 1])]), finished(0, 1)], "0/1 finished again, and was trained already"),
        # a restore gives back what was given up, and with it the first try
        (
            [Dropped(group=0, members=[0], why="too old", step=2, again=True), begin(restored=1), finished(0, 0)],
            "0/0 finished again, and was waiting already",
        ),
        ([Dropped(group=0, members=[0], why="too old")] * 2, r"0/0 was dropped \(too old\), and was dropped already"),
        (
            [Taken(step=1, groups=[(0, [0, 1])]), Dropped(group=0, members=[1], why="too old")],
            r"0/1 was dropped \(too old\), and was trained already",
        ),
        ([Taken(step=1, groups=[(7, [2])])], r"step 1 took members \[2\] of group 7, of which \[\] had finished"),
        ([Taken(step=1, groups=[]), Taken(step=1, groups=[])], "step 1 was taken after step 1"),
        ([Taken(step=1, groups=[(0, [0])])], r"members \[0\] of group 0, of which \[0, 1\] had finished"),
        ([Taken(step=1, groups=[(0, [0, 1])]), Taken(step=2, groups=[(0, [0, 1])])], "0/1 is in steps 1 and 2"),
        ([Taken(step=2, groups=[(0, [0, 1])])], "step 2 was taken after step 0"),
        ([Dropped(group=0, members=[7], why="too old")], r"0/7 was dropped \(too old\), and did not finish"),
        ([Dropped(group=3, members=[], why="too few"), finished(3, 0)], "3/0 finished after its group was over"),
    ],
)
def test_what_contradicts_itself_is_reported(entries: list[Entry], problem: str) -> None:
    replay = Replay([begin(), finished(0, 0), finished(0, 1), *entries])
    assert any(re.search(problem, each) for each in replay.problems), replay.problems


@pytest.mark.parametrize(
    "later",
    [
        [],
        [Dropped(group=0, members=[0], why="too old", again=True), finished(0, 0)],
        [Dropped(group=0, members=[0, 1], why="too old", step=1), begin(restored=0)],
        [Taken(step=1, groups=[(0, [1, 0])]), begin(restored=0), Taken(step=1, groups=[(0, [0, 1])])],
        [finished(0, 2), Taken(step=1, groups=[]), Taken(step=2, groups=[(0, [2, 1, 0])])],
    ],
)
def test_what_does_not_contradict_itself_is_not_a_problem(later: list[Entry]) -> None:
    assert Replay([begin(), finished(0, 0), finished(0, 1), *later]).problems == []


def test_what_was_dropped_for_good_does_not_come_back_by_finishing_again() -> None:
    """The entry is a mistake of its writer: it is said, and the rollout is not one of those given up before."""
    replay = Replay([begin(), finished(0, 0), Dropped(group=0, members=[0], why="too old"), finished(0, 0)])
    assert replay.gone == []
    assert len(replay.rollouts) == 1


def test_a_step_that_was_restored_stands_and_the_next_does_not() -> None:
    replay = Replay([begin(), *(finished(group, 0) for group in range(3))])
    for step in (1, 2, 3):
        replay.add(Taken(step=step, groups=[(step - 1, [0])]))
    replay.add(begin(restored=2))
    assert states(replay) == {(0, 0): ("trained", 1), (1, 0): ("trained", 2), (2, 0): ("waiting", None)}
    assert (replay.step, replay.over_groups()) == (2, {0, 1})
    replay.add(begin(restored=7))  # behind the last step: nothing is undone
    assert (replay.step, replay.attempts) == (2, 3)


def test_a_rollout_that_waits_again_is_not_reported_as_dropped() -> None:
    replay = Replay([begin(), finished(0, 0), Dropped(group=0, members=[0], why="too old", step=3)])
    (held,) = replay.rollouts
    assert (held.state, held.step, held.why) == (State.DROPPED, 3, "too old")
    replay.add(begin(restored=2))
    assert (held.state, held.step, held.why) == (State.WAITING, None, "")


def test_only_what_waits_is_mirrored() -> None:
    """What was trained before the restored step stays as it was trained, though it was sampled later on the branch."""
    replay = Replay([begin(), finished(0, 0, version=3), finished(1, 0, version=2)])
    replay.add(Taken(step=1, groups=[(0, [0])]))
    replay.add(begin(restored=2))
    assert [(held.pivots, held.version, held.newest) for held in replay.rollouts] == [([], 3, 3), ([], 2, 2)]


def test_a_mirrored_rollout_is_as_new_as_its_oldest_token() -> None:
    replay = Replay([begin(), finished(0, 0, version=4, last=7), begin(restored=5)])
    (held,) = replay.rollouts
    assert (held.version, held.newest) == (3, 3)  # 7 counts as 3
    assert Replay([begin(), finished(0, 0, version=4, last=7)]).rollouts[0].newest == 7


def test_groups_are_numbered_on_behind_the_highest_of_any_entry() -> None:
    replay = Replay([begin(), finished(4, 0), finished(2, 0)])
    assert replay.next_index == 5
    replay.add(Dropped(group=8, members=[], why="too few"))
    assert (replay.next_index, replay.over_groups()) == (9, {8})


def test_waiting_rollouts_of_a_group_are_listed_by_member() -> None:
    replay = Replay([begin(), finished(3, 1), finished(3, 0), finished(1, 0), finished(2, 0)])
    replay.add(Dropped(group=2, members=[0], why="too old"))
    assert [(group, [held.entry.member for held in each]) for group, each in replay.waiting().items()] == [
        (1, [0]),
        (3, [0, 1]),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_rollout_has_one_place_whatever_happens(seed: int) -> None:
    """Random runs with restores, by the rules that the scheduler keeps."""
    rng, replay, step, index = random.Random(seed), Replay([begin()]), 0, 0
    waiting: dict[int, list[int]] = {}
    for _ in range(200):
        what = rng.random()
        if what < 0.5:
            waiting[index] = list(range(rng.randint(1, 3)))
            for member in waiting[index]:
                replay.add(finished(index, member, version=step))
            index += 1
        elif what < 0.75 and waiting:
            group = rng.choice(sorted(waiting))
            step += 1
            replay.add(Taken(step=step, groups=[(group, waiting.pop(group))]))
        elif what < 0.9 and waiting:
            group = rng.choice(sorted(waiting))
            replay.add(Dropped(group=group, members=waiting.pop(group), why="too old", step=step + 1))
        elif what > 0.95:
            step = rng.randint(0, step)
            replay.add(begin(restored=step))
            waiting = {g: [held.entry.member for held in each] for g, each in replay.waiting().items()}
    assert not replay.problems
    assert {g: [h.entry.member for h in each] for g, each in replay.waiting().items()} == waiting
    assert all((held.state is State.WAITING) == (held.id[0] in waiting) for held in replay.rollouts)

"""Rollouts in progress of which turns were saved: where each may go on, and as which versions its tokens count."""

from __future__ import annotations

import pytest
from ledger_entries import begin, finished

from hpcrl.dock.ledger.entries import Dropped, Entry, Finished, Kept, PayloadPlace, Taken, TurnSaved
from hpcrl.dock.ledger.replay import Replay


def turn(number: int, *, group: int = 0, member: int = 0, first: int = 0, last: int | None = None) -> TurnSaved:
    return TurnSaved(
        group=group,
        member=member,
        turn=number,
        environment="words",
        prompt_index=5,
        tokens=8,
        first_version=first,
        last_version=first if last is None else last,
        payload=PayloadPlace(f"{group}-{member}-{number}", 0, 1, ""),
    )


def ended(group: int, member: int, *, file: str = "a", version: int = 0) -> Finished:
    return finished(group, member, version=version, place=PayloadPlace(file, 0, 1, ""))


def turns_of(replay: Replay) -> dict[tuple[int, int], list[tuple[int, int]]]:
    return {
        name: [(each.turn, each.first_version) for each in found.turns] for name, found in replay.unfinished.items()
    }


def test_turns_are_kept_by_rollout_in_order() -> None:
    replay = Replay([begin(), turn(0), turn(0, member=1), turn(1, first=1), turn(0, group=4)])
    assert turns_of(replay) == {(0, 0): [(0, 0), (1, 1)], (0, 1): [(0, 0)], (4, 0): [(0, 0)]}
    assert (replay.problems, replay.next_index) == ([], 5)


def test_a_turn_takes_the_place_of_its_number_and_of_all_behind_it() -> None:
    replay = Replay([begin(), *(turn(number) for number in range(4)), turn(1, first=7)])
    assert turns_of(replay) == {(0, 0): [(0, 0), (1, 7)]}
    replay.add(turn(2, first=8))
    assert turns_of(replay) == {(0, 0): [(0, 0), (1, 7), (2, 8)]}
    assert not replay.problems


def test_a_turn_without_those_before_it_continues_nothing() -> None:
    replay = Replay([begin(), turn(0), turn(2)])
    assert replay.problems == ["turn 2 of rollout 0/0 was saved, and of those before it only 1"]
    assert turns_of(replay) == {}


@pytest.mark.parametrize(
    "end",
    [ended(0, 0), Kept(group=0), Dropped(group=0, members=[], why="too few")],
    ids=["finished", "kept", "over"],
)
def test_turns_go_with_their_rollout_or_group(end: Entry) -> None:
    replay = Replay([begin(), turn(0), turn(0, member=1), turn(0, group=1), end])
    left = {(0, 1), (1, 0)} if isinstance(end, Finished) else {(1, 0)}
    assert set(replay.unfinished) == left
    replay.add(turn(1, group=0, member=2))  # of a group that is over, or kept: no word of it
    assert ((0, 2) in replay.unfinished, len(replay.problems)) == (False, 1 if isinstance(end, Finished) else 0)


def test_a_group_that_starts_again_keeps_its_turns() -> None:
    replay = Replay([begin(), ended(0, 0), turn(0, member=1), Kept(group=0)])
    assert not replay.unfinished
    replay.add(Dropped(group=0, members=[0], why="too old", again=True))
    assert (replay.kept, replay.over_groups()) == (set(), frozenset())
    replay.add(turn(0, member=1))
    assert set(replay.unfinished) == {(0, 1)}


def test_versions_of_turns_are_mirrored_where_the_run_continues() -> None:
    replay = Replay([begin(), turn(0, first=2, last=3), turn(1, first=4, last=6), turn(2, first=8)])
    each = replay.unfinished[0, 0]
    assert (each.mirrored, each.version) == (False, 2)
    replay.add(begin(restored=8))  # nothing of it is of an undone step
    assert (each.mirrored, each.version) == (False, 2)
    replay.add(begin(restored=5))  # 6 counts as 4, 8 as 2
    assert (each.mirrored, each.pivots, each.version) == (True, [[], [5], [5]], 2)
    replay.add(begin(restored=3))  # the second turn counts as 4 at most, which is above 3: as 2; the last stays at 2
    assert (each.pivots, each.version) == ([[], [5, 3], [5]], 2)
    replay.add(begin(restored=1))  # the first one's 3 counts as -1, its 2 as 0
    assert (each.pivots, each.version) == ([[1], [5, 3, 1], [5, 1]], -1)


def test_a_new_turn_is_of_the_branch_that_continues() -> None:
    replay = Replay([begin(), turn(0, first=6), begin(restored=5), turn(0, first=6)])
    assert (replay.unfinished[0, 0].mirrored, replay.unfinished[0, 0].version) == (False, 6)


def test_the_newest_try_is_found() -> None:
    replay = Replay([begin(), ended(0, 1), Dropped(group=0, members=[1], why="too old", again=True)])
    replay.add(ended(0, 1, version=4))
    found = replay.find(0, 1)
    assert found is not None
    assert found.version == 4
    assert replay.find(0, 2) is replay.find(1, 1) is None


def test_what_was_dropped_for_good_is_forgotten_with_its_columns() -> None:
    replay = Replay([begin(), *(ended(group, 0, file=f"{group}") for group in range(4))])
    replay.add(Dropped(group=0, members=[0], why="no variance"))  # of no step: no restore gives it back
    replay.add(Dropped(group=1, members=[0], why="too old", step=4))
    replay.add(Taken(step=1, groups=[(2, [0])]))
    replay.forget(lambda file: True, over_before=4)
    assert [held.id for held in replay.rollouts] == [(1, 0), (3, 0)]
    assert replay.forgotten == 2
    assert replay.over_groups() == {1}
    replay.forget(lambda file: file != "3", over_before=5)
    assert [held.id for held in replay.rollouts] == [(3, 0)]


def test_what_was_given_up_before_a_new_try_is_forgotten_with_its_columns() -> None:
    replay = Replay([begin(), ended(0, 0, file="old"), Dropped(group=0, members=[0], why="too old", again=True)])
    replay.add(ended(0, 0, file="new"))
    assert len(replay.rollouts) == 2
    replay.forget(lambda file: file == "old")
    assert [held.entry.payload.file for held in replay.rollouts] == ["new"]
    assert (replay.forgotten, replay.gone) == (0, [])

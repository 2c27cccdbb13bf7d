"""A power cut at any moment: nothing that was promised is lost, nothing torn is taken, and the next writer goes on."""

from __future__ import annotations

import random

import pytest
from campaign import examine
from power_cut import Cut, PowerCuts, State, tree_of
from recording import Kind, Operation, Recordings

SCENARIOS = ("handoffs", "ledger", "put_aside", "rollouts", "run_files")
WITH_TORCH = (*SCENARIOS, "torch_checkpoint")
RULES = ("posix", "nfs", "clients")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_recorder_sees_everything(scenario: str, recordings: Recordings) -> None:
    """What is rebuilt of the recording is what the program left: no call that changes files was missed."""
    operations, root = recordings(scenario)
    assert PowerCuts(operations).final == tree_of(root)
    assert len(operations) > 80


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("scenario", WITH_TORCH)
def test_a_cut_loses_nothing_and_tears_nothing(scenario: str, rules: str, recordings: Recordings) -> None:
    figures = examine(scenario, recordings(scenario)[0], rules=rules, limit=8, most=40)
    assert figures.problems == []
    assert figures.opened == 40
    print(f"{figures.cuts} cuts, {figures.states} states, {figures.opened} of them different")


@pytest.mark.campaign
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("scenario", WITH_TORCH)
def test_many_cuts(scenario: str, rules: str, recordings: Recordings) -> None:
    figures = examine(scenario, recordings(scenario)[0], rules=rules, limit=40, most=400)
    assert figures.problems == []
    print(f"{figures.cuts} cuts, {figures.states} states, {figures.opened} of them different")


# -- the rules themselves, on recordings made by hand


def states(operations: list[Operation], rules: str = "posix") -> list[State]:
    power = PowerCuts(operations, rules=rules)
    return list(power.states(power.cuts[-1], limit=10_000, rng=random.Random(0)))


def operation(kind: Kind, first: str = "", second: str = "", *, inode: int = 0, data: bytes = b"") -> Operation:
    return Operation(kind, 1, inode, 0, first, second, data)


CREATE, WRITE = operation(Kind.CREATE, "/t", inode=7), operation(Kind.WRITE, inode=7, data=b"whole")
SYNC, CLOSE = operation(Kind.SYNC, inode=7), operation(Kind.CLOSE, inode=7)
RENAME, SYNC_ROOT = operation(Kind.RENAME, "/t", "/f"), operation(Kind.SYNC, inode=1)


def test_without_fsync_a_renamed_file_may_be_empty_or_zeros() -> None:
    found = states([CREATE, WRITE, RENAME])
    assert {state.get("/f") for state in found} == {None, b"", bytes(5), b"wh\0\0\0", b"whole"}
    assert {} in found


def test_fsync_of_the_file_holds_its_bytes_and_not_its_name() -> None:
    assert {state.get("/f") for state in states([CREATE, WRITE, SYNC, RENAME])} == {None, b"whole"}


def test_fsync_of_the_directory_holds_the_name() -> None:
    assert states([CREATE, WRITE, SYNC, RENAME, SYNC_ROOT]) == [{"/f": b"whole"}]


def test_two_names_may_come_in_any_order() -> None:
    other = operation(Kind.CREATE, "/u", inode=8)
    assert {frozenset(state) for state in states([CREATE, other])} == {
        frozenset(names) for names in ((), ("/t",), ("/u",), ("/t", "/u"))
    }


def test_closing_flushes_on_nfs_and_nowhere_else() -> None:
    written = [CREATE, WRITE, CLOSE]
    assert states(written, "nfs") == [{"/t": b"whole"}]
    assert {state["/t"] for state in states(written, "clients")} == {b"", bytes(5), b"wh\0\0\0", b"whole"}
    assert len(states(written)) > 4


def test_another_client_cannot_flush_what_this_one_wrote() -> None:
    foreign = SYNC._replace(pid=2)
    assert states([CREATE, WRITE, SYNC], "clients") == [{"/t": b"whole"}]
    assert len(states([CREATE, WRITE, foreign], "clients")) == 4


def test_a_directory_that_was_not_synced_takes_its_files_with_it() -> None:
    inside = [operation(Kind.MKDIR, "/d", inode=9), operation(Kind.CREATE, "/d/t", inode=7), WRITE, SYNC]
    found = states([*inside, operation(Kind.SYNC, inode=9)])
    assert found == [{}, {"/d": None, "/d/t": b"whole"}]


def test_what_is_removed_for_good_does_not_multiply_the_states() -> None:
    made = [operation(Kind.MKDIR, "/d", inode=9), operation(Kind.CREATE, "/d/t", inode=7)]
    gone = [operation(Kind.UNLINK, "/d/t"), operation(Kind.RMDIR, "/d"), SYNC_ROOT]
    assert states([*made, *gone]) == [{}]


def test_marks_say_what_was_promised() -> None:
    power = PowerCuts([CREATE, operation(Kind.MARK, '["committed", 3]'), WRITE])
    assert power.cuts[1] == Cut(1, ())
    assert power.cuts[2] == power.cuts[3]._replace(at=2) == Cut(2, (["committed", 3],))

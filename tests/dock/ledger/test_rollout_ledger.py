"""The ledger of rollouts: what is counted is on disk, wherever its writer ends, and what is wrong with it is seen."""

from __future__ import annotations

import errno
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ledger_entries import begin, finished

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger import entries, payload
from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Finished, Kept, PayloadPlace, Taken, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay, State


def open_log(path: Path, *, attempt: int = 1, restored: int = 0) -> RolloutLog:
    return RolloutLog(path, attempt=attempt, restored=restored, limit_s=5.0)


def keep(log: RolloutLog, group: int, member: int, tokens: int = 100) -> Any:
    arrays = {"tokens": np.full(tokens, 10 * group + member, dtype=np.int32)}
    return log.finish(b"about", arrays, lambda place: finished(group, member, place=place))


# -- the writer


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    futures = [keep(log, group, member) for group in range(20) for member in range(3)]
    log.append(Taken(step=1, groups=[(0, [0, 1, 2])]))
    assert all(isinstance(future.result(10.0), Finished) for future in futures)
    log.close()
    entries = list(read_entries(log.ledger_dir))
    assert isinstance(entries[0], Begin)
    found = [entry for entry in entries if isinstance(entry, Finished)]
    assert [(entry.group, entry.member) for entry in found] == [(g, m) for g in range(20) for m in range(3)]
    for entry in found:
        _, arrays = decode_columns(read_payload(log.payload_dir, entry.payload))
        assert set(arrays["tokens"].tolist()) == {10 * entry.group + entry.member}
    assert isinstance(entries[-1], Taken)


class Hanging:
    """A warehouse that takes a block when it is let."""

    full = False

    def __init__(self) -> None:
        self.asked, self.let = threading.Event(), threading.Event()
        self.kept: list[PayloadPlace] = []

    def put(self, place: PayloadPlace, pieces: object) -> bool:
        self.asked.set()
        assert self.let.wait(60.0)
        self.kept.append(place)
        return True


def test_a_rollout_has_finished_when_it_is_durable_whatever_memory_does(tmp_path: Path) -> None:
    """Who waits for it is told before the warehouse is asked; a batch comes behind what its rollouts' blocks need."""
    warehouse: Any = Hanging()
    log = RolloutLog(tmp_path, attempt=1, restored=0, limit_s=5.0, warehouse=warehouse)
    first = keep(log, 0, 0).result(10.0)
    assert warehouse.asked.wait(10.0)
    # written together, when the warehouse has answered: nobody will read what was dropped, or release it once more
    second, third = keep(log, 1, 0), keep(log, 2, 0)
    log.append(Dropped(group=2, members=[0], why="too old"))
    taken = log.append(Taken(step=1, groups=[(0, [0])]))
    assert warehouse.kept == []
    assert not taken.done()
    warehouse.let.set()
    assert taken.result(10.0)
    log.close()
    assert third.done()
    assert warehouse.kept == [first.payload, second.result().payload]


def test_what_is_appended_after_the_end_fails_at_once(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    keep(log, 0, 0)
    log.close()
    with pytest.raises(OSError, match="the ledger of rollouts is closed"):
        keep(log, 1, 0).result(10.0)
    assert [entry.group for entry in read_entries(log.ledger_dir) if isinstance(entry, Finished)] == [0]


def test_who_does_not_wait_any_more_leaves_no_hole(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    writing = [keep(log, group, 0) for group in range(20)]
    assert not any(one.cancel() for one in writing)
    assert [one.result(10.0).group for one in writing] == list(range(20))
    log.close()


def test_files_of_columns_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    log._payload._file_bytes = 3000
    for group in range(10):
        keep(log, group, 0, tokens=400).result(10.0)
    log.close()
    files = sorted(path.name for path in log.payload_dir.iterdir())
    assert len(files) == 5
    assert all(
        read_payload(log.payload_dir, e.payload) for e in read_entries(log.ledger_dir) if isinstance(e, Finished)
    )


def test_a_writer_that_is_killed_leaves_whole_entries_only(tmp_path: Path) -> None:
    """Cut at every byte: an entry that is read has its columns, and the next writer goes on behind it."""
    log = open_log(tmp_path / "whole")
    for member in range(3):
        keep(log, 0, member).result(10.0)
    log.close()
    data = (log.ledger_dir / "000001.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    cut = tmp_path / "cut"
    for end in range(len(data) + 1):
        shutil.rmtree(cut, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", cut)
        (cut / "ledger" / "000001.jsonl").write_bytes(data[:end])
        entries = list(read_entries(cut / "ledger"))
        assert len(entries) == sum(e <= end for e in ends)
    after = open_log(cut, attempt=2)
    keep(after, 1, 0).result(10.0)
    after.close()
    assert len(list(read_entries(after.ledger_dir))) == len(ends) + 2


def test_what_a_writer_adds_that_was_thought_dead_is_not_read(tmp_path: Path) -> None:
    old = open_log(tmp_path)
    keep(old, 0, 0).result(10.0)
    new = open_log(tmp_path, attempt=2)
    keep(old, 0, 1).result(10.0)
    keep(new, 0, 1).result(10.0)
    late = open_log(tmp_path, attempt=1)  # began late, and may not say where the newer one's entries end
    keep(new, 0, 2).result(10.0)
    for log in (old, new, late):
        log.close()
    replay = Replay(read_entries(new.ledger_dir))
    assert not replay.problems
    assert [held.id for held in replay.rollouts] == [(0, 0), (0, 1), (0, 2)]
    assert replay.attempts == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
def test_a_filesystem_that_refuses_for_a_while_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log, real, calls = open_log(tmp_path), payload.os.pwritev, []

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return int(real(fd, [b"torn"], offset))
        if len(calls) == 2:
            raise OSError(number, "for a while")
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(payload.os, "pwritev", refuse)
    entry = keep(log, 3, 1).result(10.0)
    log.close()
    _, arrays = decode_columns(read_payload(log.payload_dir, entry.payload))
    assert set(arrays["tokens"].tolist()) == {31}
    assert calls[2] == 0  # from its beginning again


def test_what_a_filesystem_refuses_for_good_fails_all_that_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    monkeypatch.setattr(log._payload, "write", lambda blocks: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(PermissionError):
        keep(log, 0, 0).result(10.0)
    with pytest.raises(PermissionError):
        log.append(Kept(group=0)).result(10.0)
    log.close()
    assert [type(entry) for entry in read_entries(log.ledger_dir)] == [Begin]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_columns_that_were_damaged_are_seen(tmp_path: Path, damage: str) -> None:
    log = open_log(tmp_path)
    entry = keep(log, 0, 0).result(10.0)
    log.close()
    path = log.payload_dir / entry.payload.file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-9] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError)):
        read_payload(log.payload_dir, entry.payload)


def test_a_torn_end_is_not_read_by_anybody(tmp_path: Path) -> None:
    """A power cut may leave zeros, and whole lines behind them."""
    log = open_log(tmp_path)
    keep(log, 0, 0).result(10.0)
    log.close()
    path = log.ledger_dir / "000001.jsonl"
    begun, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(begun + line + bytes(len(line)) + line)
    assert len(list(read_entries(log.ledger_dir))) == 2
    after = open_log(tmp_path, attempt=2)
    keep(after, 0, 1).result(10.0)
    after.close()
    replay = Replay(read_entries(log.ledger_dir))
    assert not replay.problems
    assert [held.id for held in replay.rollouts] == [(0, 0), (0, 1)]


def test_a_line_that_was_believed_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    keep(log, 0, 0).result(10.0)
    log.close()
    open_log(tmp_path, attempt=2).close()
    path = log.ledger_dir / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"finished"', b'"fini?hed"'))
    with pytest.raises(ValueError, match=r"000001\.jsonl, line 2"):
        list(read_entries(log.ledger_dir))


def test_another_format_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    path = log.ledger_dir / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":7'))
    with pytest.raises(ValueError, match="format 7, this hpcrl reads 1"):
        list(read_entries(log.ledger_dir))


# -- what entries come to


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


def test_a_new_process_believes_what_the_one_before_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files before the newest nothing is read to say so; what a dead process writes later changes nothing."""
    for attempt in (1, 2):
        log = open_log(tmp_path, attempt=attempt)
        keep(log, attempt, 0).result()
        log.close()
    first = tmp_path / "ledger" / "000001.jsonl"
    size = first.stat().st_size
    with first.open("ab") as stream:
        stream.write(b'{"entry":"kept","group":1}\n')
    read: list[str] = []
    measure = entries.whole_bytes
    monkeypatch.setattr(entries, "whole_bytes", lambda path: (read.append(path.name), measure(path))[1])
    log = open_log(tmp_path, attempt=3)
    log.close()
    assert read == ["000002.jsonl"]
    *_, newest = (entry for entry in read_entries(tmp_path / "ledger") if isinstance(entry, Begin))
    assert newest.believed == {"000001.jsonl": size, "000002.jsonl": (tmp_path / "ledger/000002.jsonl").stat().st_size}


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
def test_what_contradicts_itself_is_said(entries: list[Entry], problem: str) -> None:
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
def test_what_does_not_contradict_itself_is_no_problem(later: list[Entry]) -> None:
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


def test_a_rollout_that_waits_again_is_not_said_to_be_dropped() -> None:
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


def test_of_a_group_what_waits_is_told_by_member() -> None:
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


@pytest.mark.parametrize("size", [11, 1 << 39, 1 << 40])
def test_memory_is_not_taken_for_a_block_that_a_file_has_not(size: int, tmp_path: Path) -> None:
    (tmp_path / "000001-000001.columns").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="before the end of a rollout"):
        read_payload(tmp_path, PayloadPlace("000001-000001.columns", 0, size, "00"))


@pytest.mark.parametrize(
    "place", ['["a", -1, 1, ""]', '["a", 0, -1, ""]', f'["a", 0, {1 << 62}, ""]', f'["a", {1 << 62}, 1, ""]']
)
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(place, type=PayloadPlace)

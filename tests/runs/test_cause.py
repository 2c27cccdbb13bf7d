"""Which of many failures was the first."""

from __future__ import annotations

from hpcrl.runs.cause import Cause, CauseKind, choose_cause, describe_end, find_dead_worker
from hpcrl.runs.role import FailureRecord


def end(role: str, time_s: float, **more: object) -> Cause:
    values: dict[str, object] = {"kind": CauseKind.EXIT, "message": f"{role} ended", "role": role, "replica": 0}
    return Cause(time_s=time_s, **{**values, **more})  # type: ignore[arg-type]


def record(role: str, time_s: float, *, rank: int = 0, secondary: bool = False) -> FailureRecord:
    return FailureRecord(
        time_s=time_s,
        role=role,
        replica=0,
        rank=rank,
        error="PeerLostError" if secondary else "ValueError",
        message=f"{role} is unhappy\nand says more",
        traceback="Traceback",
        secondary=secondary,
    )


def test_the_earliest_is_the_cause() -> None:
    cause = choose_cause([end("trainer", 2.0, exit_code=1), end("engine", 1.0, signal=9)], [])
    assert cause is not None
    assert cause.role == "engine"


def test_the_words_of_a_role_come_before_its_exit_code() -> None:
    cause = choose_cause([end("trainer", 2.0, exit_code=1)], [record("trainer", 1.9)])
    assert cause is not None
    assert cause.kind is CauseKind.ERROR
    assert cause.message == "trainer 0 failed: ValueError: trainer is unhappy"


def test_a_lost_peer_is_never_the_cause_although_it_spoke_first() -> None:
    ends = [end("engine", 2.0, signal=9), end("orchestrator", 1.95, exit_code=1)]
    cause = choose_cause(ends, [record("orchestrator", 1.9, secondary=True)])
    assert cause is not None
    assert (cause.role, cause.signal) == ("engine", 9)


def test_a_lost_peer_is_the_cause_where_there_is_no_other() -> None:
    cause = choose_cause([end("trainer", 2.0, exit_code=1)], [record("trainer", 1.9, secondary=True)])
    assert cause is not None
    assert cause.error == "PeerLostError"


def test_a_killed_role_that_lost_a_peer_before_counts_by_its_signal() -> None:
    ends = [end("trainer", 2.0, signal=9)]
    cause = choose_cause(ends, [record("trainer", 1.9, secondary=True)])
    assert cause is not None
    assert cause.signal == 9


def test_sister_ranks_of_a_killed_worker_only_follow() -> None:
    """Rank 0 complains about its connection before the launcher reports that rank 1 was killed."""
    ends = [end("trainer", 3.0, rank=1, signal=9), end("orchestrator", 2.5, exit_code=1)]
    cause = choose_cause(ends, [record("trainer", 2.0, rank=0)])
    assert cause is not None
    assert (cause.role, cause.rank, cause.signal) == ("trainer", 1, 9)


def test_nothing_seen_is_not_a_cause() -> None:
    assert choose_cause([], []) is None


def test_the_launcher_of_ranks_names_the_one_that_was_killed() -> None:
    line = b"2026-11-23 12:00:00,123 %s launcher hpcrl.trainer.launcher: rank %d (pid 4242) %s\n"
    assert find_dead_worker(line % (b"ERROR", 5, b"was killed by SIGKILL")) == (5, 9)
    assert find_dead_worker(line % (b"ERROR", 11, b"was killed by signal 50")) == (11, 50)
    ended = line % (b"ERROR", 0, b"exited with code 1")
    assert find_dead_worker(ended) is None
    assert find_dead_worker(ended + line % (b"ERROR", 3, b"was killed by SIGSEGV")) == (3, 11)
    assert find_dead_worker(b"INFO trainer-0 x: rank 3 (pid 4242) was killed by SIGKILL\n") is None


def test_torchrun_of_older_runs_names_the_worker_that_was_killed() -> None:
    log = (
        b"W1121 12:00:00 api.py:1] Sending process 12 closing signal\nE1121 12:00:01 api.py:984] failed (exitcode: -9) "
    )
    assert find_dead_worker(log + b"local_rank: 1 (pid: 4242) of binary: /usr/bin/python3") == (1, 9)
    assert find_dead_worker(b"failed (exitcode: 1) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3") is None
    assert find_dead_worker(b"all is well") is None


def test_torchrun_of_older_runs_knows_the_rank_among_all_nodes_in_its_summary() -> None:
    first = b"E1121 api.py:984] failed (exitcode: -9) local_rank: 0 (pid: 21219) of binary: python3\n"
    summary = b"Root Cause (first observed failure):\n[0]:\n  host      : localhost\n  rank      : 5 (local_rank: 0)\n"
    assert find_dead_worker(first + summary + b"  exitcode  : -9 (pid: 21219)  (SIGKILL)\n") == (5, 9)
    assert find_dead_worker(first + summary + b"  exitcode  : 1 (pid: 21219)\n") is None


def test_ends_in_words() -> None:
    assert describe_end(None, 9) == "was killed by SIGKILL"
    assert describe_end(None, 200) == "was killed by signal 200"
    assert describe_end(3, None) == "exited with code 3"
    assert describe_end(128, None) == "exited with code 128"
    assert describe_end(127, None) == "exited with code 127: its command was not found"
    assert describe_end(137, None) == "exited with code 137: a process that it waited for was killed by SIGKILL"
    assert describe_end(255, None) == "exited with code 255"

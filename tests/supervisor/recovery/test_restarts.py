"""When a replica is started again, which failure counts, and which nodes are avoided."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.plan import RolePolicy
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.exclusions import choose_exclusions, exclude, read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.recovery.nodes import hardware_trouble
from hpcrl.supervisor.replicas.restarts import Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def failure(message: str, *, kind: CauseKind = CauseKind.EXIT, exit_code: int | None = 3) -> Cause:
    return Cause(kind=kind, time_s=0.0, message=message, exit_code=exit_code)


def make(clock: Clock, **changes: object) -> Restarts:
    policy = {"restart": "on-failure", "max_restarts": 2, "restart_window_s": 100.0, "stop_timeout_s": 1.0, **changes}
    return Restarts(RolePolicy.model_validate(policy), clock=clock)


def test_pauses_grow_and_end_and_the_first_failure_is_the_cause() -> None:
    restarts = make(Clock())
    assert [restarts.pause_s(failure(f"failure {i}")) for i in range(3)] == [1.0, 2.0, None]
    assert restarts.count == 2
    message = restarts.first_error().message
    assert message == "failure 0; it was restarted 2 times and failed again (at last: failure 2)"


def test_pauses_end_at_half_a_minute() -> None:
    restarts = make(Clock(), max_restarts=9)
    pauses = [restarts.pause_s(failure("x")) for _ in range(10)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, None]


def test_the_first_of_the_failures_that_count_is_named() -> None:
    clock = Clock()
    restarts = make(clock)
    assert restarts.last_failure == ""
    for now, message in ((0.0, "old"), (90.0, "first"), (100.0, "second"), (189.0, "second")):
        clock.now = now
        restarts.pause_s(failure(message))
    assert restarts.last_failure == "second"
    # one second before the window of the first ends; that of the old one has just ended
    message = "first; it was restarted 2 times and failed again (at last: second)"
    assert restarts.first_error().message == message
    clock.now = 190.0
    assert restarts.pause_s(failure("second")) is None
    assert restarts.first_error().message == "second; it was restarted 2 times and failed again"
    clock.now = 289.0
    assert restarts.pause_s(failure("third")) == 2.0
    assert restarts.first_error().message == "second; it was restarted once and failed again (at last: third)"


def test_the_newest_failure_is_reported() -> None:
    restarts = make(Clock(), max_restarts=9)
    for message in ("first", "second", "third"):
        restarts.pause_s(failure(message))
        assert restarts.last_failure == message


def test_failures_outside_of_the_window_do_not_count() -> None:
    clock = Clock()
    restarts = make(clock)
    for number in range(20):
        clock.now = 60.0 * number
        assert restarts.pause_s(failure(f"failure {number}")) is not None
    assert restarts.count == 20


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        (failure("x"), {"restart": "never"}),
        (failure("x"), {"max_restarts": 0}),
        (failure("x", exit_code=2), {}),
        (failure("x", kind=CauseKind.SPAWN), {}),
        (failure("x", kind=CauseKind.CANCELLED), {}),
        (failure("x", kind=CauseKind.NODE_FAIL), {}),
    ],
)
def test_what_is_not_tried_again(cause: Cause, changes: dict[str, object]) -> None:
    restarts = make(Clock(), **changes)
    assert restarts.pause_s(cause) is None
    assert restarts.first_error() == cause


def test_a_step_that_slurm_refused_is_asked_for_again() -> None:
    """Unlike a command that does not exist: Slurm may have others that end, or a controller that is busy."""
    assert make(Clock()).pause_s(failure("x", kind=CauseKind.NO_STEP)) == 1.0


def test_hardware_shows_in_the_log_of_its_own_rank(tmp_path: Path) -> None:
    logs = [tmp_path / "0.log", tmp_path / "1.log", tmp_path / "missing.log"]
    logs[0].write_text("RuntimeError: CUDA error: an illegal memory access was encountered\n")
    logs[1].write_text("x" * 100_000 + "\nRuntimeError: CUDA error: uncorrectable ECC error encountered\nbye\n")
    assert hardware_trouble(logs) == {1: "uncorrectable ECC error"}


@pytest.mark.parametrize(("before_end", "found"), [(1 << 16, True), ((1 << 16) + 1, False)])
def test_the_end_of_a_log_tells_of_hardware_and_no_more(tmp_path: Path, before_end: int, found: bool) -> None:
    """What a role survived long ago did not end it."""
    log, words = tmp_path / "0.log", b"NVRM: Xid"
    log.write_bytes(b"\n" * 9 + words + b"x" * (before_end - len(words)))
    assert hardware_trouble([log]) == ({0: "NVRM: Xid"} if found else {})


def test_exclusions_end_and_never_starve_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    exclude(run, {"n1": "down"}, attempt=1, now_s=100.0, seconds=50.0)
    exclude(run, {"n3": "ECC", "n2": "ECC"}, attempt=2, now_s=120.0, seconds=50.0)
    assert [entry.node for entry in read_exclusions(run, now_s=130.0)] == ["n2", "n3", "n1"]
    assert [entry.node for entry in read_exclusions(run, now_s=155.0)] == ["n2", "n3"]
    entries = read_exclusions(run, now_s=130.0)
    usable = {"gpu": [f"n{i}" for i in range(1, 7)]}
    assert choose_exclusions(entries, usable=usable, needed={"gpu": 3}) == ["n1", "n2", "n3"]
    # five are needed of six: the newest entry counts, the others must do
    assert choose_exclusions(entries, usable=usable, needed={"gpu": 5}) == ["n2"]
    # what is down anyway costs nothing
    assert choose_exclusions(entries, usable={"gpu": ["n4", "n5"]}, needed={"gpu": 2}) == ["n1", "n2", "n3"]
    assert choose_exclusions(entries, usable={"gpu": ["n1", "n2"]}, needed={"gpu": 2}) == ["n3"]

"""The words for each way in which a replica can end, and which rank or node of it was lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest
from supervisor_testing import make_plan

from hpcrl.config.plan import Role
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.replicas.explain import explain_end, name_lost_rank

KILLED = "2026-11-23 12:00:00,123 ERROR launcher hpcrl.trainer.launcher: rank {} (pid 4242) was killed by SIGKILL\n"
TERM = signal.SIGTERM


class Process:
    """What is known of a replica's guard."""

    guard_pid = 77

    def __init__(self, *silent: int) -> None:
        self.silent = list(silent)


def component(*nodes: str, silent: tuple[int, ...] = (), process: bool = True) -> Component:
    group = make_plan(Path("/runs/x")).group(Role.TRAINER)
    made = Component(group, 3, address=Address("h", 1, nodes), log="log", on_change=lambda _: None)
    made.process = cast(Any, Process(*silent)) if process else None
    return made


@pytest.mark.parametrize(
    ("nodes", "end", "kind", "words"),
    [
        ((), End(1.0, exit_code=3), CauseKind.EXIT, "exited with code 3"),
        ((), End(1.0, signal=9), CauseKind.EXIT, "was killed by SIGKILL"),
        ((), End(1.0, exit_code=0), CauseKind.EARLY_EXIT, "exited with code 0, but the run was not over"),
        (
            ("n1",),
            End(1.0, exit_code=0, guard_signal=TERM),
            CauseKind.CANCELLED,
            "was ended by Slurm (SIGTERM to its step)",
        ),
        # outside of Slurm, somebody has told the guard
        ((), End(1.0, exit_code=0, guard_signal=TERM), CauseKind.EXIT, "exited with code 0"),
        ((), End(1.0, spawn_error="no such file"), CauseKind.SPAWN, "could not be started: no such file"),
        (
            ("n1",),
            End(1.0, spawn_error="busy", no_step=True),
            CauseKind.NO_STEP,
            "did not begin: busy; Slurm's message is in the log of the supervisor",
        ),
        (
            (),
            End(1.0, guard_lost=True),
            CauseKind.GUARD_LOST,
            "was lost: its guard (pid 77) was killed, and the role with it",
        ),
        (
            ("n1",),
            End(1.0, guard_lost=True),
            CauseKind.GUARD_LOST,
            "was lost: its step (srun, pid 77) ended without a report",
        ),
        (
            ("n1",),
            End(1.0, guard_lost=True, problem="a line that is none"),
            CauseKind.GUARD_LOST,
            "was given up: a line that is none",
        ),
    ],
)
def test_each_end_has_its_words(nodes: tuple[str, ...], end: End, kind: CauseKind, words: str) -> None:
    told = explain_end(component(*nodes), end, [])
    assert (told.kind, told.message) == (kind, f"trainer 3 {words}")
    assert (told.role, told.replica, told.rank, told.time_s) == ("trainer", 3, None, 1.0)
    assert (told.exit_code, told.signal) == (end.exit_code, end.signal)


def test_a_guard_that_never_was_has_no_number() -> None:
    told = explain_end(component(process=False), End(1.0, guard_lost=True), [])
    assert "its guard (pid None)" in told.message


def test_the_rank_that_was_killed_ended_by_a_signal_and_not_by_a_code(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(KILLED.format(5))
    told = explain_end(component("n1"), End(1.0, exit_code=1, node="n1"), [tmp_path / "missing", log])
    assert (told.rank, told.signal, told.exit_code, told.node) == (5, 9, None, "n1")
    assert told.message == "trainer 3 lost its rank 5, which was killed by SIGKILL"


@pytest.mark.parametrize(("after", "found"), [((1 << 18) - len(KILLED.format(5)), True), (1 << 18, False)])
def test_the_end_of_a_log_is_read_and_no_more(tmp_path: Path, after: int, found: bool) -> None:
    log = tmp_path / "0.log"
    log.write_text("y" * 999 + "\n" + KILLED.format(5) + "x" * after)
    assert (explain_end(component(), End(1.0, exit_code=1), [log]).rank == 5) is found


SAID = Cause(
    kind=CauseKind.ERROR,
    time_s=1.0,
    message="a peer went away",
    role="trainer",
    replica=3,
    error="PeerLostError",
    traceback="Traceback",
    secondary=True,
)


def test_the_rank_that_others_have_lost_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(KILLED.format(5))
    assert name_lost_rank(SAID, component("n1"), [log]) == Cause(
        kind=CauseKind.ERROR,
        time_s=1.0,
        message="trainer 3 lost its rank 5, which was killed by SIGKILL",
        role="trainer",
        replica=3,
        rank=5,
        signal=9,
    )


@pytest.mark.parametrize(
    ("nodes", "tasks", "silent", "names"),
    [
        (("n1", "n2"), 2, (1,), "n2"),
        (("n1", "n2"), 2, (0,), "n1"),
        (("n1", "n2"), 4, (1, 2), "n1, n2"),
        (("n2", "n1"), 4, (2, 3), "n1"),
        (("n2", "n1"), 2, (0, 1), "n1, n2"),
    ],
)
def test_guards_that_say_nothing_are_named_by_their_nodes(
    tmp_path: Path, nodes: tuple[str, ...], tasks: int, silent: tuple[int, ...], names: str
) -> None:
    logs = [tmp_path / f"{task}.log" for task in range(tasks)]
    named = name_lost_rank(SAID, component(*nodes, silent=silent), logs)
    assert named.message == f"trainer 3 was lost on {names}: the guard there was killed, and its ranks with it"
    assert (named.kind, named.secondary, named.error, named.traceback) == (CauseKind.GUARD_LOST, False, "", "")


def test_an_unknown_lost_rank_keeps_the_message(tmp_path: Path) -> None:
    logs = [tmp_path / "0.log"]
    for of in (component("n1"), component(silent=(0,)), component("n1", process=False)):
        assert name_lost_rank(SAID, of, logs) is SAID

"""The state machine of a replica, its command and its environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from supervisor_testing import make_plan

from hpcrl.config.plan import Role
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.launch.commands import fill_placeholders, role_environment
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.process.dumps import Dump
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.replicas.explain import explain_end, name_lost_rank


class FakeProcess:
    guard_pid = 7

    def __init__(self, silent: Sequence[int] = ()) -> None:
        self.orders: list[object] = []
        self.silent = list(silent)

    async def started(self) -> int | None:
        return 8

    async def ended(self) -> End:
        return End(1.0, exit_code=0)

    async def gone(self) -> list[int]:
        return []

    async def dump(self, path: str, *, timeout_s: float) -> Dump:
        return Dump([], [], [], "no stacks")

    def stop(self, grace_s: float) -> None:
        self.orders.append(grace_s)

    def kill(self) -> None:
        self.orders.append("kill")


@pytest.fixture
def seen() -> list[ComponentState]:
    return []


@pytest.fixture
def component(seen: list[ComponentState]) -> Component:
    group = make_plan(Path("/runs/x")).group(Role.TRAINER)
    return Component(
        group, 0, address=Address("h", 1), log="log", on_change=lambda component: seen.append(component.state)
    )


def test_the_usual_life(component: Component, seen: list[ComponentState]) -> None:
    component.starting(FakeProcess())
    component.ready()
    component.ended(End(5.0, exit_code=0), as_it_should=True)
    assert seen == [ComponentState.STARTING, ComponentState.READY, ComponentState.EXITED]
    status = component.status()
    assert (status.guard_pid, status.exit_code, status.ended_at_s) == (7, 0, 5.0)


def test_an_unrequested_end_is_a_failure(component: Component) -> None:
    component.starting(FakeProcess())
    component.ended(End(5.0, signal=9), as_it_should=False)
    assert component.state is ComponentState.FAILED


def test_a_requested_end_is_not_a_failure_for_any_exit_code(component: Component) -> None:
    process = FakeProcess()
    component.starting(process)
    component.ask_to_stop(2.0)
    assert component.state is ComponentState.STOPPING
    component.ended(End(5.0, signal=15), as_it_should=False)
    assert component.state is ComponentState.EXITED
    assert process.orders == [2.0]


def test_what_never_started_needs_no_process_to_end(component: Component) -> None:
    component.ask_to_stop(2.0)
    assert component.state is ComponentState.EXITED


def test_a_second_life_forgets_the_first(component: Component, seen: list[ComponentState]) -> None:
    component.starting(FakeProcess())
    component.ready()
    component.end = End(5.0, signal=9)
    component.restarting()
    assert component.status().ready_at_s is None
    component.starting(FakeProcess())
    assert component.status().signal is None
    assert seen[-2:] == [ComponentState.RESTARTING, ComponentState.STARTING]


def test_what_waits_for_its_restart_has_no_process_to_stop(component: Component) -> None:
    process = FakeProcess()
    component.starting(process)
    component.restarting()
    component.ask_to_stop(2.0)
    assert component.state is ComponentState.EXITED
    assert process.orders == []


def test_a_transition_that_is_not_in_the_table_is_a_bug(component: Component) -> None:
    with pytest.raises(AssertionError, match="PENDING -> READY"):
        component.ready()


def test_placeholders_are_filled_once_and_other_braces_stay() -> None:
    values = {"python": "/py", "run_dir": "/runs/{port}", "replica": "1", "host": "h", "port": "99"}
    command = ["{python}", "--at={host}:{port}", '{"json": {"a": 1}}', "{run_dir}", "{other}"]
    assert fill_placeholders(command, values) == ["/py", "--at=h:99", '{"json": {"a": 1}}', "/runs/{port}", "{other}"]


def test_the_environment_says_who_it_is_and_drops_what_is_not_meant_for_roles() -> None:
    group = make_plan(Path("/runs/x")).group(Role.ENGINE).model_copy(update={"env": {"OMP_NUM_THREADS": "2"}})
    inherited = {"PATH": "/bin", "OMP_NUM_THREADS": "64", "SUBMITIT_EXECUTOR": "local", "HPCRL_ROLE": "outer"}
    env = role_environment(group, 3, run=RunDir(Path("/runs/x")), run_id="id", attempt=2, inherited=inherited)
    assert env == {
        "PATH": "/bin",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
        "HPCRL_RUN_ID": "id",
        "HPCRL_PROCESS": "role",
        "HPCRL_RUN_DIR": "/runs/x",
        "HPCRL_ATTEMPT": "2",
        "HPCRL_ROLE": "engine",
        "HPCRL_REPLICA": "3",
    }


def test_what_a_replica_has_lost_is_found_in_the_logs_of_its_nodes(component: Component, tmp_path: Path) -> None:
    component.address = Address("h", 1, ("n1", "n2"))
    component.starting(FakeProcess())
    said = Cause(
        kind=CauseKind.ERROR, time_s=1.0, message="a peer went away", role="trainer", replica=0, secondary=True
    )
    logs = [tmp_path / "0-0.log", tmp_path / "0-1.log"]
    assert name_lost_rank(said, component, logs) is said
    logs[1].write_text("failed (exitcode: -9) local_rank: 3 (pid: 4242) of binary: python3")
    named = name_lost_rank(said, component, logs)
    assert (named.rank, named.signal, named.secondary) == (3, 9, False)
    assert named.message == "trainer 0 lost its rank 3, which was killed by SIGKILL"


def test_the_launcher_of_any_node_tells_which_rank_was_killed(component: Component, tmp_path: Path) -> None:
    component.address = Address("h", 1, ("n1", "n2"))
    component.starting(FakeProcess())
    logs = [tmp_path / "0-0.log", tmp_path / "0-1.log"]
    end = End(exit_code=1, signal=None, time_s=1.0)
    assert explain_end(component, end, logs).message == "trainer 0 exited with code 1"
    said = "2026-11-23 12:00:00,123 ERROR launcher hpcrl.trainer.launcher: rank {} (pid 4242) {}\n"
    logs[0].write_text(said.format(0, "exited with code 1"))
    logs[1].write_text(said.format(1, "was killed by SIGKILL"))
    told = explain_end(component, end, logs)
    assert (told.message, told.rank) == ("trainer 0 lost its rank 1, which was killed by SIGKILL", 1)


def test_the_cause_of_an_end_says_which_replica_of_which_role_where_and_how(component: Component) -> None:
    told = explain_end(component, End(exit_code=3, signal=None, time_s=5.0, node="n2"), [])
    place = (told.role, told.replica, told.rank, told.node, told.time_s)
    assert (place, told.exit_code, told.signal) == (("trainer", 0, None, "n2", 5.0), 3, None)
    told = explain_end(component, End(exit_code=None, signal=9, time_s=6.0), [])
    assert (told.role, told.kind, told.exit_code, told.signal) == ("trainer", CauseKind.EXIT, None, 9)


def test_a_guard_without_a_last_word_is_named_with_its_node(component: Component, tmp_path: Path) -> None:
    component.address = Address("h", 1, ("n1", "n2"))
    component.starting(FakeProcess(silent=[1]))
    said = Cause(
        kind=CauseKind.ERROR, time_s=1.0, message="a peer went away", role="trainer", replica=0, secondary=True
    )
    named = name_lost_rank(said, component, [tmp_path / "0-0.log", tmp_path / "0-1.log"])
    assert named.kind is CauseKind.GUARD_LOST
    assert named.message == "trainer 0 was lost on n2: the guard there was killed, and its ranks with it"

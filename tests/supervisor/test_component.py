"""The state machine of a replica, its command and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervisor_testing import make_plan

from hpcrl.config.plan import Role
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.commands import fill_placeholders, role_environment
from hpcrl.supervisor.component import Component
from hpcrl.supervisor.launcher import Address, End


class FakeProcess:
    guard_pid = 7

    def __init__(self) -> None:
        self.orders: list[object] = []

    async def started(self) -> int | None:
        return 8

    async def ended(self) -> End:
        return End(1.0, exit_code=0)

    async def gone(self) -> list[int]:
        return []

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


def test_an_end_nobody_asked_for_is_a_failure(component: Component) -> None:
    component.starting(FakeProcess())
    component.ended(End(5.0, signal=9), as_it_should=False)
    assert component.state is ComponentState.FAILED


def test_an_end_somebody_asked_for_is_none_whatever_its_code(component: Component) -> None:
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


def test_a_missed_deadline_stays_a_failure_after_the_process_is_stopped(component: Component) -> None:
    component.starting(FakeProcess())
    component.give_up()
    component.ask_to_stop(2.0)
    component.ended(End(5.0, signal=15), as_it_should=False)
    assert component.state is ComponentState.FAILED
    assert component.status().signal == 15


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
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
        "HPCRL_RUN_ID": "id",
        "HPCRL_PROCESS": "role",
        "HPCRL_RUN_DIR": "/runs/x",
        "HPCRL_ATTEMPT": "2",
        "HPCRL_ROLE": "engine",
        "HPCRL_REPLICA": "3",
    }

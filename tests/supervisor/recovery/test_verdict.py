"""Who is blamed for the end of an attempt, what was said too late or in an earlier life, and which nodes are broken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from supervisor_testing import create

from hpcrl.config.plan import Plan, Role
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.clocks import Clocks, NodeClock
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.process.guarded import End
from hpcrl.supervisor.recovery.verdict import broken_nodes, current_records, first_cause, slow_failures
from hpcrl.supervisor.replicas.component import Component

CLOCKS = Clocks({"far": NodeClock(0.0, 3.0)})
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(tmp_path)


def component(
    plan: Plan, role: Role, replica: int = 0, *, nodes: tuple[str, ...] = (), critical: bool = True
) -> Component:
    group = plan.group(role)
    group = group.model_copy(update={"policy": group.policy.model_copy(update={"critical": critical})})
    address = Address("127.0.0.1", 1, nodes=nodes)
    return Component(group, replica, address=address, log="log", on_change=lambda _: None)


def record(
    role: str, time_s: float, *, replica: int = 0, error: str = "ValueError", **changes: object
) -> FailureRecord:
    values = {"rank": 0, "message": f"{role} at {time_s:g}", "traceback": "", "secondary": False, **changes}
    return FailureRecord(time_s=time_s, role=role, replica=replica, error=error, **values)  # type: ignore[arg-type]


def end_of(role: str, time_s: float, *, replica: int = 0, **changes: object) -> Cause:
    values = {"kind": CauseKind.EXIT, "message": f"{role} {replica} exited", "exit_code": 1, **changes}
    return Cause(time_s=time_s, role=role, replica=replica, **values)  # type: ignore[arg-type]


# -- what counts of what was said


def test_words_of_an_earlier_life_do_not_count(run: RunDir) -> None:
    attempt = run.start_attempt()
    engine, trainer = component(run.plan(), Role.ENGINE), component(run.plan(), Role.TRAINER)
    engine.started_at_s = 50.0
    said = {"engine": (49.9, 50.0, 60.0), "trainer": (1.0,)}
    directory = run.attempt_dir(attempt) / "failures"
    for role, times in said.items():
        for number, time_s in enumerate(times):
            write_json(directory / f"{role}-{number}.json", record(role, time_s))
    found = current_records(run, attempt, [engine, trainer])
    assert [(each.role, each.time_s) for each in found] == [("trainer", 1.0), ("engine", 50.0), ("engine", 60.0)]


@pytest.mark.parametrize(
    ("given_up", "critical", "counts"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_replica_that_the_run_continues_without_is_not_blamed(
    run: RunDir, given_up: bool, critical: bool, counts: bool
) -> None:
    attempt = run.start_attempt()
    engine = component(run.plan(), Role.ENGINE, critical=critical)
    engine.given_up = given_up
    directory = run.attempt_dir(attempt) / "failures"
    write_json(directory / "engine.json", record("engine", 5.0))
    assert bool(current_records(run, attempt, [engine])) is counts


# -- who was first


def test_errors_after_a_stop_request_are_no_cause(run: RunDir) -> None:
    plan = run.plan()
    engine, trainer = component(plan, Role.ENGINE), component(plan, Role.TRAINER)
    ends = [end_of("trainer", 100.0)]

    def blamed(*records: FailureRecord, stop: float | None = None, stopped_at_s: float = 90.0) -> str:
        engine.stop_asked_at_s = stop
        cause = first_cause(ends, records, [engine, trainer], stopped_at_s=stopped_at_s, clocks=CLOCKS)
        assert cause is not None
        return f"{cause.role} {cause.time_s:g}"

    assert blamed(record("engine", 89.0)) == "engine 89"
    assert blamed(record("engine", 90.0)) == "engine 90"
    assert blamed(record("engine", 91.0)) == "trainer 100"
    # asked earlier, or later, than the end was decided
    assert blamed(record("engine", 89.0), stop=80.0) == "trainer 100"
    assert blamed(record("engine", 93.0), stop=95.0) == "engine 93"
    # of a role that nobody knows the end of the attempt counts
    assert blamed(record("router", 89.0)) == "router 89"
    assert blamed(record("router", 91.0)) == "trainer 100"
    # as far as its clock can be trusted
    assert blamed(record("engine", 92.5, node="far")) == "engine 92.5"
    assert blamed(record("engine", 93.5, node="far")) == "trainer 100"
    assert first_cause([], [record("engine", 1.0)], [engine], stopped_at_s=9.0, clocks=CLOCKS) is None


def test_an_engine_that_is_away_is_why_others_lost_a_peer(run: RunDir) -> None:
    plan = run.plan()
    engines = [component(plan, Role.ENGINE, replica) for replica in range(3)]
    trainer = component(plan, Role.TRAINER)
    # two fail and are started again; one of them has come back
    for engine, time_s in ((engines[0], 70.0), (engines[1], 60.0), (engines[2], 50.0)):
        engine.restarts.pause_s(end_of("engine", time_s, replica=engine.replica))
        engine.restarts.count = 1
    engines[2].ready_at_s = 55.0
    lost = record("trainer", 80.0, error="PeerLostError", secondary=True)
    ends = [end_of("trainer", 81.0)]

    def blamed(records: list[FailureRecord]) -> tuple[str | None, int | None]:
        cause = first_cause(ends, records, [*engines, trainer], stopped_at_s=90.0, clocks=CLOCKS)
        assert cause is not None
        return cause.role, cause.replica

    assert blamed([lost]) == ("engine", 1)
    # who has a reason of its own is the cause
    assert blamed([record("trainer", 80.0)]) == ("trainer", 0)
    for engine in engines:
        engine.ready_at_s = 85.0
    assert blamed([lost]) == ("trainer", 0)
    # nor is one that is only starting for the first time
    for engine in engines:
        engine.ready_at_s, engine.restarts.count = None, 0
    assert blamed([lost]) == ("trainer", 0)


def test_a_role_that_reported_a_failure_and_did_not_end(run: RunDir) -> None:
    plan = run.plan()
    stays, ended, silent = (component(plan, Role.ENGINE, replica) for replica in range(3))
    ended.end = End(exit_code=1, signal=None, time_s=7.0)
    records = [record("engine", 5.0, replica=0), record("engine", 5.0, replica=1), record("trainer", 5.0, replica=2)]
    (found,) = slow_failures(records, [stays, ended, silent])
    assert (found.kind, found.role, found.replica, found.secondary) == (CauseKind.EXIT, "engine", 0, True)
    assert found.message == "engine 0 failed and did not end"


# -- which nodes


@pytest.mark.parametrize("tasks_per_node", [1, 2])
def test_a_broken_node_is_that_of_the_task_whose_log_says_so(run: RunDir, tmp_path: Path, tasks_per_node: int) -> None:
    nodes = ("n4", "n7", "n9")
    trainer = component(run.plan(), Role.TRAINER, nodes=nodes)
    logs = [tmp_path / f"{task}.log" for task in range(len(nodes) * tasks_per_node)]
    for log in logs:
        log.write_text("nothing\n")
    broken = 2 * tasks_per_node - 1  # the last task of the second node
    logs[broken].write_text(ECC)
    words = list(map(str, logs))
    found = broken_nodes(trainer, end_of("trainer", 1.0), words)
    assert found == {"n7": "trainer 0: uncorrectable ECC error"}
    for kind in (CauseKind.CANCELLED, CauseKind.NODE_FAIL):
        assert broken_nodes(trainer, msgspec.structs.replace(end_of("trainer", 1.0), kind=kind), words) == {}
    # without Slurm there are no nodes
    assert broken_nodes(component(run.plan(), Role.TRAINER), end_of("trainer", 1.0), words) == {}

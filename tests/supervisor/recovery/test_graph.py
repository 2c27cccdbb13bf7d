"""Start order, drain order, and plans that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervisor_testing import make_plan

from hpcrl.config.plan import Plan, Role
from hpcrl.supervisor.recovery.graph import check_graph, drain_stages, startable


def changed(plan: Plan, role: Role, /, **update: object) -> Plan:
    groups = tuple(g.model_copy(update=update) if g.role is role else g for g in plan.groups)
    return plan.model_copy(update={"groups": groups})


def test_a_role_starts_when_all_before_it_are_ready() -> None:
    plan = make_plan(Path("/runs/x"))
    assert startable(plan.group(Role.ENGINE), set())
    assert not startable(plan.group(Role.TRAINER), set())
    assert startable(plan.group(Role.TRAINER), {Role.ENGINE})


def test_drain_goes_up_in_order_and_takes_equals_together() -> None:
    plan = make_plan(Path("/runs/x"))
    assert [[g.role for g in stage] for stage in drain_stages(plan)] == [[Role.TRAINER], [Role.ENGINE]]
    same = plan.group(Role.ENGINE).policy.model_copy(update={"drain_order": 0})
    together = drain_stages(changed(plan, Role.ENGINE, policy=same))
    assert [[g.role for g in stage] for stage in together] == [[Role.ENGINE, Role.TRAINER]]


def test_a_good_plan_passes() -> None:
    check_graph(make_plan(Path("/runs/x")))


@pytest.mark.parametrize(
    ("role", "update", "message"),
    [
        (Role.ENGINE, {"after": (Role.TRAINER,)}, "wait for each other"),
        (Role.TRAINER, {"after": (Role.ORCHESTRATOR,)}, "which the plan does not have"),
        (Role.ENGINE, {"role": Role.TRAINER}, "more than one group"),
    ],
)
def test_a_plan_that_cannot_start_is_refused(role: Role, update: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_graph(changed(make_plan(Path("/runs/x")), role, **update))


def test_a_plan_that_never_ends_is_refused() -> None:
    plan = make_plan(Path("/runs/x"))
    policy = plan.group(Role.TRAINER).policy.model_copy(update={"ends_run": False})
    with pytest.raises(ValueError, match="no role of the plan ends the run"):
        check_graph(changed(plan, Role.TRAINER, policy=policy))

"""The order of roles: of their starts, and of their ends."""

from __future__ import annotations

from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

from hpcrl.config.plan import Plan, Role, RoleGroup


def check_graph(plan: Plan) -> None:
    """Refuse a plan that cannot be started or would never end.

    Raises
    ------
    ValueError
        Roles wait for each other in a cycle or for a role that the plan does not have, a role occurs twice, or no
        role ends the run.
    """
    roles = [group.role for group in plan.groups]
    if doubled := {role for role in roles if roles.count(role) > 1}:
        raise ValueError(f"the plan has more than one group of {', '.join(sorted(doubled))}")
    for group in plan.groups:
        if unknown := set(group.after) - set(roles):
            raise ValueError(f"{group.role} starts after {', '.join(sorted(unknown))}, which the plan does not have")
    try:
        TopologicalSorter({group.role: group.after for group in plan.groups}).prepare()
    except CycleError as error:
        raise ValueError(f"roles wait for each other: {' after '.join(error.args[1])}") from error
    if not any(group.policy.ends_run for group in plan.groups):
        raise ValueError("no role of the plan ends the run")


def startable(group: RoleGroup, ready: Collection[Role]) -> bool:
    """Return whether every role that ``group`` starts after is ready."""
    return all(role in ready for role in group.after)


def drain_stages(plan: Plan) -> list[list[RoleGroup]]:
    """Return the groups in the order in which they are asked to stop; groups of one stage are asked together."""
    orders = sorted({group.policy.drain_order for group in plan.groups})
    return [[group for group in plan.groups if group.policy.drain_order == order] for order in orders]

"""The command line of the router in front of engines. Flags are those of vllm-router 0.1.17 where it is that one."""

from __future__ import annotations

from hpcrl.config.recipe import Recipe
from hpcrl.jobplan.commands.dynamo import dynamo_router_command
from hpcrl.processes.interpreter import module_command

ROUTER_PORTS = 2
"""Requests and its admin calls, then its metrics."""
ROUTER_VARIABLES = {"RUST_LOG": "warn"}
"""Variables of the router: otherwise it logs lines for each request. Its flag for that has no effect."""
_ADD_S = 10
"""An engine is given to the router when it serves: it need not wait for one that does not answer."""


def has_router(recipe: Recipe) -> bool:
    """Return whether requests go through a router."""
    engine = recipe.engine
    kind = engine.router.kind
    return kind not in ("auto", "direct") or (
        kind == "auto" and (engine.backend == "vllm" or engine.prefill is not None)
    )


def asks_health(recipe: Recipe) -> bool:
    """Return whether the router checks engines' health without a token: vllm-router cannot send one there."""
    return has_router(recipe) and recipe.engine.router.kind != "dynamo"


def router_command(recipe: Recipe, *, events_offset: int = 1) -> tuple[str, ...]:
    """Return the command of the router, which starts without engines.

    The orchestrator adds each engine when it serves the newest weights, and removes it before it does not. Otherwise an
    engine that was restarted would serve the start model as soon as it is healthy.

    Parameters
    ----------
    events_offset:
        Distance of the port of an engine's KV events above that of its server.
    """
    router = recipe.engine.router
    if router.kind == "dynamo":
        return dynamo_router_command(recipe, events_offset=events_offset)
    flags = {
        "--host": "{host}",
        "--port": "{port}",
        "--prometheus-host": "{host}",
        "--prometheus-port": "{port+1}",
        "--policy": router.policy,
        "--request-timeout-secs": f"{max(1, round(recipe.rollouts.request_timeout_s))}",
        "--health-check-interval-secs": str(router.health_interval_s),
        "--health-check-timeout-secs": str(max(5, router.health_interval_s)),
        "--health-failure-threshold": "2",
        "--health-success-threshold": "1",
        "--worker-startup-timeout-secs": str(_ADD_S),
        "--worker-startup-check-interval": "1",
        # the orchestrator removes a failing engine, and adds it again later
        "--cb-timeout-duration-secs": "5",
    }
    words = (word for flag in flags.items() for word in flag)
    return tuple(module_command("{python}", "hpcrl.inference.vllm.router", *words))

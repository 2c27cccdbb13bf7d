"""NVIDIA Dynamo's router in front of vLLM's own servers: its command, and what engines must publish for it."""

from __future__ import annotations

from typing import Any

from hpcrl.config.recipe import Recipe
from hpcrl.processes.interpreter import module_command


def has_events(recipe: Recipe) -> bool:
    """Return whether engines publish the changes of their KV cache."""
    return recipe.engine.router.kind == "dynamo"


def kv_events(offset: int, *, nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """Return vLLM's ``--kv-events-config``: each rank publishes on the port ``offset`` above that of its server.

    Parameters
    ----------
    nodes, ranks_per_node:
        Shape of a replica. vLLM adds the index of a rank in the replica to the port that it is given: on later nodes
        the ranks of nodes before must be taken off.
    """
    port = f"{{port+{offset}}}"
    if nodes > 1:
        port = f"{{{port}-node_rank*{ranks_per_node}}}"
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
    }


def dynamo_router_command(recipe: Recipe, *, events_offset: int) -> tuple[str, ...]:
    """Return the router's command; see `hpcrl.inference.dynamo.router`."""
    router = recipe.engine.router
    flags = {
        "--host": "{host}",
        "--port": "{port}",
        "--model": recipe.name,
        "--block-size": str(recipe.engine.block_size),
        "--events-offset": str(events_offset),
        "--session-ttl-s": f"{router.session_ttl_s:g}",
        "--request-timeout-s": f"{recipe.rollouts.request_timeout_s:g}",
        "--health-interval-s": str(router.health_interval_s),
    }
    words = (word for flag in flags.items() for word in flag)
    return tuple(module_command("{python}", "hpcrl.inference.dynamo.router", *words))

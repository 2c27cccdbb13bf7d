"""Command lines of NVIDIA Dynamo: its frontend, which routes by KV, and its workers around vLLM's engine.

Its frontend does not send requests to vLLM's own servers: workers register with it, and take requests over a protocol
of Dynamo's own. So engines are started by ``dynamo.vllm``, with the same flags of the engine. Flags are those of Dynamo
1.6, from its documentation: nothing of it was run here.
"""

from __future__ import annotations

from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.planning.vllm_command import engine_flags, own_flags, rendered

__all__ = ["WORKER_PORTS", "frontend_command", "worker_command"]

WORKER_PORTS = 2
"""Health, metrics and control, then KV events."""


def frontend_command(recipe: Recipe) -> tuple[str, ...]:
    """The frontend: OpenAI's API, KV-aware routing."""
    flags = {
        "http-host": "{host}",
        "http-port": "{port}",
        "router-mode": "kv",
        "kv-cache-block-size": recipe.engine.block_size,
        **_planes(recipe),
    }
    return (*_environment(recipe), "{python}", "-m", "dynamo.frontend", *rendered(flags))


def worker_command(recipe: Recipe, role: Role, *, gpus: bool, rdma: bool) -> tuple[str, ...]:
    """A worker of one rank.

    Parameters
    ----------
    role:
        ENGINE, PREFILL or DECODE.
    gpus, rdma:
        As for `vllm_command`.
    """
    flags = engine_flags(recipe, role, gpus=gpus, rdma=rdma, ranks_per_node=1)
    flags["kv-events-config"] = {
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": "tcp://*:{port+1}",
        "enable_kv_cache_events": True,
    }
    mode = {Role.PREFILL: ("--disaggregation-mode", "prefill"), Role.DECODE: ("--disaggregation-mode", "decode")}
    own = rendered({**flags, **_planes(recipe), **own_flags(recipe, role)})
    program = ("{python}", "-m", "dynamo.vllm", "--model", recipe.model.path, "--enable-rl", *mode.get(role, ()))
    return (*_environment(recipe, "DYN_SYSTEM_PORT={port}"), *program, *own)


def _planes(recipe: Recipe) -> dict[str, str]:
    """How its parts find each other and talk."""
    return {
        "namespace": recipe.name,
        "discovery-backend": "file" if recipe.engine.router.etcd is None else "etcd",
        "request-plane": "tcp",
        "event-plane": "zmq",
    }


def _environment(recipe: Recipe, *own: str) -> tuple[str, ...]:
    """What it takes from the environment alone."""
    etcd = recipe.engine.router.etcd
    place = "DYN_FILE_KV={run_dir}/dynamo" if etcd is None else f"ETCD_ENDPOINTS={etcd}"
    return ("env", place, *own)

"""The command line of a vLLM engine, and its environment. Pure; what vLLM makes of it is asked by `check_flags`.

A replica of one rank is one API server. A replica of several ranks (wide expert parallelism) has one API server a
data-parallel rank: vLLM's own node-local program starts those of a node, on neighbouring ports; it refuses to lead a
single one, so that a node of one rank is that server itself. Flags and their meaning are those of vLLM 0.32.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hpcrl.config.engine import EngineConfig
from hpcrl.config.engine_shape import engine_side, step_limits
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.jobplan.commands.dynamo import has_events, kv_events
from hpcrl.jobplan.commands.kv_transfer import transfer_config
from hpcrl.jobplan.commands.router import asks_health
from hpcrl.processes.interpreter import module_command

RPC_PORT_OFFSET = 2
"""Ports of a node of a wide replica: its ranks, then the node's health, then data-parallel RPC (first node)."""
LOW_LATENCY = "deepep_low_latency"
"""DeepEP's kernels for small batches; see `all2all_backend`."""


def all2all_backend(role: Role) -> str:
    """Return vLLM's all-to-all backend for experts: DeepEP's kernels for small batches where engines only decode."""
    return LOW_LATENCY if role is Role.DECODE else "deepep_high_throughput"


def vllm_ports(ranks_per_node: int, *, nodes: int) -> int:
    """Return the number of consecutive ports that each node of a replica needs."""
    return 1 if nodes * ranks_per_node == 1 else ranks_per_node + RPC_PORT_OFFSET


def vllm_command(
    recipe: Recipe, role: Role, *, nodes: int, ranks_per_node: int, gpus: bool = False, rdma: bool = False
) -> tuple[str, ...]:
    """Return the command of each node of a replica, with the plan's placeholders.

    Parameters
    ----------
    role:
        ENGINE, PREFILL or DECODE; decides how experts exchange tokens.
    nodes, ranks_per_node:
        Shape of a replica; a rank is a GPU, or the whole node without GPUs.
    gpus, rdma:
        Whether ranks are GPUs, and whether their nodes have adapters for RDMA: decide how KV moves between engines.
    """
    wide = nodes * ranks_per_node > 1
    host = "{node_host}" if nodes > 1 else "{host}"
    flags = {
        "host": host,
        "port": "{port}",
        # token ids in and out, with a version for each token
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "disable-uvicorn-access-log": True,
        "middleware": f"hpcrl.inference.vllm.{_door(recipe)}",
        # source of weights and identity of the reader; later calls must agree with them
        "additional-config": {"hpcrl": _told(recipe, role, host, servers=nodes * ranks_per_node)},
        **engine_flags(recipe, role, gpus=gpus, rdma=rdma, ranks_per_node=ranks_per_node),
    }
    if has_events(recipe):
        offset = vllm_ports(ranks_per_node, nodes=nodes)
        flags["kv-events-config"] = kv_events(offset, nodes=nodes, ranks_per_node=ranks_per_node)
    if wide:
        flags |= _wide(role, nodes=nodes, ranks_per_node=ranks_per_node, gpus=gpus)
    if ranks_per_node > 1:
        # the older entry point of the line below cannot start several ranks
        command = module_command("{python}", "vllm.entrypoints.cli.main", "serve", recipe.model.path)
    else:
        # works with the CPU build too, whose `vllm` program asks for a distribution of another name
        command = module_command("{python}", "vllm.entrypoints.openai.api_server", "--model", recipe.model.path)
    return (*command, *rendered({**flags, **own_flags(recipe, role)}))


def engine_flags(recipe: Recipe, role: Role, *, gpus: bool, rdma: bool, ranks_per_node: int) -> dict[str, Any]:
    """Return the flags of every program around vLLM's engine, whichever program serves it; see `vllm_command`."""
    engine, limits = recipe.engine, step_limits(recipe.engine, role)
    return {
        "served-model-name": recipe.name,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "block-size": engine.block_size,
        "dtype": engine.dtype,
        "seed": recipe.seed,
        "enable-prefix-caching": True,
        # log-probabilities of the distribution that tokens were drawn from: what the trainer compares with
        "logprobs-mode": "processed_logprobs",
        # sampling settings come from requests, not from the model directory
        "generation-config": "vllm",
        "enable-return-routed-experts": recipe.returns_routed_experts or None,
        **(_gpu_memory(engine) if gpus else {}),
        "weight-transfer-config": {"backend": "hpcrl"},
        "worker-extension-cls": "hpcrl.inference.vllm.weights.StagingWorker",
        "kv-transfer-config": transfer_config(recipe, role, gpus=gpus, rdma=rdma, ranks_per_node=ranks_per_node),
    }


def _gpu_memory(engine: EngineConfig) -> dict[str, Any]:
    """Return the flags about the memory of a GPU, as plans count with it.

    Where a trainer has the rest of the GPU, the KV cache has a fixed size: vLLM would take what it finds free while it
    starts, and an engine may be restarted while the trainer runs.
    """
    flags: dict[str, Any] = {"gpu-memory-utilization": engine.memory.gpu_memory_utilization}
    if engine.memory.kv_cache_dtype != "auto":
        flags["kv-cache-dtype"] = engine.memory.kv_cache_dtype
    if engine.shares_gpus:
        flags["kv-cache-memory-bytes"] = int(engine.kv_cache_gib * (1 << 30))
    return flags


def own_flags(recipe: Recipe, role: Role) -> dict[str, Any]:
    """Return ``vllm_args`` of the recipe, those of the side last."""
    side = engine_side(recipe.engine, role)
    return {**recipe.engine.vllm_args, **(side.vllm_args if side is not None else {})}


def vllm_variables(recipe: Recipe, *, gpus: bool) -> dict[str, str]:
    """Return the variables that vLLM reads from its environment.

    Parameters
    ----------
    gpus:
        Whether ranks are GPUs.
    """
    variables = {
        # the calls that update weights are not served without
        "VLLM_SERVER_DEV_MODE": "1",
        "HPCRL_VLLM_PLUGIN": "1",
        # compute nodes must not access the internet
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        # by default it listens, for all but HTTP, on the address of the default route, or of the node's own name
        "VLLM_HOST_IP": "{node_host}",
    }
    if recipe.engine.kv_store is not None:
        # keys of KV blocks are hashes: they must be the same in all engines
        variables["PYTHONHASHSEED"] = "0"
    if gpus:
        if recipe.trainer.precision.fp8 is not None:
            # by default vLLM rounds scales of weights and activations up to powers of two, also those of published
            # weights: they would differ from the trainer's (the rule `fp8-is-one`)
            variables["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
        return {**variables, "VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    # whole GiB; engines of one machine share its cores by OMP_NUM_THREADS, each one would take all by default
    gib = str(math.ceil(recipe.engine.kv_cache_gib))
    if recipe.engine.vllm_args.get("enforce-eager"):
        # a few functions of the sampler are compiled even so, at the first request: 27 s of a core at each start
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if recipe.engine.threads == 1:
        # vLLM is imported once, not by each of an engine's three processes (the correction `fork` of
        # `hpcrl.inference.vllm.cpu`). A team of OpenMP's threads would not outlive a fork
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return {**variables, "VLLM_CPU_KVCACHE_SPACE": gib, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _door(recipe: Recipe) -> str:
    """Return module and class of the outermost middleware."""
    door = "RunAccessBehindRouter" if asks_health(recipe) else "RunAccess"
    return f"routed_experts_middleware.{door}WithRows" if recipe.returns_routed_experts else f"access.{door}"


def _told(recipe: Recipe, role: Role, host: str, *, servers: int) -> dict[str, Any]:
    """Return the configuration of `hpcrl.inference.vllm.weights`."""
    told: dict[str, Any] = {"reader": _reader(recipe, role, host), "servers": servers}
    if recipe.trainer.lora is not None:
        told["kept_base_bytes"] = int(recipe.handoff.adapter_base_gib * (1 << 30))
    return told


def _reader(recipe: Recipe, role: Role, host: str) -> dict[str, Any]:
    """Return an `hpcrl.weights.read.registration.ReaderIdentity` as JSON.

    The number of a server is added to its name where a replica has several.
    """
    handoff = recipe.handoff
    reader: dict[str, Any] = {
        "name": f"{role.value}-{{replica}}",
        "expiry_s": handoff.lease_timeout_s,
        "floor_s": handoff.update_timeout_s,
        "min_bytes_per_s": handoff.min_bandwidth_mib_s * (1 << 20),
        "streams": handoff.read_streams,
    }
    if handoff.node_cache is not None:
        reader |= {"cache_dir": handoff.node_cache, "cache_bytes": int(handoff.node_cache_gib * (1 << 30))}
    if recipe.fans_out:
        reader |= {"fanout_host": host, "fanout_degree": handoff.fanout_degree}
    return reader


def _wide(role: Role, *, nodes: int, ranks_per_node: int, gpus: bool) -> dict[str, Any]:
    """Return the flags of data-parallel attention, with expert-parallel experts over all ranks of a replica."""
    several = ranks_per_node > 1
    start = f"{{node_rank*{ranks_per_node}}}" if nodes > 1 else 0
    return {
        "data-parallel-size": nodes * ranks_per_node,
        "data-parallel-size-local": ranks_per_node if several else None,
        "data-parallel-start-rank": start if several else None,
        "data-parallel-rank": None if several else "{node_rank}",
        "data-parallel-address": "{host}",
        "data-parallel-rpc-port": f"{{port+{ranks_per_node + 1}}}",
        "data-parallel-multi-port-external-lb": True if several else None,
        "data-parallel-supervisor-port": f"{{port+{ranks_per_node}}}" if several else None,
        "enable-expert-parallel": True,
        # DeepEP moves tokens between GPUs alone
        "all2all-backend": all2all_backend(role) if gpus else "allgather_reducescatter",
    }


def rendered(flags: dict[str, Any]) -> list[str]:
    """Return flags as ``--name value``; True gives the flag alone, False its ``--no-`` form, None nothing."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (dict, list)):
            words += [f"--{name}", json.dumps(value, sort_keys=True)]
        else:
            words += [f"--{name}", str(value)]
    return words

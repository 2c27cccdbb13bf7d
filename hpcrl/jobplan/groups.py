"""The role groups of a run: commands, order, readiness, deadlines. The layout decides the places of their nodes."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, engine_ranks_per_node, step_limits
from hpcrl.config.environments import HostedEnv
from hpcrl.config.plan import FileProbe, HttpProbe, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import Recipe, RolePolicyConfig, TrainerConfig
from hpcrl.jobplan.commands.dynamo import has_events
from hpcrl.jobplan.commands.kv_transfer import disk_command, front_command, has_rdma, side_command, side_ports
from hpcrl.jobplan.commands.router import ROUTER_PORTS, asks_health, has_router, router_command
from hpcrl.jobplan.commands.store import STORE_PORTS, join_command, store_master_command
from hpcrl.jobplan.commands.vllm import vllm_command, vllm_ports
from hpcrl.jobplan.environment import plain, role_variables
from hpcrl.processes.interpreter import module_command


def make_groups(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    """Return all groups of a run, with default places."""
    if recipe.sft is not None:
        groups = [_trainer(recipe, cluster, run_name)]
    else:
        engines = _engines(recipe, cluster, run_name)
        inference = tuple(group.role for group in engines)
        groups = [
            *_store(recipe, cluster, run_name),
            *engines,
            *_router(recipe, cluster, run_name),
            *_environment_workers(recipe, cluster, run_name),
            _orchestrator(recipe, cluster, run_name, inference),
        ]
        if recipe.job.payload == "evaluation":
            groups[-1] = _as_evaluation(groups[-1])
        else:
            groups.append(_trainer(recipe, cluster, run_name))
    backend = recipe.engine.backend
    given = [{"python": cluster.python_of(group.role, backend=backend), "secrets": cluster.secrets} for group in groups]
    groups = [group.model_copy(update=update) for group, update in zip(groups, given, strict=True)]
    if recipe.job.payload == "probe":
        groups = [_as_probe(group, local=not cluster.uses_slurm) for group in groups]
    return groups


def _engines(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    engine = recipe.engine
    sides = [(Role.PREFILL, engine.prefill), (Role.DECODE, engine.decode)]
    shapes = [(role, side.replicas, side.nodes) for role, side in sides if side is not None]
    shapes = shapes or [(Role.ENGINE, engine.replicas, engine.nodes)]
    return [
        RoleGroup(
            role=role,
            replicas=replicas,
            ranks=nodes * engine_ranks_per_node(recipe, cluster, role),
            nodes=nodes,
            beside=engine.is_colocated and cluster.uses_slurm,
            command=join_command(recipe, cluster, role, _engine_command(recipe, role), nodes=nodes, ranks_per_node=1)
            if engine.backend == "embedded"
            else _vllm_command(recipe, cluster, role, nodes=nodes),
            servers_per_node=_engine_servers(recipe, cluster, role),
            ports=_engine_ports(recipe, cluster, role, nodes=nodes),
            env=plain(role_variables(recipe, cluster, role, run_name)),
            after=(Role.STORE,) if engine.kv_store is not None else (),
            ready=HttpProbe(path="/health"),
            start_timeout_s=cluster.limits.start_timeout_s,
            policy=_engine_policy(recipe, cluster),
        )
        for role, replicas, nodes in shapes
    ]


def _engine_policy(recipe: Recipe, cluster: ClusterProfile) -> RolePolicy:
    policy = _policy(recipe.supervision.engine, cluster)
    # a restarted engine has no weights before the trainer's next turn: the attempt begins again instead
    return policy.model_copy(update={"restart": "never"}) if recipe.engine.is_colocated else policy


def _vllm_command(recipe: Recipe, cluster: ClusterProfile, role: Role, *, nodes: int) -> tuple[str, ...]:
    """Return the command of vLLM behind the programs that prepare a node for it."""
    ranks, gpus = engine_ranks_per_node(recipe, cluster, role), engine_gpus(recipe, cluster, role) > 0
    rdma = has_rdma(cluster, role) and gpus
    command = vllm_command(recipe, role, nodes=nodes, ranks_per_node=ranks, gpus=gpus, rdma=rdma)
    command = disk_command(recipe, command)
    command = side_command(
        recipe, command, gpus=gpus, offset=vllm_ports(ranks, nodes=nodes), ranks_per_node=ranks, nodes=nodes
    )
    return join_command(recipe, cluster, role, command, nodes=nodes, ranks_per_node=ranks)


def _engine_servers(recipe: Recipe, cluster: ClusterProfile, role: Role) -> int:
    """Return the number of an engine's servers on a node: vLLM has one for each rank."""
    return engine_ranks_per_node(recipe, cluster, role) if recipe.engine.backend == "vllm" else 0


def _engine_ports(recipe: Recipe, cluster: ClusterProfile, role: Role, *, nodes: int) -> int:
    """Count the ports of a node: servers, then what leads KV between engines, or tells the router of it."""
    ranks, gpus = engine_ranks_per_node(recipe, cluster, role), engine_gpus(recipe, cluster, role) > 0
    events = ranks if has_events(recipe) else 0
    return vllm_ports(ranks, nodes=nodes) + side_ports(recipe, gpus=gpus, ranks_per_node=ranks) + events


def _store(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    """Return the group of the KV pool's master; the pool itself is in the engines."""
    store = recipe.engine.kv_store
    if store is None:
        return []
    return [
        RoleGroup(
            role=Role.STORE,
            replicas=1,
            ranks=1,
            beside=cluster.uses_slurm,
            command=store_master_command(store, cluster.etcd),
            ports=STORE_PORTS,
            env=plain(role_variables(recipe, cluster, Role.STORE, run_name)),
            ready=FileProbe(),
            start_timeout_s=cluster.limits.start_timeout_s,
            policy=_policy(recipe.supervision.store, cluster),
        )
    ]


def _router(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    """Return the group of the router, to which the orchestrator sends requests.

    It starts with the engines, and the orchestrator adds them later. A router between prefill and decode must know them
    at its start.
    """
    if not has_router(recipe):
        return []
    engine = recipe.engine
    sides = (Role.PREFILL, Role.DECODE) if engine.prefill is not None else ()
    first = Role.PREFILL if sides else Role.ENGINE
    # ports above those of an engine's servers
    offset = vllm_ports(
        engine_ranks_per_node(recipe, cluster, first), nodes=(engine.prefill.nodes if engine.prefill else engine.nodes)
    )
    gpus = bool(sides) and engine_gpus(recipe, cluster, first) > 0
    return [
        RoleGroup(
            role=Role.ROUTER,
            replicas=1,
            ranks=1,
            beside=cluster.uses_slurm,
            command=front_command(recipe, router_command(recipe, events_offset=offset), gpus=gpus, offset=offset),
            ports=ROUTER_PORTS,
            env=plain(role_variables(recipe, cluster, Role.ROUTER, run_name)),
            after=sides,
            # its /health succeeds without any engine
            ready=HttpProbe(path="/liveness"),
            start_timeout_s=cluster.limits.start_timeout_s,
            policy=_policy(recipe.supervision.router, cluster),
        )
    ]


def _environment_workers(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    """Return the group of workers that host environments."""
    workers = recipe.environment_workers
    if workers is None:
        return []
    return [
        RoleGroup(
            role=Role.ENV,
            replicas=workers.count,
            ranks=1,
            beside=cluster.uses_slurm and not workers.apart,
            per_node=workers.per_node if workers.apart else workers.count,
            command=tuple(module_command("{python}", "hpcrl.rollouts.environments.workers")),
            env=plain(role_variables(recipe, cluster, Role.ENV, run_name)),
            # after each environment has given a prompt
            ready=HttpProbe(path="/health"),
            start_timeout_s=max(cluster.limits.start_timeout_s, *_environment_limits(recipe)),
            policy=_policy(recipe.supervision.env, cluster),
        )
    ]


def _environment_limits(recipe: Recipe) -> list[float]:
    """Return the maximum start of each environment and of its first prompt together, in seconds."""
    hosted = [each for each in recipe.environments if isinstance(each, HostedEnv)]
    return [0.0, *(each.start_timeout_s + each.answer_timeout_s for each in hosted)]


def _engine_command(recipe: Recipe, role: Role) -> tuple[str, ...]:
    engine, handoff, limits = recipe.engine, recipe.handoff, step_limits(recipe.engine, role)
    flags = {
        "--model": recipe.model.path,
        "--host": "{host}",
        "--port": "{port}",
        "--served-model-name": recipe.name,
        "--max-model-len": str(engine.max_model_len),
        "--max-num-seqs": str(limits.max_num_seqs),
        "--max-num-batched-tokens": str(limits.max_num_batched_tokens),
        "--block-size": str(engine.block_size),
        "--kv-cache-memory-bytes": str(int(engine.kv_cache_gib * (1 << 30))),
        "--dtype": engine.dtype,
        # log-probabilities of the distribution that tokens were drawn from: what the trainer compares with
        "--logprobs-mode": "processed_logprobs",
        "--seed": str(recipe.seed),
        "--torch-threads": str(engine.threads),
        "--weight-transfer-root": "{run_dir}/weights",
        "--weight-reader": f"{role.value}-{{replica}}",
        "--weight-lease-timeout-s": f"{handoff.lease_timeout_s:g}",
        "--weight-timeout-floor-s": f"{handoff.update_timeout_s:g}",
        "--weight-min-bandwidth-mib-s": f"{handoff.min_bandwidth_mib_s:g}",
        "--weight-read-streams": str(handoff.read_streams),
    }
    if recipe.job.payload == "evaluation":
        flags["--weight-version"] = "0"  # it never gets another version
    if handoff.node_cache is not None:
        flags["--weight-node-cache"] = handoff.node_cache
        flags["--weight-node-cache-bytes"] = str(int(handoff.node_cache_gib * (1 << 30)))
    if recipe.fans_out:
        flags["--weight-fanout-host"] = "{host}"
        flags["--weight-fanout-degree"] = str(handoff.fanout_degree)
    command = module_command("{python}", "hpcrl.inference.embedded.server")
    for flag, value in flags.items():
        command += [flag, value]
    if engine.is_colocated:
        command.append("--colocated")
    if recipe.returns_routed_experts:
        command.append("--enable-return-routed-experts")
    if asks_health(recipe):
        command.append("--open-health")
    return tuple(command)


def _orchestrator(recipe: Recipe, cluster: ClusterProfile, run_name: str, inference: tuple[Role, ...]) -> RoleGroup:
    before = (*inference, *((Role.ROUTER,) if has_router(recipe) else ()))
    return RoleGroup(
        role=Role.ORCHESTRATOR,
        replicas=1,
        ranks=1,
        beside=isinstance(cluster, SlurmCluster) and not cluster.orchestrator_apart,
        command=tuple(module_command("{python}", "hpcrl.rollouts")),
        ports=1 + recipe.rollouts.warehouse.ports,
        env=plain(role_variables(recipe, cluster, Role.ORCHESTRATOR, run_name)),
        after=before if recipe.environment_workers is None else (*before, Role.ENV),
        ready=HttpProbe(path="/health"),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=_policy(recipe.supervision.orchestrator, cluster),
    )


def _trainer(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> RoleGroup:
    trainer = recipe.trainer
    # it starts together with the engines, not after them: both spend their start loading weights. Colocated engines get
    # their weights from it, and start before it; on the same GPUs vLLM measures at its start which memory is free
    waits = recipe.engine.is_colocated or recipe.engine.shares_gpus
    return RoleGroup(
        role=Role.TRAINER,
        replicas=1,
        ranks=trainer.ranks,
        nodes=trainer.nodes,
        command=_trainer_command(trainer),
        env=plain(role_variables(recipe, cluster, Role.TRAINER, run_name)),
        after=(Role.ENGINE,) if waits else (),
        ready=FileProbe(),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=_policy(recipe.supervision.trainer, cluster, ends_run=True),
    )


def _trainer_command(trainer: TrainerConfig) -> tuple[str, ...]:
    """Return the command that starts the ranks of each node; a single rank needs no launcher."""
    if trainer.ranks == 1:
        return tuple(module_command("{python}", "hpcrl.trainer", unbuffered=True))
    return _launcher_command(trainer.ranks // trainer.nodes, trainer.nodes)


def _launcher_command(ranks: int, nodes: int, *program: str) -> tuple[str, ...]:
    """Return the command that starts ``ranks`` ranks on each of ``nodes`` nodes; ``program`` replaces the trainer."""
    flags = {"--ranks": str(ranks), "--master-addr": "{host}", "--master-port": "{port}"}
    if nodes > 1:
        flags |= {"--nodes": str(nodes), "--node-rank": "{node_rank}"}
    if program:
        flags["--imports"] = program[0]
    command = module_command("{python}", "hpcrl.trainer.launcher", unbuffered=True)
    return (*command, *(word for flag in flags.items() for word in flag), *program)


def _policy(config: RolePolicyConfig, cluster: ClusterProfile, *, ends_run: bool = False) -> RolePolicy:
    return RolePolicy(
        ends_run=ends_run,
        drain_order=config.drain_order,
        stop_timeout_s=config.grace_s or cluster.limits.stop_timeout_s,
        critical=config.critical,
        restart=config.restart,
        max_restarts=config.max_restarts,
        restart_window_s=config.restart_window_s,
    )


def _as_evaluation(orchestrator: RoleGroup) -> RoleGroup:
    """Return the group that evaluates the engines' model in the orchestrator's place; its end ends the run."""
    return orchestrator.model_copy(
        update={
            "command": tuple(module_command("{python}", "hpcrl.rollouts.evaluating")),
            "ports": 1,
            "ready": FileProbe(),
            "policy": orchestrator.policy.model_copy(update={"ends_run": True}),
        }
    )


def _as_probe(group: RoleGroup, *, local: bool) -> RoleGroup:
    """Return the group with the same place, order and environment, with a small program for every rank."""
    probe = "hpcrl.runs.probe"
    # the local launcher starts one process for each replica
    ranks, nodes = 1 if local else group.ranks, group.nodes
    alone = tuple(module_command("{python}", probe))
    return group.model_copy(
        update={
            "command": alone if ranks == 1 else _launcher_command(ranks // nodes, nodes, probe),
            # hpcrl's own interpreter: the shape of a job can be tried before the environment of the engines exists
            "python": None,
            "servers_per_node": 0,
            "ports": 1,
            "ranks": ranks,
            "ready": FileProbe(),
        }
    )

"""The role groups of a run: commands, order, readiness, deadlines. Where their nodes are is said by the layout."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import FileProbe, HttpProbe, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import Recipe
from hpcrl.planning.environment import plain, role_variables

__all__ = ["make_groups"]


def make_groups(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    """All groups of a run, with default places."""
    engines = _engines(recipe, cluster, run_name)
    inference = tuple(group.role for group in engines)
    groups = [*engines, _orchestrator(recipe, cluster, run_name, inference), _trainer(recipe, cluster, run_name)]
    if recipe.job.payload == "probe":
        groups = [_as_probe(group, local=not isinstance(cluster, SlurmCluster)) for group in groups]
    return groups


def _engines(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> list[RoleGroup]:
    engine = recipe.engine
    sides = [(Role.PREFILL, engine.prefill), (Role.DECODE, engine.decode)]
    shapes = [(role, side.replicas, side.nodes) for role, side in sides if side is not None]
    return [
        RoleGroup(
            role=role,
            replicas=replicas,
            ranks=nodes * _engine_ranks_per_node(recipe, cluster, role),
            nodes=nodes,
            command=_engine_command(recipe),
            env=plain(role_variables(recipe, cluster, role, run_name)),
            ready=HttpProbe(path="/health"),
            start_timeout_s=cluster.limits.start_timeout_s,
            policy=RolePolicy(drain_order=2, stop_timeout_s=cluster.limits.stop_timeout_s),
        )
        for role, replicas, nodes in shapes or [(Role.ENGINE, engine.replicas, engine.nodes)]
    ]


def _engine_ranks_per_node(recipe: Recipe, cluster: ClusterProfile, role: Role) -> int:
    if recipe.engine.backend == "embedded" or not isinstance(cluster, SlurmCluster):
        return 1
    return max(1, cluster.partitions[cluster.partition_name(role)].node.gpus)


def _engine_command(recipe: Recipe) -> tuple[str, ...]:
    engine = recipe.engine
    flags = {
        "--model": recipe.model.path,
        "--host": "{host}",
        "--port": "{port}",
        "--served-model-name": recipe.name,
        "--max-model-len": str(engine.max_model_len),
        "--max-num-seqs": str(engine.max_num_seqs),
        "--max-num-batched-tokens": str(engine.max_num_batched_tokens),
        "--block-size": str(engine.block_size),
        "--kv-cache-memory-bytes": str(int(engine.kv_cache_gib * (1 << 30))),
        "--dtype": engine.dtype,
        # log-probabilities of the distribution that tokens were drawn from: what the trainer compares with
        "--logprobs-mode": "processed_logprobs",
        "--seed": str(recipe.seed),
        "--torch-threads": str(engine.threads),
    }
    command = ["{python}", "-m", "hpcrl.inference.server"]
    for flag, value in flags.items():
        command += [flag, value]
    return tuple(command)


def _orchestrator(recipe: Recipe, cluster: ClusterProfile, run_name: str, inference: tuple[Role, ...]) -> RoleGroup:
    return RoleGroup(
        role=Role.ORCHESTRATOR,
        replicas=1,
        ranks=1,
        beside=isinstance(cluster, SlurmCluster),
        command=("{python}", "-m", "hpcrl.rollouts"),
        env=plain(role_variables(recipe, cluster, Role.ORCHESTRATOR, run_name)),
        after=inference,
        ready=HttpProbe(path="/health"),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=RolePolicy(drain_order=1, stop_timeout_s=cluster.limits.stop_timeout_s),
    )


def _trainer(recipe: Recipe, cluster: ClusterProfile, run_name: str) -> RoleGroup:
    trainer = recipe.trainer
    # --node-rank keeps ranks in the order of nodes; torchrun's own rendezvous would number them as they come
    nodes = ("--nnodes", str(trainer.nodes), "--node-rank", "{node_rank}") if trainer.nodes > 1 else ()
    # starts beside the engines, not after them: both spend their start loading weights
    return RoleGroup(
        role=Role.TRAINER,
        replicas=1,
        ranks=trainer.ranks,
        nodes=trainer.nodes,
        command=(
            "{python}",
            "-m",
            "torch.distributed.run",
            *nodes,
            "--nproc-per-node",
            str(trainer.ranks // trainer.nodes),
            "--master-addr",
            "{host}",
            "--master-port",
            "{port}",
            "-m",
            "hpcrl.trainer",
        ),
        env=plain(role_variables(recipe, cluster, Role.TRAINER, run_name)),
        ready=FileProbe(),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=RolePolicy(ends_run=True, drain_order=0, stop_timeout_s=cluster.limits.stop_timeout_s),
    )


def _as_probe(group: RoleGroup, *, local: bool) -> RoleGroup:
    """The same place, order and environment, with a small program for every rank."""
    # this machine's launcher starts one process a replica
    ranks = 1 if local else group.ranks
    return group.model_copy(
        update={
            "command": ("{python}", "-m", "hpcrl.runs.probe"),
            "ranks": ranks,
            "tasks_per_node": 1 if local else group.ranks_per_node,
            "ready": FileProbe(),
        }
    )

"""The plan of a run on a local cluster: role groups, commands, order, deadlines."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.plan import FileProbe, HttpProbe, Plan, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import Recipe

__all__ = ["absolute_paths", "default_run_name", "make_plan", "resolve_runs_root"]


def resolve_runs_root(cluster: ClusterProfile, cwd: Path) -> Path:
    """The runs root of a profile as an absolute path; ``HPCRL_RUNS_ROOT`` wins over the profile."""
    return _resolve(os.environ.get("HPCRL_RUNS_ROOT") or cluster.paths.runs_root, cwd)


def absolute_paths(recipe: Recipe, cwd: Path) -> Recipe:
    """The recipe with its paths made absolute, so that roles may run in any directory."""
    model = recipe.model.model_copy(update={"path": str(_resolve(recipe.model.path, cwd))})
    return recipe.model_copy(update={"model": model})


def default_run_name(recipe: Recipe, now_s: float) -> str:
    """``<recipe>-<date>-<time>`` in local time."""
    return f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def make_plan(recipe: Recipe, cluster: ClusterProfile, run_name: str, run_dir: Path) -> Plan:
    """Resolve a recipe on a cluster. Pure: same input, same plan.

    Parameters
    ----------
    recipe:
        With absolute paths (see `absolute_paths`).
    cluster:
        The site.
    run_name, run_dir:
        Name and directory of the run.
    """
    return Plan(
        run=run_name,
        recipe=recipe.name,
        cluster=cluster.name,
        run_dir=run_dir,
        groups=(_engine(recipe, cluster), _orchestrator(recipe, cluster), _trainer(recipe, cluster)),
        first_port=cluster.ports.first,
        last_port=cluster.ports.last,
        time_limit_s=cluster.limits.time_limit_h * 3600.0,
    )


def _resolve(path: str, cwd: Path) -> Path:
    return (cwd / Path(os.path.expandvars(path)).expanduser()).resolve()


def _threads(cluster: ClusterProfile, threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), **cluster.env}


def _engine(recipe: Recipe, cluster: ClusterProfile) -> RoleGroup:
    engine = recipe.engine
    command = ["{python}", "-m", "hpcrl.inference.server"]
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
    for flag, value in flags.items():
        command += [flag, value]
    return RoleGroup(
        role=Role.ENGINE,
        replicas=engine.replicas,
        ranks=1,
        command=tuple(command),
        env=_threads(cluster, engine.threads),
        ready=HttpProbe(path="/health"),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=RolePolicy(drain_order=2, stop_timeout_s=cluster.limits.stop_timeout_s),
    )


def _orchestrator(recipe: Recipe, cluster: ClusterProfile) -> RoleGroup:
    return RoleGroup(
        role=Role.ORCHESTRATOR,
        replicas=1,
        ranks=1,
        command=("{python}", "-m", "hpcrl.rollouts"),
        env=_threads(cluster, 1),
        after=(Role.ENGINE,),
        ready=HttpProbe(path="/health"),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=RolePolicy(drain_order=1, stop_timeout_s=cluster.limits.stop_timeout_s),
    )


def _trainer(recipe: Recipe, cluster: ClusterProfile) -> RoleGroup:
    # starts beside the engines, not after them: both spend their start loading weights
    return RoleGroup(
        role=Role.TRAINER,
        replicas=1,
        ranks=recipe.trainer.ranks,
        command=(
            "{python}",
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(recipe.trainer.ranks),
            "--master-addr",
            "{host}",
            "--master-port",
            "{port}",
            "-m",
            "hpcrl.trainer",
        ),
        env=_threads(cluster, recipe.trainer.threads),
        ready=FileProbe(),
        start_timeout_s=cluster.limits.start_timeout_s,
        policy=RolePolicy(ends_run=True, drain_order=0, stop_timeout_s=cluster.limits.stop_timeout_s),
    )

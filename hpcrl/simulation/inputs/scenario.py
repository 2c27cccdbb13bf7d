"""Scenario of a simulation: a recipe in some size, durations, and failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpcrl.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, StrictModel
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import step_limits
from hpcrl.config.environments import trained_on
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.models.known import load_facts
from hpcrl.planning.distributions import mean_of
from hpcrl.planning.routes import max_rollouts_in_flight
from hpcrl.simulation.inputs.durations import Durations

_VISITS = 1_000_000
"""Requests to engines that a simulation with ``sample`` None may take; beyond, a sample of the engines is simulated."""
_MOST_DAYS = 366
_MOST_NODES = 1_000_000
_BEGUN = 4
"""Requests that take as long to simulate as one rollout that begins."""
_ROUNDED = 0.1
"""Share of the nodes by which whole replicas may miss the number that was asked for."""
_MOST_VISITS = 2_000_000
"""Maximum requests of one engine; above it turns of recorded rollouts are merged."""


class Failures(StrictModel):
    """Node failures, and what follows one: the whole attempt ends and the next begins at the last checkpoint."""

    mtbf_h: PositiveFloat | None = None
    """Mean time between failures of one node, in hours; times are exponential. None: no failures."""
    requeue_s: NonNegativeFloat = 60.0
    """Seconds until Slurm starts the next attempt."""
    spares: NonNegativeInt = 0
    """Spare nodes of a job: the next attempt begins without that wait, until as many nodes have failed in one job."""


@dataclass(frozen=True)
class SimulatedSize:
    """The recipe's roles in the size that is simulated.

    Attributes
    ----------
    nodes, trainer_nodes, engine_nodes:
        Nodes of the run and of its roles; where trainer and engines share one, it counts for both.
    env_nodes:
        Nodes of workers of environments, where these have their own; a failure of one ends the attempt as any other's.
    trainer_share:
        The trainer's share of the run's GPUs, or nodes.
    scale:
        Times the recipe.
    engines, prefill_engines:
        Replicas that say tokens, and replicas that compute prompts only.
    groups_per_step, max_in_flight:
        Groups that a step consumes, and rollouts that may run.
    gpus:
        GPUs of all nodes; 0 where the cluster has none.
    """

    nodes: int
    trainer_nodes: int
    engine_nodes: int
    env_nodes: int
    trainer_share: float
    scale: float
    engines: int
    prefill_engines: int
    groups_per_step: int
    max_in_flight: int
    gpus: int


@dataclass(frozen=True)
class Scenario:
    """Everything that a simulation depends on; equal scenarios give equal results.

    Attributes
    ----------
    size:
        Size in question.
    thinning:
        Divisor of the numbers of engines, groups and places in flight that are simulated; 1 is all of them.
    merged_turns:
        Turns of a recorded rollout that are simulated as one.
    engines, prefill_engines, groups_per_step, max_in_flight:
        Simulated numbers.
    horizon_s:
        Simulated seconds.
    """

    recipe: Recipe
    durations: Durations
    size: SimulatedSize
    horizon_s: float
    seed: int = 0
    failures: Failures = field(default_factory=Failures)
    thinning: float = 1.0
    merged_turns: int = 1
    engines: int = 1
    prefill_engines: int = 0
    groups_per_step: int = 1
    max_in_flight: int = 1


def make_scenario(
    recipe: Recipe,
    cluster: ClusterProfile,
    durations: Durations,
    *,
    nodes: int | None = None,
    days: float = 1.0,
    seed: int = 0,
    failures: Failures | None = None,
    sample: int | None = None,
) -> Scenario:
    """Scale a recipe and decide how much of it is simulated.

    Parameters
    ----------
    nodes:
        Nodes of the run; the recipe's own number where None. All roles, the batch and what is in flight grow in
        proportion.
    sample:
        Engines to simulate, 0 for all; None: all, or as many as can be simulated in about a minute. Where one is too
        much for that, several turns of recorded rollouts are simulated as one.

    Raises
    ------
    UsageError
        The durations do not fit the recipe, or the size is too small for it.
    """
    if not 0 < days <= _MOST_DAYS:
        raise UsageError(f"--days {days:g}: a number above 0, up to {_MOST_DAYS}")
    _check(recipe, durations)
    size = _size(recipe, cluster, nodes, _in_flight(recipe))
    horizon_s = days * 86400.0
    engines, merged = size.engines, 1
    if sample is not None:
        engines = min(engines, sample) if sample else engines
    else:
        visits = _visits(recipe, durations, size, horizon_s)
        if visits > _VISITS:
            engines = max(1, min(engines, round(engines * _VISITS / visits)))
        if all(durations.environment(each.name).trace for each in trained_on(recipe.environments)):
            merged = math.ceil(visits * engines / size.engines / _MOST_VISITS)
            durations = durations.merged(merged)
    thinning = size.engines / engines
    groups = max(1, round(size.groups_per_step / thinning))
    return Scenario(
        recipe=recipe,
        durations=durations,
        size=size,
        horizon_s=horizon_s,
        seed=seed,
        failures=failures or Failures(),
        thinning=thinning,
        merged_turns=merged,
        engines=engines,
        prefill_engines=max(1, round(size.prefill_engines / thinning)) if size.prefill_engines else 0,
        groups_per_step=groups,
        max_in_flight=max(recipe.rollouts.group_size, round(size.max_in_flight / thinning)),
    )


def _in_flight(recipe: Recipe) -> int:
    """Return the rollouts that may run at once, as far as a known model shows the size of their routed experts."""
    try:
        return max_rollouts_in_flight(recipe, load_facts(recipe.model.path))[0]
    except (FileNotFoundError, ValueError):
        return recipe.rollouts.max_in_flight


def _size(recipe: Recipe, cluster: ClusterProfile, nodes: int | None, flying: int) -> SimulatedSize:
    """Return whole replicas, and a trainer in proportion (UsageError where they are far from ``nodes``).

    ``flying`` rollouts may be in flight in the recipe's own size.
    """
    size = _scaled(recipe, cluster, nodes, flying)
    if nodes is None or abs(size.nodes - nodes) <= _ROUNDED * nodes:
        return size
    own = _scaled(recipe, cluster, None, flying).nodes
    exact = [n for n in range(2, max(4 * own, nodes) + own) if _scaled(recipe, cluster, n, flying).nodes == n]
    near = sorted([*[n for n in exact if n < nodes][-1:], *[n for n in exact if n > nodes][:1]])
    raise UsageError(
        f"--nodes {nodes}: replicas are whole, and the recipe's roles in this proportion need {size.nodes} nodes "
        f"({size.trainer_nodes} for the trainer, {size.engine_nodes} for engines{_env_words(size.env_nodes)})\n"
        f"    hint: --nodes {' or '.join(map(str, near))}, or other sizes of roles by --set and no --nodes"
    )


def _env_words(nodes: int) -> str:
    return f", {nodes} for environments" if nodes else ""


def _scaled(recipe: Recipe, cluster: ClusterProfile, nodes: int | None, flying: int) -> SimulatedSize:
    engine, rollouts, shared = recipe.engine, recipe.rollouts, recipe.engine.shares_node
    if engine.shares_gpus:
        raise UsageError(
            "engine.placement: shared_gpus: the simulator computes trainer and engines on devices of their own\n"
            "    hint: --set engine.placement=shared_node simulates one node whose GPUs they divide"
        )
    if shared and nodes is not None:
        raise UsageError(
            f"--nodes {nodes}: trainer and engines share one node (engine.placement), which has one size\n"
            "    hint: leave --nodes out, or --set engine.placement=apart"
        )
    prefill = engine.prefill
    says = engine.decode if engine.decode is not None else engine
    replicas, per_replica = says.replicas, says.nodes
    prefill_nodes = prefill.replicas * prefill.nodes if prefill is not None else 0
    workers = recipe.environment_workers if isinstance(cluster, SlurmCluster) else None
    own_env = 0 if workers is None else workers.nodes
    own = recipe.trainer.nodes + replicas * per_replica + prefill_nodes + own_env
    scale = 1.0 if nodes is None else nodes / own
    if nodes is not None and not 2 <= nodes <= _MOST_NODES:
        raise UsageError(
            f"--nodes {nodes}: a run has at least 2 nodes, one for the trainer and one for an engine, and up to "
            f"{_MOST_NODES:,} are simulated"
        )
    engines = max(1, round(replicas * scale))
    prefill_engines = max(1, round(prefill.replicas * scale)) if prefill is not None else 0
    engine_nodes = engines * per_replica + (prefill_engines * prefill.nodes if prefill is not None else 0)
    trainer_nodes = max(1, round(recipe.trainer.nodes * scale))
    groups = rollouts.rollouts_per_step // rollouts.group_size
    env_nodes = max(1, round(own_env * scale)) if own_env else 0
    all_nodes = env_nodes + (1 if shared else trainer_nodes + engine_nodes)
    gpus = _gpus(cluster, trainer_nodes, 0 if shared else engine_nodes)
    share = trainer_nodes / (trainer_nodes + engine_nodes)
    if shared:
        share = recipe.trainer.ranks / gpus if gpus else 0.5
    return SimulatedSize(
        nodes=all_nodes,
        trainer_nodes=trainer_nodes,
        engine_nodes=1 if shared else engine_nodes,
        env_nodes=env_nodes,
        trainer_share=share,
        scale=scale,
        engines=engines,
        prefill_engines=prefill_engines,
        groups_per_step=max(1, round(groups * scale)),
        max_in_flight=max(rollouts.group_size, round(flying * scale)),
        gpus=gpus,
    )


def _gpus(cluster: ClusterProfile, trainer_nodes: int, engine_nodes: int) -> int:
    if not isinstance(cluster, SlurmCluster):
        return 0
    trainer, engine = (
        cluster.partitions[cluster.partition_name(role)].node.gpus for role in (Role.TRAINER, Role.ENGINE)
    )
    return trainer_nodes * trainer + engine_nodes * engine


def _check(recipe: Recipe, durations: Durations) -> None:
    for environment in trained_on(recipe.environments):
        durations.environment(environment.name)
    kv, longest = durations.engine.kv_tokens, recipe.engine.max_model_len
    if kv is not None and kv < longest:
        raise UsageError(
            f"engine.kv_tokens is {kv}, but one sequence may have {longest} tokens (engine.max_model_len)\n"
            "    hint: a larger KV cache, or --set engine.max_model_len=..."
        )


def _mean_rollout(recipe: Recipe, durations: Durations) -> tuple[float, float, float]:
    """Return the means of one rollout: requests, sampled tokens, all tokens; cut to what the recipe allows."""
    total = [0.0, 0.0, 0.0]
    trained = trained_on(recipe.environments)
    weights = sum(environment.weight for environment in trained)
    for environment in trained:
        found, share = durations.environment(environment.name), environment.weight / weights
        if found.trace:
            count = len(found.trace)
            turns = sum(len(rollout.turns) for rollout in found.trace) / count
            sampled = sum(turn.sampled for rollout in found.trace for turn in rollout.turns) / count
            said = sum(turn.said for rollout in found.trace for turn in rollout.turns) / count
        else:
            assert found.turns is not None
            assert found.sampled_tokens is not None
            assert found.prompt_tokens is not None
            turns = max(1.0, mean_of(found.turns))
            sampled = turns * min(mean_of(found.sampled_tokens), recipe.rollouts.sampling.max_new_tokens)
            said = mean_of(found.prompt_tokens) + (turns - 1) * mean_of(found.said_tokens)
        whole = min(sampled + said, recipe.engine.max_model_len)
        for i, value in enumerate((turns, sampled, whole)):
            total[i] += share * value
    return total[0], total[1], total[2]


def _visits(recipe: Recipe, durations: Durations, size: SimulatedSize, horizon_s: float) -> float:
    """Return the approximate number of requests in the horizon, at the pace of the slower of engines and trainer."""
    turns, sampled, tokens = _mean_rollout(recipe, durations)
    engine, trainer = durations.engine, durations.trainer
    batch = min(step_limits(recipe.engine, Role.DECODE).max_num_seqs * engine.ranks, size.max_in_flight / size.engines)
    step_s = engine.step_base_s + batch * engine.step_per_sequence_s
    said_per_s = size.engines * batch / step_s
    by_engines = said_per_s / max(sampled, 1.0)
    rollouts = recipe.rollouts.rollouts_per_step
    train_s = trainer.forward_backward_base_s + trainer.forward_backward_per_token_s * tokens * rollouts
    train_s += mean_of(trainer.optimizer_s) + mean_of(durations.handoff.publish_s)
    by_trainer = size.groups_per_step * recipe.rollouts.group_size / max(train_s, 1e-9)
    rate = min(by_engines, by_trainer)
    if not math.isfinite(rate):
        raise UsageError("all durations are 0: there is nothing to simulate")
    # even in a short run all rollouts in flight are started, each with the work of a few requests
    return rate * turns * horizon_s + _BEGUN * size.max_in_flight

"""Rules across components: what each part allows alone but the whole does not.

One table, checked before anything is submitted; docs/configuration.md is made from it. Here are the rules of the
recipe; `hpcrl.config.rules.job` has those about nodes and jobs, `hpcrl.config.rules.site` those within a profile.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcrl.config.algorithm import IcepopLossConfig
from hpcrl.config.cluster import ClusterProfile, LocalCluster
from hpcrl.config.engine_shape import engine_side, replica_nodes, step_limits
from hpcrl.config.environments import trained_on
from hpcrl.config.load import Loaded
from hpcrl.config.recipe import Recipe, WarmupConfig, WordsEnv
from hpcrl.config.rules.colocated import COLOCATED_RULES
from hpcrl.config.rules.datasets import DATASET_RULES
from hpcrl.config.rules.distillation import DISTILLATION_RULES
from hpcrl.config.rules.engine import ENGINE_RULES
from hpcrl.config.rules.evaluation import EVALUATION_RULES
from hpcrl.config.rules.job import ENOUGH_NODES, JOB_RULES, ONE_NODE
from hpcrl.config.rules.kernels import KERNEL_RULES
from hpcrl.config.rules.parallel import PARALLEL_RULES
from hpcrl.config.rules.quantisation import QUANTISATION_RULES
from hpcrl.config.rules.rule import Conflicts, Rule
from hpcrl.config.rules.sampling import SAMPLING_RULES
from hpcrl.config.rules.sft import SFT_RULES, concerns
from hpcrl.config.rules.shared_node import SHARED_NODE_RULES
from hpcrl.config.rules.site import SITE_RULES
from hpcrl.config.rules.store import STORE_RULES
from hpcrl.config.rules.summaries import SWE_RULES
from hpcrl.config.rules.verifiers_rules import VERIFIERS_RULES
from hpcrl.config.unusable_values import usable_findings
from hpcrl.errors import ConfigError, DoesNotFitError, Finding

__all__ = [
    "JOB_RULES",
    "KERNEL_RULES",
    "PARALLEL_RULES",
    "QUANTISATION_RULES",
    "RULES",
    "SITE_RULES",
    "check_cluster",
    "check_rules",
    "unstartable",
]

GIB = 1 << 30
#: rules whose conflicts, of a recipe for several nodes on one machine, say nothing of the site that it is meant for
_OF_THE_MACHINE = frozenset({"payload-exists", "port-range", "process-limit"})
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def check_rules(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile], *, planning: bool = False) -> None:
    """Check all rules (ConfigError with every conflict).

    Parameters
    ----------
    recipe, cluster:
        As loaded.
    planning:
        Nothing will be started: leave out the rules about what this version can start.

    Raises
    ------
    DoesNotFitError
        With ``planning``: nothing is wrong but that the site has fewer nodes, as of a split that was searched for.
    """
    # rules of recipe and site assume a profile that is valid in itself
    check_cluster(cluster)
    rules = [rule for rule in RULES if not (planning and rule.submit_only)]
    conflicts = [
        (rule, key, what)
        for rule in rules
        for key, what in usable_findings(rule.check, recipe.value, cluster.value)
        if concerns(recipe.value, key)
    ]
    if any(rule.name == ONE_NODE for rule, _, _ in conflicts):
        conflicts = [conflict for conflict in conflicts if conflict[0].name not in _OF_THE_MACHINE]
    found = [
        Finding(_where(recipe, cluster, key), key, f"{what} [{rule.name}]", rule.hint) for rule, key, what in conflicts
    ]
    if planning and {rule.name for rule, _, _ in conflicts} == {ENOUGH_NODES}:
        raise DoesNotFitError(str(ConfigError(found)))
    _refuse(found)


def unstartable(recipe: Recipe, cluster: ClusterProfile) -> list[str]:
    """Return the keys that a plan supports and this version cannot start."""
    found = (key for rule in RULES if rule.submit_only for key, _ in rule.check(recipe, cluster))
    return list(dict.fromkeys(found))


def check_cluster(cluster: Loaded[ClusterProfile]) -> None:
    """Check the rules within a profile (ConfigError with every conflict)."""
    conflicts = ((rule, key, what) for rule in SITE_RULES for key, what in usable_findings(rule.check, cluster.value))
    _refuse(
        Finding(cluster.where(key.removeprefix("cluster.")), key, f"{what} [{rule.name}]", rule.hint)
        for rule, key, what in conflicts
    )


def _where(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile], key: str) -> str:
    return cluster.where(key.removeprefix("cluster.")) if key.startswith("cluster.") else recipe.where(key)


def _refuse(findings: Iterable[Finding]) -> None:
    if found := list(findings):
        raise ConfigError(found)


def _batch_of_groups(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    r = recipe.rollouts
    if r.rollouts_per_step % r.group_size:
        yield "rollouts.rollouts_per_step", f"{r.rollouts_per_step} is not a multiple of group_size {r.group_size}"


def _group_has_peers(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.rollouts.group_size < 2:
        yield "rollouts.group_size", "a group of one has nothing to compare its reward with: every advantage is 0"


def _flight_holds_group(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    r = recipe.rollouts
    if r.max_in_flight < r.group_size:
        yield "rollouts.max_in_flight", f"{r.max_in_flight} is less than one group ({r.group_size})"


def _adaptive(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    c = recipe.rollouts.adaptive_concurrency
    if c.kv_low >= c.kv_high:
        yield "rollouts.adaptive_concurrency.kv_low", f"{c.kv_low:g} is not below kv_high ({c.kv_high:g})"
    if not 0 < c.decrease < 1:
        yield "rollouts.adaptive_concurrency.decrease", f"{c.decrease:g} must be above 0 and below 1"


def _micro_batch_holds_sequence(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    tokens, length = recipe.trainer.micro_batch_tokens, recipe.engine.max_model_len
    if recipe.sft is None and tokens < length:
        yield "trainer.micro_batch_tokens", f"{tokens} cannot hold one rollout of max_model_len {length}"


def _engine_step_holds_decode(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for role in replica_nodes(recipe):
        sequences, tokens = step_limits(recipe.engine, role)
        if tokens < sequences:
            own = engine_side(recipe.engine, role)
            key = f"engine.{role.value}" if own is not None and own.max_num_batched_tokens else "engine"
            yield f"{key}.max_num_batched_tokens", f"{tokens} cannot hold one token of each of {sequences} sequences"
            # reported once where both sides have it from the engine
            if key == "engine":
                return


def _context_within_positions(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    warmup = recipe.model.warmup
    if warmup is not None and recipe.engine.max_model_len > warmup.max_position_embeddings:
        yield (
            "engine.max_model_len",
            f"{recipe.engine.max_model_len} is more than the model's {warmup.max_position_embeddings} positions",
        )


def _kv_cache_holds_sequence(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    warmup, engine = recipe.model.warmup, recipe.engine
    # other families keep other data of a token
    if warmup is None or warmup.family != "qwen3_moe":
        return
    needed = _kv_bytes_per_token(warmup, engine.dtype) * engine.max_model_len
    if engine.kv_cache_gib * GIB < needed:
        yield "engine.kv_cache_gib", f"one sequence of max_model_len needs {needed / GIB:.3g} GiB"


def _kv_bytes_per_token(warmup: WarmupConfig, dtype: str) -> int:
    """Return the bytes of a token's keys and values in all layers: ``2 · layers · kv_heads · head_dim · bytes``."""
    return 2 * warmup.num_hidden_layers * warmup.num_key_value_heads * warmup.head_dim * _DTYPE_BYTES[dtype]


def _model_shape(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    w = recipe.model.warmup
    if w is None:
        return
    if w.num_attention_heads % w.num_key_value_heads:
        yield (
            "model.warmup.num_key_value_heads",
            f"{w.num_key_value_heads} does not divide num_attention_heads {w.num_attention_heads}",
        )
    if w.num_experts_per_tok > w.num_experts:
        yield "model.warmup.num_experts_per_tok", f"{w.num_experts_per_tok} is more than num_experts {w.num_experts}"
    if w.head_dim % 2:
        yield "model.warmup.head_dim", f"{w.head_dim} is odd; rotary embeddings rotate pairs of values"


def _unique_environments(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    seen: set[str] = set()
    for i, environment in enumerate(recipe.environments):
        if environment.name in seen:
            yield f"environments.{i}.name", f"{environment.name!r} is used twice"
        seen.add(environment.name)


def _unique_outlets(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    names = {
        "sinks": ([each.name for each in recipe.sinks], [each.name for each in cluster.sinks]),
        "notify": ([each.name for each in recipe.notify], [each.name for each in cluster.notify]),
    }
    for key, (own, of_site) in names.items():
        for i, name in enumerate(own):
            if name in (*own[:i], *of_site):
                yield f"{key}.{i}.name", f"{name!r} is used twice, here or in the cluster profile"


def _word_lengths(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for i, environment in enumerate(recipe.environments):
        if isinstance(environment, WordsEnv) and environment.min_letters > environment.max_letters:
            yield (
                f"environments.{i}.min_letters",
                f"{environment.min_letters} is more than max_letters {environment.max_letters}",
            )


def _evaluation_covers(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    trained = len(trained_on(recipe.environments))
    if recipe.evaluation.prompts < trained:
        yield "evaluation.prompts", f"{recipe.evaluation.prompts} prompts for {trained} environments"


def _loss_has_reference(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    loss, kl = recipe.algorithm.loss, recipe.algorithm.kl
    if "reference" in loss.needed and kl is None:
        yield "algorithm.loss.needs", "names the reference, and there is no algorithm.kl"
    if kl is not None and kl.coefficient == 0 and "reference" not in loss.needed:
        yield "algorithm.kl.coefficient", "is 0, and the loss does not read the reference"


def _kl_copy_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    kl = recipe.algorithm.kl
    if kl is not None and kl.on_host and recipe.trainer.lora is not None:
        yield (
            "algorithm.kl.on_host",
            "with trainer.lora the start model is the policy without adapters: there is no copy",
        )
    if kl is not None and kl.reference_every_steps is not None and recipe.trainer.lora is not None:
        yield (
            "algorithm.kl.reference_every_steps",
            "with trainer.lora the reference is the policy without adapters, which stays the start model",
        )
    if kl is not None and kl.applied_to == "reward" and kl.estimator != "weighted_k3":
        yield "algorithm.kl.estimator", "is for a penalty in the loss, and algorithm.kl.applied_to is reward"


def _mask_order(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    loss = recipe.algorithm.loss
    if isinstance(loss, IcepopLossConfig) and loss.ratio_low >= loss.ratio_high:
        yield "algorithm.loss.ratio_low", f"{loss.ratio_low:g} is not below ratio_high {loss.ratio_high:g}"


def _schedule_fits(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    warmup, steps = recipe.trainer.optimizer.warmup_steps, recipe.trainer.steps
    if warmup >= steps:
        yield "trainer.optimizer.warmup_steps", f"{warmup} warm-up steps in a run of {steps}"


def _port_range(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    sides = [side.replicas for side in (engine.prefill, engine.decode) if side is not None]
    needed = (sum(sides) or engine.replicas) + 2 if recipe.sft is None else 1
    available = cluster.ports.last - cluster.ports.first + 1
    if available < needed:
        yield "cluster.ports.last", f"the range holds {max(0, available)} ports, the run needs {needed}"


def _process_limit(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, LocalCluster):
        return
    processes = recipe.trainer.ranks + (recipe.engine.replicas + 1 if recipe.sft is None else 0)
    if processes > cluster.max_processes:
        yield "cluster.max_processes", f"the run has {processes} processes, the cluster allows {cluster.max_processes}"


RULES: tuple[Rule, ...] = (
    Rule(
        "batch-of-groups",
        "A batch consists of whole groups.",
        "choose rollouts_per_step as a multiple of group_size",
        _batch_of_groups,
    ),
    Rule("group-has-peers", "A group has at least two rollouts.", "set group_size to 2 or more", _group_has_peers),
    Rule(
        "flight-holds-group",
        "At least one group can be in flight.",
        "raise max_in_flight or lower group_size",
        _flight_holds_group,
    ),
    Rule(
        "adaptive-concurrency",
        "The limit of rollouts in flight can rise and fall.",
        "choose kv_low below kv_high, and decrease between 0 and 1",
        _adaptive,
    ),
    *SAMPLING_RULES,
    Rule(
        "micro-batch-holds-sequence",
        "The trainer's token budget holds the longest rollout.",
        "raise trainer.micro_batch_tokens or lower engine.max_model_len",
        _micro_batch_holds_sequence,
    ),
    Rule(
        "engine-step-holds-decode",
        "An engine step holds one token of every running sequence.",
        "raise engine.max_num_batched_tokens or lower max_num_seqs",
        _engine_step_holds_decode,
    ),
    Rule(
        "context-within-positions",
        "The engine's context is within the model's positions.",
        "lower engine.max_model_len or raise model.warmup.max_position_embeddings",
        _context_within_positions,
    ),
    Rule(
        "kv-cache-holds-sequence",
        "The KV cache holds at least one sequence of full length.",
        "raise engine.kv_cache_gib or lower engine.max_model_len",
        _kv_cache_holds_sequence,
    ),
    Rule(
        "model-shape",
        "Heads and experts of the start model fit together.",
        "correct model.warmup",
        _model_shape,
    ),
    Rule(
        "unique-environments",
        "Environments have different names.",
        "rename one of them",
        _unique_environments,
    ),
    Rule(
        "unique-outlets",
        "Sinks have different names, and so have notifiers, those of recipe and profile together.",
        "rename one of them",
        _unique_outlets,
    ),
    Rule("word-lengths", "min_letters is at most max_letters.", "swap min_letters and max_letters", _word_lengths),
    *DATASET_RULES,
    *VERIFIERS_RULES,
    *SWE_RULES,
    Rule(
        "evaluation-covers-environments",
        "Every environment is evaluated.",
        "raise evaluation.prompts to at least the number of environments",
        _evaluation_covers,
    ),
    *EVALUATION_RULES,
    *DISTILLATION_RULES,
    Rule(
        "loss-has-reference",
        "A reference is computed for a loss that reads it, or for a penalty.",
        "add algorithm.kl with a coefficient, or remove it",
        _loss_has_reference,
    ),
    Rule(
        "kl-copy-applies",
        "Settings of the reference model have an effect.",
        "remove the setting",
        _kl_copy_applies,
    ),
    Rule(
        "ratio-band", "The range of importance ratios is not empty.", "lower ratio_low or raise ratio_high", _mask_order
    ),
    Rule(
        "schedule-fits-run",
        "The warm-up of the learning rate is shorter than the run.",
        "lower trainer.optimizer.warmup_steps or raise trainer.steps",
        _schedule_fits,
    ),
    Rule(
        "port-range",
        "The cluster's port range holds the run.",
        "widen ports in the cluster profile",
        _port_range,
    ),
    Rule(
        "process-limit",
        "The run has no more processes than the cluster allows.",
        "lower trainer.ranks or engine.replicas, or raise max_processes in the cluster profile",
        _process_limit,
    ),
    *JOB_RULES,
    *PARALLEL_RULES,
    *KERNEL_RULES,
    *QUANTISATION_RULES,
    *STORE_RULES,
    *ENGINE_RULES,
    *COLOCATED_RULES,
    *SHARED_NODE_RULES,
    *SFT_RULES,
)

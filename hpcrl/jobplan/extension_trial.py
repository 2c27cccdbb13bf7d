"""Try extensions before a submit, by the interpreters of the roles that import them (docs/extending.md)."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config.algorithm import CustomAdvantageConfig, CustomLossConfig
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding
from hpcrl.jobplan.plan import absolute_paths
from hpcrl.jobplan.role_python import ask_role_python, hidden_reason
from hpcrl.models.configfile import read_config
from hpcrl.models.external import external_types
from hpcrl.models.families import FAMILIES

_TIMEOUT_S = 180.0
"""Maximum time in seconds for the extensions of one role: imports, torch among them, and a few calls."""


def check_extensions(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> list[str]:
    """Import, make and call the extensions that the recipe names; environments are tried by themselves.

    Returns
    -------
    list of str
        Why some could not be tried from here.

    Raises
    ------
    ConfigError
        With each that cannot be used.
    UsageError
        An interpreter cannot try them.
    """
    notes, findings = [], list[Finding]()
    resolved = absolute_paths(recipe.value, Path.cwd())
    for role, module, kinds in _wanted(resolved):
        if reason := hidden_reason(plan, site, what="they", role=role):
            notes.append(f"extensions of the {role.value} were not tried: {reason}")
            continue
        answer = ask_role_python(
            module,
            request={"recipe": resolved.model_dump(mode="json"), "kinds": kinds},
            plan=plan,
            site=site,
            doing="try the extensions",
            timeout_s=_TIMEOUT_S,
            slow_hint="look at what they wait for, or set try_before_submit: false",
            role=role,
        )
        known = {(each.key, each.what) for each in findings}
        new = [_finding(recipe, site, each) for each in answer["findings"]]
        findings += [each for each in new if (each.key, each.what) not in known]
    findings += _outlet_findings(recipe, plan, site)
    if findings:
        raise ConfigError(findings)
    return notes


def _wanted(recipe: Recipe) -> list[tuple[Role, str, list[str]]]:
    """Return the roles that import extensions, each with the module that tries them and their kinds."""
    if recipe.job.payload == "probe":
        return []
    of_trainer, found = "hpcrl.trainer.extension_trial", list[tuple[Role, str, list[str]]]()
    loss, advantage, sync = recipe.algorithm.loss, recipe.algorithm.advantage, recipe.handoff.sync
    kinds = ["family"] if (family := _has_external_family(recipe)) else []
    if recipe.sft is None:
        if isinstance(loss, CustomLossConfig) and loss.try_before_submit:
            kinds.append("loss")
        if sync is not None and sync.try_before_submit:
            kinds.append("transport")
        if isinstance(advantage, CustomAdvantageConfig) and advantage.try_before_submit:
            found.append((Role.ORCHESTRATOR, "hpcrl.rollouts.extension_trial", ["advantage"]))
        if family and recipe.engine.backend == "embedded":
            found.append((Role.ENGINE, of_trainer, ["family"]))
    return [(Role.TRAINER, of_trainer, kinds), *found] if kinds else found


def _has_external_family(recipe: Recipe) -> bool:
    """Return whether the family of the model is that of another package; False where the model is not there yet."""
    try:
        config = read_config(Path(recipe.model.path) / "config.json")
    except (OSError, ValueError):
        return False
    kind = config.get("model_type") if isinstance(config, dict) else None
    # those of hpcrl are not looked up among packages
    return isinstance(kind, str) and kind not in FAMILIES and kind in external_types()


def _outlet_findings(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> list[Finding]:
    """Try sinks and notifiers, of recipe and profile, with the interpreter of the supervisor."""
    tried = [each.try_before_submit for each in plan.sinks] + [each.try_before_submit for each in plan.notify]
    if not any(tried):
        return []
    answer = ask_role_python(
        "hpcrl.runs.outlets.trial",
        request={
            "sinks": [each.model_dump(mode="json") for each in plan.sinks],
            "notify": [each.model_dump(mode="json") for each in plan.notify],
        },
        plan=plan,
        site=site,
        doing="try sinks and notifiers",
        timeout_s=_TIMEOUT_S,
        slow_hint="look at what they wait for, or set try_before_submit: false",
        role=None,
    )
    numbers = {f"sinks.{each.name}": f"sinks.{i}" for i, each in enumerate(recipe.value.sinks)}
    numbers |= {f"notify.{each.name}": f"notify.{i}" for i, each in enumerate(recipe.value.notify)}
    # those of the profile have no line in the recipe
    return [
        _finding(recipe, site, {**each, "key": numbers.get(each["key"], each["key"])}) for each in answer["findings"]
    ]


def _finding(recipe: Loaded[Recipe], site: ClusterProfile, found: dict[str, str]) -> Finding:
    """Return what the other process found, with the line of the recipe."""
    in_job = isinstance(site, SlurmCluster) and found["hint"].endswith("PYTHONPATH")
    hint = found["hint"] + (" of the profile's env (a job does not inherit that of your shell)" if in_job else "")
    return Finding(recipe.where(found["key"]), found["key"], found["what"], hint)

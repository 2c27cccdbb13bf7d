"""Whether a run of a recipe on a cluster would start, and why not: asked by every command that has an opinion on it.

`prepare` loads a recipe and a profile and looks at all that can be seen before anything is started: rules, the model
and its directory, its chat format, secrets, interpreters of roles and their packages, environments of the user's own,
flags of engines. Problems are collected and not raised, so that a person reads all of them at once. `hpcrl submit`
refuses a run with problems; `hpcrl plan` and the others say the same sentences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.joined import load_both
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.config.runs_root import resolve_runs_root
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.jobplan import (
    absolute_paths,
    absolute_site_paths,
    check_engine_flags,
    check_packages,
    check_pythons,
    check_secrets,
    check_sizes,
    default_run_name,
    make_plan,
    with_model_of,
)
from hpcrl.jobplan.chat_trial import check_chat_format
from hpcrl.jobplan.conversation_trial import ConversationReport, check_conversations, with_steps
from hpcrl.jobplan.environment_trial import check_environments
from hpcrl.jobplan.packages import check_compiler, check_role_packages
from hpcrl.jobplan.start_model import ModelReport, check_model, report_model
from hpcrl.runs.registry import Roots, check_name
from hpcrl.runs.start.origin import START_MODEL, ModelOrigin, find_source

__all__ = ["PreparedRun", "RunPlace", "check_programs", "examine", "prepare"]


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where and as what a run would be.

    Attributes
    ----------
    cwd:
        Relative paths begin here.
    name:
        Of the run; by default the recipe's with the time.
    root:
        Directory of runs; by default what the environment or the profile says.
    source:
        The run whose weights it begins with.
    """

    cwd: Path
    name: str | None = None
    root: Path | None = None
    source: ModelOrigin | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A recipe on a cluster as it would be submitted, with everything that speaks against it.

    Attributes
    ----------
    recipe, site:
        As loaded.
    resolved, profile:
        The same with absolute paths.
    plan:
        None where rules do not hold: a plan is made of what is right in itself.
    source:
        The run whose weights it begins with.
    problems:
        Why ``hpcrl submit`` refuses it; empty where it does not.
    unmade:
        The start model is not there yet, and the recipe's warm-up makes it. One of the problems.
    notes:
        What could not be seen from here, and keys of the model's ``config.json`` that nothing reads; a sentence each.
    """

    recipe: Loaded[Recipe]
    site: Loaded[ClusterProfile]
    resolved: Recipe
    profile: ClusterProfile
    plan: Plan | None
    source: ModelOrigin | None = None
    problems: tuple[Finding, ...] = ()
    unmade: Finding | None = None
    notes: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether ``hpcrl submit`` would start it, as far as that is known without asking Slurm."""
        return not self.problems

    def planned(self) -> Plan:
        """The plan, of a run that starts (ConfigError with all problems otherwise)."""
        self.refuse()
        assert self.plan is not None
        return self.plan

    def refuse(self, *, allow_unmade: bool = False) -> None:
        """Raise ConfigError with all problems where there are any.

        Parameters
        ----------
        allow_unmade:
            A start model that the warm-up makes later is no problem.
        """
        wanted = [each for each in self.problems if not (allow_unmade and each is self.unmade)]
        if wanted:
            raise ConfigError(wanted)


def prepare(
    recipe: str,
    cluster: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    cwd: Path,
    name: str | None = None,
    root: Callable[[ClusterProfile], Path] | None = None,
    from_run: str | None = None,
    roots: Roots | None = None,
    in_job: bool = False,
) -> PreparedRun:
    """Load a recipe and a profile, and find out whether a run would start. Starts and writes nothing.

    Parameters
    ----------
    recipe, cluster, overrides, environ, in_job:
        See `hpcrl.config.joined.load_both`.
    cwd:
        Relative paths begin here.
    name:
        Of the run; by default the recipe's with the time.
    root:
        The directory of runs on a profile; by default what the environment or the profile says.
    from_run, roots:
        The run whose weights it begins with, and where to look for it (`hpcrl.runs.start.origin.find_source`).

    Raises
    ------
    ConfigError
        Recipe or profile cannot be read: nothing can be said about a run.
    UsageError
        The run of ``from_run``, or the name, cannot be used.
    """
    loaded, site = load_both(recipe, cluster, overrides, environ=environ, in_job=in_job)
    # before paths of the profile become absolute: resolving a root twice gives the same directory
    place = None if root is None else root(absolute_site_paths(site.value, cwd))
    source = None
    if from_run is not None:
        source = find_source(from_run, root(site.value) if root is not None else cwd, roots)
        loaded = with_model_of(loaded, source.config_dir, named=str(source.origin))
    name = check_name(name) if name is not None else None
    return examine(loaded, site, RunPlace(cwd=cwd, name=name, root=place, source=source))


def examine(
    loaded: Loaded[Recipe], site: Loaded[ClusterProfile], place: RunPlace, *, programs: bool = True
) -> PreparedRun:
    """Find out whether a run of a loaded recipe would start.

    Parameters
    ----------
    programs:
        Also try what roles execute: interpreters, packages, environments, flags. False: rules, model and secrets alone,
        which takes no other process.
    """
    problems, notes = _Problems(loaded), list[str]()
    problems.of(lambda: check_rules(loaded, site))
    resolved, profile = absolute_paths(loaded.value, place.cwd), absolute_site_paths(site.value, place.cwd)
    sound = not problems.found
    model = _model(loaded, resolved, place, site)
    notes += model.notes
    problems.found += model.problems
    problems.of(lambda: check_sizes(loaded, site), unless="model.path" if model.findings else None)
    prepared = PreparedRun(
        recipe=loaded,
        site=site,
        resolved=resolved,
        profile=profile,
        plan=None,
        source=place.source,
        unmade=model.unmade,
    )
    if sound:
        prepared = _with_plan(prepared, place)
        plan = prepared.plan
        assert plan is not None
        problems.of(lambda: check_secrets(plan, site))
        if programs and loaded.value.job.payload != "probe":
            notes += _try_programs(problems, loaded, site, plan)
            if not model.problems and loaded.value.sft is None:
                notes += (
                    problems.of(lambda: check_chat_format(loaded, plan, site.value, _model_dir(resolved, place))) or ()
                )
            report = _conversations(problems, loaded, site, plan)
            notes += report.notes
            if report.steps is not None:
                prepared = replace(prepared, resolved=with_steps(prepared.resolved, report.steps))
    return replace(prepared, problems=tuple(problems.found), notes=tuple(notes))


def check_programs(recipe: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan) -> list[str]:
    """Check what roles of a plan execute and read, of a run that exists (ConfigError with all problems).

    Of its model the configuration and the tokenizer are looked at: weights come from its versions and checkpoints.

    Returns
    -------
    list of str
        What could not be seen from here.
    """
    problems = _Problems(recipe)
    problems.of(lambda: check_secrets(plan, site))
    notes: list[str] = []
    if recipe.value.job.payload != "probe":
        notes += _try_programs(problems, recipe, site, plan)
        model_dir = Path(recipe.value.model.path)
        if problems.of(lambda: check_model(recipe, model_dir, weights=False)) is not None:
            notes += problems.of(lambda: check_chat_format(recipe, plan, site.value, model_dir)) or ()
    if problems.found:
        raise ConfigError(problems.found)
    return notes


def _try_programs(
    problems: _Problems, loaded: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan
) -> Iterator[str]:
    """Try what roles execute; yields what could not be seen."""
    yield from problems.of(lambda: check_pythons(plan, site)) or ()
    packages = problems.of(lambda: check_role_packages(loaded, plan, site))
    yield from packages or ()
    yield from problems.of(lambda: check_environments(loaded, plan, site.value)) or ()
    yield from problems.of(lambda: check_packages(loaded, plan)) or ()
    yield from problems.of(lambda: check_compiler(loaded, plan, site.value)) or ()
    if packages is not None:  # the same interpreter could only say the same once more
        yield from problems.of(lambda: check_engine_flags(loaded, plan)) or ()


def _conversations(
    problems: _Problems, loaded: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan
) -> ConversationReport:
    """Read the data of a supervised run, where the model and an interpreter are there to render it with."""
    found = [ConversationReport()]

    def look() -> None:
        found[0] = check_conversations(loaded, plan, site.value)

    if not any(each.key == "model.path" or each.key.startswith("cluster.") for each in problems.found):
        problems.of(look)
    return found[0]


def _model(loaded: Loaded[Recipe], resolved: Recipe, place: RunPlace, site: Loaded[ClusterProfile]) -> ModelReport:
    """What is wrong with the start model; a job of small programs needs none."""
    if loaded.value.job.payload == "probe":
        return ModelReport()
    directory = _model_dir(resolved, place)
    if place.source is not None:
        # its weights were looked at where the run was found
        report = report_model(loaded, directory, weights=False)
        return replace(report, findings=(*report.findings, *_lost_tower(loaded, place.source)))
    # commands take the profile `local` where none is named
    cluster = None if site.value.name == "local" else site.value.name
    return report_model(loaded, directory, cluster=cluster)


def _lost_tower(loaded: Loaded[Recipe], source: ModelOrigin) -> Iterator[Finding]:
    """Yield why exports could not have the vision tower: what another run gives is a language model."""
    if loaded.value.model.vision != "carry" or loaded.value.job.payload != "roles":
        return
    if source.origin.kind == "version" or source.run.recipe().model.vision != "carry":
        what = f"{source.origin} is a language model, which has no vision tower to carry"
        hint = "set model.vision: drop, or begin with a checkpoint of a run that carries it"
        yield Finding(loaded.where("model.vision"), "model.vision", what, hint)


def _model_dir(resolved: Recipe, place: RunPlace) -> Path:
    """Return the directory of the start model's configuration and tokenizer."""
    return Path(resolved.model.path) if place.source is None else place.source.config_dir


def _with_plan(prepared: PreparedRun, place: RunPlace) -> PreparedRun:
    """The run with its plan, which names the start model in the run's own directory where it has one there."""
    name = place.name or default_run_name(prepared.recipe.value, time.time())
    root = place.root or resolve_runs_root(prepared.profile.paths.runs_root, place.cwd)
    resolved, run_dir = prepared.resolved, root / name
    if place.source is not None:
        model = resolved.model.model_copy(update={"path": str(run_dir / START_MODEL)})
        resolved = resolved.model_copy(update={"model": model})
    return replace(prepared, resolved=resolved, plan=make_plan(resolved, prepared.profile, name, run_dir))


class _Problems:
    """Collects what checks raise."""

    def __init__(self, recipe: Loaded[Recipe]) -> None:
        self._recipe = recipe
        self.found: list[Finding] = []

    def of(self, check: Callable[[], Sequence[str] | None], *, unless: str | None = None) -> Sequence[str] | None:
        """Call a check, keep what it finds wrong, and return its notes; None where something is.

        Findings with the key ``unless`` are left out.
        A check that cannot look raises UsageError, which is a problem of the run, too.
        """
        try:
            return check() or ()
        except ConfigError as error:
            found = list(error.findings)
        except UsageError as error:
            what, _, hint = str(error).partition("\n    hint: ")
            found = [Finding(str(self._recipe.source), "", what, hint)]
        known = {each.what for each in self.found}
        self.found += [each for each in found if each.key != unless and each.what not in known]
        return None

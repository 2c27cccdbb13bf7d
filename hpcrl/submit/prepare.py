"""The one way from a recipe and a profile to a run that can be started; every command takes it and differs in output.

`prepare` loads a recipe and a profile, and checks rules, the model and its directory, secrets and the directory of
runs. `try_programs` also tries what roles execute: interpreters and their packages, environments of the user's own,
flags of engines, the chat format. `hpcrl.submit.start` then asks Slurm, and hands the run over. Problems are collected
and not raised, so that a person reads all of them at once: ``hpcrl submit`` refuses a run with problems, and no other
command says that a run starts unless this object has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.joined import load_both
from hpcrl.config.load import Loaded, load_cluster
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.table import check_cluster, check_rules
from hpcrl.config.runs_root import resolve_runs_root
from hpcrl.config.user_file import with_user_notifiers
from hpcrl.errors import ConfigError, ExitCode, Finding, UsageError
from hpcrl.jobplan import (
    absolute_paths,
    absolute_site_paths,
    check_engine_flags,
    check_packages,
    check_planned_sizes,
    check_pythons,
    check_secret_files,
    check_secrets,
    check_sizes,
    default_run_name,
    make_plan,
    with_model_of,
)
from hpcrl.jobplan.chat_trial import check_chat_format
from hpcrl.jobplan.conversation_trial import ConversationReport, check_conversations, with_steps
from hpcrl.jobplan.environment_trial import check_environments
from hpcrl.jobplan.extension_trial import check_extensions
from hpcrl.jobplan.packages import check_compiler, check_role_packages
from hpcrl.jobplan.start_model import ModelReport, report_model
from hpcrl.planning.memory.sandbox_notes import sandbox_notes, with_sandbox_limit
from hpcrl.runs.registry import Roots, check_name
from hpcrl.runs.start.origin import START_MODEL, ModelOrigin, find_source
from hpcrl.runs.start.privacy import check_root


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Directories and name of a new run.

    Attributes
    ----------
    cwd:
        Directory to which relative paths refer.
    name:
        Name of the run; by default the recipe's with the time.
    root:
        Directory of runs; by default that of the environment or the profile.
    source:
        The run whose weights it begins with.
    """

    cwd: Path
    name: str | None = None
    root: Path | None = None
    source: ModelOrigin | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Recipe on a cluster as it would be submitted, with all reasons against a submit.

    Attributes
    ----------
    recipe, site:
        As loaded.
    resolved, profile:
        The same with absolute paths.
    place:
        Directories and name of the run.
    plan:
        None where rules do not hold.
    problems:
        Reasons why ``hpcrl submit`` refuses it; empty where it does not.
    unmade:
        The start model is not there yet, and the recipe's warm-up makes it. One of the problems.
    notes:
        Checks that were impossible from here, unread keys of the model's ``config.json``, and memory that sandboxes may
        lack; a sentence each.
    exists:
        The run is there, and this is its next attempt: its weights come from its versions and checkpoints.
    """

    recipe: Loaded[Recipe]
    site: Loaded[ClusterProfile]
    resolved: Recipe
    profile: ClusterProfile
    place: RunPlace
    plan: Plan | None = None
    problems: tuple[Finding, ...] = ()
    unmade: Finding | None = None
    notes: tuple[str, ...] = ()
    exists: bool = False

    @property
    def source(self) -> ModelOrigin | None:
        """Return the run whose weights it begins with."""
        return self.place.source

    @property
    def starts(self) -> bool:
        """Return whether ``hpcrl submit`` would start it, by all checks."""
        return not self.problems

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of ``hpcrl submit``: 0, or that of the refusal."""
        return ExitCode.OK if self.starts else ConfigError.exit_code

    def planned(self) -> Plan:
        """Return the plan of a run that starts (ConfigError with all problems otherwise)."""
        self.refuse()
        assert self.plan is not None
        return self.plan

    def refuse(self, *, allow_unmade: bool = False) -> None:
        """Raise ConfigError with all problems where there are any.

        Parameters
        ----------
        allow_unmade:
            Ignore that the start model is only made by the warm-up later.
        """
        wanted = [each for each in self.problems if not (allow_unmade and each is self.unmade)]
        if wanted:
            raise ConfigError(wanted)

    def refuse_forecast(self) -> None:
        """Raise what keeps the planner from computing: rules, but not those about what this version can start.

        Raises
        ------
        ConfigError
            Rules of recipe, profile or model do not hold.
        DoesNotFitError
            Nothing is wrong but that the site has fewer nodes.
        """
        check_rules(self.recipe, self.site, planning=True)
        check_planned_sizes(self.recipe, self.site)

    def outlined(self) -> Plan:
        """Return the plan also where rules do not hold, to show what a run would be that does not start here."""
        return self.plan or _planned(self)[1]


def prepare(
    recipe: str,
    cluster: str | Loaded[ClusterProfile],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    cwd: Path,
    name: str | Callable[[Recipe], str] | None = None,
    root: Callable[[ClusterProfile], Path] | None = None,
    from_run: str | None = None,
    roots: Roots | None = None,
    in_job: bool = False,
    programs: bool = True,
) -> PreparedRun:
    """Load a recipe and a profile, and find out whether a run would start. Starts and writes nothing.

    Parameters
    ----------
    recipe, cluster, overrides, environ, in_job:
        See `hpcrl.config.joined.load_both`.
    cwd:
        Relative paths begin here.
    name:
        Name of the run, or a function that names it by its recipe; by default the recipe's name with the time.
    root:
        The directory of runs on a profile; by default what the environment or the profile says.
    from_run, roots:
        The run whose weights it begins with, and where to look for it (`hpcrl.runs.start.origin.find_source`).
    programs:
        Also try what roles execute (`try_programs`), which starts other processes.

    Raises
    ------
    ConfigError
        Recipe or profile cannot be read: a run cannot be prepared.
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
    named = name(loaded.value) if callable(name) else name
    named = None if named is None else check_name(named)
    prepared = examine(loaded, site, RunPlace(cwd=cwd, name=named, root=place, source=source))
    return try_programs(prepared) if programs else prepared


def prepare_site(cluster: str, cwd: Path) -> Loaded[ClusterProfile]:
    """Load a profile and check what every run on it needs, as `prepare` does for one of them.

    Raises
    ------
    ConfigError
        The profile cannot be read, its rules do not hold, or a secret is missing or may be read by others.
    """
    site = load_cluster(cluster)
    check_cluster(site)
    check_secret_files(absolute_site_paths(site.value, cwd).secrets, site)
    return site


def examine(loaded: Loaded[Recipe], site: Loaded[ClusterProfile], place: RunPlace) -> PreparedRun:
    """Find out whether a run of a loaded recipe would start, without the programs of its roles: see `try_programs`."""
    problems = _Problems(loaded)
    problems.of(lambda: check_rules(loaded, site))
    sound = not problems.found
    resolved, profile = absolute_paths(loaded.value, place.cwd), absolute_site_paths(site.value, place.cwd)
    model = _model(loaded, resolved, place, site)
    problems.found += model.problems
    problems.of(lambda: check_sizes(loaded, site), unless="model.path" if model.findings else None)
    prepared = PreparedRun(
        recipe=loaded,
        site=site,
        resolved=resolved,
        profile=profile,
        place=place,
        unmade=model.unmade,
        notes=tuple(model.notes),
    )
    if sound:
        resolved, plan = _planned(prepared)
        notes = (*prepared.notes, *sandbox_notes(loaded.value, site.value))
        prepared = replace(prepared, resolved=resolved, plan=plan, notes=notes)
        problems.of(lambda: check_secrets(plan, site))
        problems.of(lambda: check_root(plan.run_dir.parent))
    return replace(prepared, problems=tuple(problems.found))


def examine_attempt(recipe: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan) -> PreparedRun:
    """Find out whether the next attempt of a run that exists would start, with the programs of its roles.

    Only configuration and tokenizer of its model are checked: weights come from its versions and checkpoints.
    """
    problems = _Problems(recipe)
    problems.of(lambda: check_secrets(plan, site))
    if recipe.value.job.payload != "probe":
        problems.found += report_model(recipe, Path(recipe.value.model.path), weights=False).problems
    place = RunPlace(cwd=Path.cwd(), name=plan.run, root=plan.run_dir.parent)
    return try_programs(
        PreparedRun(
            recipe=recipe,
            site=site,
            resolved=recipe.value,
            profile=site.value,
            place=place,
            plan=plan,
            problems=tuple(problems.found),
            exists=True,
        )
    )


def try_programs(prepared: PreparedRun) -> PreparedRun:
    """Try what roles execute, of a run whose rules hold: interpreters, packages, environments, flags, chat format.

    Returns
    -------
    PreparedRun
        With the problems and notes of that behind those which it had.
    """
    recipe, site, plan = prepared.recipe, prepared.site, prepared.plan
    if plan is None or recipe.value.job.payload == "probe":
        return prepared
    problems, notes = _Problems(recipe, prepared.problems), list(prepared.notes)
    notes += _try_roles(problems, recipe, site, plan)
    model_dir = _model_dir(prepared.resolved, prepared.place)
    if not any(each.key == "model.path" for each in prepared.problems) and (
        prepared.exists or recipe.value.sft is None
    ):
        notes += problems.of(lambda: check_chat_format(recipe, plan, site.value, model_dir)) or ()
    resolved = prepared.resolved
    if not prepared.exists:
        report = _conversations(problems, recipe, site, plan)
        notes += report.notes
        if report.steps is not None:
            resolved = with_steps(resolved, report.steps)
    return replace(prepared, resolved=resolved, problems=tuple(problems.found), notes=tuple(notes))


def _try_roles(problems: _Problems, loaded: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan) -> Iterator[str]:
    """Try what roles execute; yields what could not be seen."""
    yield from problems.of(lambda: check_pythons(plan, site)) or ()
    packages = problems.of(lambda: check_role_packages(loaded, plan, site))
    yield from packages or ()
    yield from problems.of(lambda: check_environments(loaded, plan, site.value)) or ()
    if packages is not None:  # an interpreter without what its role imports could only say that once more
        yield from problems.of(lambda: check_extensions(loaded, plan, site.value)) or ()
    yield from problems.of(lambda: check_packages(loaded, plan)) or ()
    yield from problems.of(lambda: check_compiler(loaded, plan, site.value)) or ()
    if packages is not None:  # the same interpreter would only repeat the error
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
    """Return the report on the start model; a job of small programs needs none."""
    if loaded.value.job.payload == "probe":
        return ModelReport()
    directory = _model_dir(resolved, place)
    if place.source is not None:
        # its weights were checked when the run was found
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


def _planned(prepared: PreparedRun) -> tuple[Recipe, Plan]:
    """Return recipe and plan; they name the start model in the run's own directory where it has one there."""
    place, resolved = prepared.place, prepared.resolved
    name = place.name or default_run_name(prepared.recipe.value, time.time())
    run_dir = (place.root or resolve_runs_root(prepared.profile.paths.runs_root, place.cwd)) / name
    if place.source is not None:
        model = resolved.model.model_copy(update={"path": str(run_dir / START_MODEL)})
        resolved = resolved.model_copy(update={"model": model})
    plan = with_user_notifiers(make_plan(resolved, prepared.profile, name, run_dir))
    return resolved, with_sandbox_limit(plan, prepared.recipe.value, prepared.site.value)


class _Problems:
    """Collects what checks raise, behind what was ``found`` before."""

    def __init__(self, recipe: Loaded[Recipe], found: Sequence[Finding] = ()) -> None:
        self._recipe = recipe
        self.found = list(found)

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

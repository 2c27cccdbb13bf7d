"""From a plan to sbatch scripts. Pure: same plan, same bytes.

Templates hold layout, not logic. What they get is decided here and in `hpcrl.slurm.directives`; what goes into the
shell passes ``sh_quote``; a name that is missing is an error.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan, RoleGroup
from hpcrl.config.resources import template_dirs
from hpcrl.errors import UsageError
from hpcrl.slurm.directives import JobIdentity, component_options, directive, job_options, repeated_options

#: variables of the submitter's environment that a job keeps, as patterns of the shell's `case`
_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "SLURM_*", "SLURMD_*")
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

Command = Callable[[str], Sequence[str]]
"""Returns the command line of the batch process for a part of the run."""


class ScriptPart(NamedTuple):
    """Part of a plan that one script submits: its name, the components, and the job of the last component."""

    name: str
    components: tuple[int, ...]
    job: int


@dataclass(frozen=True)
class Script:
    """Script of one job of a run.

    Attributes
    ----------
    part:
        ``main``, or ``<role>-<replica>`` for the job of one replica (layout ``elastic``).
    component, job:
        Component and job of its nodes.
    text:
        Text of the script.
    """

    part: str
    component: int
    job: int
    text: str

    @property
    def file_name(self) -> str:
        """Return the file name, ``job.sbatch`` for the main job."""
        return "job.sbatch" if self.part == "main" else f"{self.part}.sbatch"


def render_jobs(
    plan: Plan,
    cluster: SlurmCluster,
    *,
    run_id: str,
    command: Command,
    cwd: Path,
    output: Callable[[str], Path] | None = None,
    exclude: Sequence[str] = (),
    templates: Path | None = None,
    parts: Sequence[ScriptPart] | None = None,
) -> list[Script]:
    """Render the jobs of a run, the main one first.

    Parameters
    ----------
    plan, cluster:
        The jobs and where they run.
    run_id:
        Goes into the comment of each job, so that it can be found when the answer of a submit was lost.
    command:
        Gives the batch process of a part; the script's last line is ``exec`` of it.
    cwd:
        Working directory of supervisor and roles.
    output:
        Gives the file for what a part's batch process prints; ``<part>.log`` in the run directory by default.
    exclude:
        Nodes to stay away from.
    templates:
        A directory that is searched before all others.
    parts:
        Jobs to render; by default those that the plan has at its start.

    Raises
    ------
    UsageError
        A template is missing or wrong, or a value cannot be passed to Slurm.
    """
    assert plan.layout.kind != "local", "a local run has no script"
    scripts = []
    for chosen in planned_parts(plan) if parts is None else parts:
        part, components, job = chosen
        identity = JobIdentity(plan.run, run_id, part)
        log = output(part) if output is not None else plan.run_dir / f"{part}.log"
        options = [
            [
                *(
                    job_options(plan, identity, output=log, cwd=cwd, exclude=tuple(exclude))
                    if position == 0
                    else repeated_options(plan, identity)
                ),
                *component_options(plan.layout.components[index], plan.layout.sbatch_options),
            ]
            for position, index in enumerate(components)
        ]
        text = render_part(plan, cluster, chosen, options=options, command=command(part), templates=templates)
        scripts.append(Script(part, components[0], job, text))
    return scripts


def render_part(
    plan: Plan,
    cluster: SlurmCluster,
    part: ScriptPart,
    *,
    options: Sequence[Sequence[str]],
    command: Sequence[str],
    templates: Path | None = None,
) -> str:
    """Render the script of one part by its layout's template; parameters and errors as those of `render_script`."""
    return render_script(
        plan.layout.kind,
        cluster,
        options=options,
        command=command,
        templates=templates,
        run=plan.run,
        recipe=plan.recipe,
        cluster=plan.cluster,
        part=part.name,
        shares=_shares(plan),
    )


def render_script(
    kind: str,
    site: SlurmCluster,
    *,
    options: Sequence[Sequence[str]],
    command: Sequence[str],
    templates: Path | None = None,
    **context: object,
) -> str:
    """Render ``<kind>.sbatch.j2``.

    Parameters
    ----------
    kind:
        Name of the template.
    site:
        Profile that has the environment of the job.
    options:
        sbatch's options, by component.
    command:
        The batch process.
    templates:
        A directory that is searched before all others.
    context:
        Further values of the template.

    Raises
    ------
    UsageError
        The template is missing or wrong, or a value cannot be passed to Slurm.
    """
    template = _environment(templates).get_template(f"{kind}.sbatch.j2")
    context |= {
        "components": [[directive(option) for option in component] for component in options],
        "kept": [*_KEPT, *site.launch.inherit],
        "path": ":".join([*site.launch.path, *_SYSTEM_PATH]),
        "module_init": site.launch.module_init,
        "modules": site.launch.modules,
        "command": list(command),
    }
    try:
        return template.render(context)
    except jinja2.TemplateError as error:
        raise UsageError(f"{template.filename}: {error}\n    hint: correct the template") from error


def planned_parts(plan: Plan) -> list[ScriptPart]:
    """Return the jobs that a plan has at its start, the main one first."""
    indices = tuple(range(len(plan.layout.components)))
    if plan.layout.kind != "elastic":
        return [ScriptPart("main", indices, 0)]
    groups = [group for group in plan.groups if plan.own_jobs(group)]
    replicas = [replica_part(group, replica) for group in groups for replica in range(group.replicas)]
    return [ScriptPart("main", indices[:1], 0), *replicas]


def replica_part(group: RoleGroup, replica: int) -> ScriptPart:
    """Return the job of one replica in the layout ``elastic``; there may be more of them than the plan began with."""
    return ScriptPart(f"{group.role.value}-{replica}", (group.component,), replica)


def _shares(plan: Plan) -> list[str]:
    """Return a line for each role's share of nodes, for the head of the script."""
    shares = []
    for group in sorted(plan.groups, key=lambda group: (group.component, group.first_node, group.beside)):
        if group.beside:
            shares.append(f"{group.role.value} beside {plan.component(group).roles[0]}")
        elif group.share is not None:
            shares.append(f"{group.role.value} {group.replicas} x {group.share.text} of a node")
        else:
            shares.append(f"{group.role.value} {group.replicas} x {_count(group.nodes, 'node')}")
    if plan.layout.spares:
        shares.append(_count(plan.layout.spares, "spare node"))
    return shares


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _environment(templates: Path | None) -> jinja2.Environment:
    if templates is not None and not templates.is_dir():
        raise UsageError(f"{templates} is not a directory of templates")
    directories = [*([templates] if templates is not None else []), *template_dirs()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(directory) for directory in directories]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["sh_quote"] = _sh_quote
    return environment


def _sh_quote(value: object) -> str:
    if not isinstance(value, str):
        raise jinja2.TemplateError(f"sh_quote takes text, not {value!r}")
    return shlex.quote(value)

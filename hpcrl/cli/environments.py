"""``hpcrl env``: try an environment of a recipe before there is a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli import sandboxes
from hpcrl.cli.conversations import KIND_STYLES, message_pieces
from hpcrl.cli.options import ClusterOption, JsonOption, RecipeArgument, SetOption
from hpcrl.cli.output import json_text, say, screen

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.bringup.environment_job import NodeCheck
    from hpcrl.config.recipe import Recipe
    from hpcrl.sandboxes.limits_report import LimitsReport
    from hpcrl.submit.prepare import PreparedRun

environment_app = typer.Typer(help="Environments: where tasks and rewards come from.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    sandboxes.register(environment_app)
    app.add_typer(environment_app, name="env")


@environment_app.command("try")
def try_(
    recipe: RecipeArgument,
    task: Annotated[int, typer.Option("--task", metavar="N", min=0, help="Number of the training task.")] = 0,
    name: Annotated[
        str | None, typer.Option("--env", "-e", metavar="NAME", help="Name of one environment; all of them by default.")
    ] = None,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time for each.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Show a prompt, the demonstration, and two rollouts with their rewards: one with empty replies, and one with the
    turns of the demonstration as replies.

    As in a run, the environment has its own process with the orchestrator's Python; no model is needed.

    Exit code: 0 all went well, 1 an environment failed or gave a part of a reward that is not a number, 2 an
    environment cannot be created.
    """
    import os
    from contextlib import suppress
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.errors import ExitCode, HpcrlError
    from hpcrl.jobplan.environment_trial import check_environments, try_environment
    from hpcrl.submit.prepare import prepare

    prepared = prepare(recipe, cluster, overrides or (), environ=os.environ, cwd=Path.cwd(), programs=False)
    loaded, site, plan = prepared.recipe, prepared.site, prepared.outlined()
    notes: list[str] = []
    with working("making the recipe's environments"), suppress(HpcrlError):  # the trial gives the better error
        notes = check_environments(loaded, plan, site.value)
    for note in notes:
        say(f"note: {note}", err=True)
    with working("trying the recipe's environments"):
        found = {
            each: try_environment(loaded, plan, site.value, name=each, task=task, timeout_s=timeout_s)
            for each in _wanted(loaded.value, name)
        }
    if as_json:
        say(json_text({"format_version": 1, "task": task, "environments": found}))
    else:
        for each, shown in found.items():
            _print(each, task, shown, screen())
    bad = any("error" in shown or shown.get("refused") for shown in found.values())
    raise typer.Exit(ExitCode.FAILED if bad else ExitCode.OK)


@environment_app.command("check")
def check(
    recipe: RecipeArgument,
    tasks: Annotated[int, typer.Option("--tasks", "-n", metavar="N", min=1, help="Tasks of each environment.")] = 4,
    name: Annotated[
        str | None, typer.Option("--env", "-e", metavar="NAME", help="Name of one environment; all of them by default.")
    ] = None,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time in all.")] = 1800.0,
    job: Annotated[
        bool, typer.Option("--job", help="Check in a small job, on a node where environments of a run would be.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Maximum wait of that job in the queue.")
    ] = 1800.0,
    as_json: JsonOption = False,
) -> None:
    """Check rewards on the first training tasks with policies of known reward: empty replies must earn nothing, the
    right answer at least 1, twice, and tampering with the judge nothing. Where an environment has sandboxes, each of
    their limits is tried as well.

    It runs on this machine, with the orchestrator's Python; no model is needed. With --job it runs on a node of the
    cluster, as the role that runs environments would: with its partition, Python, variables, secrets and container,
    without GPUs. Ctrl-C cancels the job.

    Exit code: 0 all rewards are right, 1 a reward is wrong or a limit does not hold, 2 an environment cannot be
    created or the check could not run, 130 interrupted.
    """
    import os
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.errors import ExitCode
    from hpcrl.jobplan.environment_trial import check_environment_tasks
    from hpcrl.submit.prepare import prepare

    prepared = prepare(recipe, cluster, overrides or (), environ=os.environ, cwd=Path.cwd(), programs=False)
    loaded, site = prepared.recipe, prepared.site
    names = _wanted(loaded.value, name)
    place: dict[str, Any] = {}
    if job:
        found = _check_in_job(prepared, names, tasks=tasks, timeout_s=timeout_s, wait_s=wait_s)
        answer, place = found.answer, {"job": found.job_id, "nodes": found.nodes}
    else:
        with working("playing policies with known rewards"):
            answer = check_environment_tasks(
                loaded, prepared.outlined(), site.value, names=names, tasks=tasks, timeout_s=timeout_s
            )
    limits = _limits(answer)
    if as_json:
        document = None if limits is None else sandboxes.report_document(limits)
        say(json_text({"format_version": 1, "environments": answer["environments"], "limits": document, **place}))
    else:
        for each, shown in answer["environments"].items():
            _print_check(each, shown)
        if limits is not None:
            say(f"limits of a sandbox on {', '.join(place.get('nodes', ())) or 'this machine'}:")
            for line in sandboxes.report_lines(limits):
                say(f"  {line}")
    if not all(shown["made"] for shown in answer["environments"].values()):
        raise typer.Exit(ExitCode.USAGE)
    wrong = any(shown["problems"] for shown in answer["environments"].values())
    raise typer.Exit(ExitCode.FAILED if wrong or (limits is not None and not limits.held) else ExitCode.OK)


def _check_in_job(prepared: PreparedRun, names: list[str], *, tasks: int, timeout_s: float, wait_s: float) -> NodeCheck:
    """Run the check on a node, and show what becomes of its job."""
    from hpcrl.bringup.environment_job import check_environments_in_job
    from hpcrl.cli.progress import working
    from hpcrl.cli.selection import runs_root
    from hpcrl.cli.slurm import reachable_slurm

    with working(f"waiting for the check's job on {prepared.site.value.name}, {wait_s:g} s at most in the queue"):
        return check_environments_in_job(
            prepared,
            names=names,
            tasks=tasks,
            client=reachable_slurm,
            root=lambda cluster: runs_root(None, cluster),
            timeout_s=timeout_s,
            wait_s=wait_s,
            say=lambda text: say(text, err=True),
        )


def _limits(answer: dict[str, Any]) -> LimitsReport | None:
    """Return the report on limits of sandboxes in the answer of a check; None where no environment has such."""
    if answer["limits"] is None:
        return None
    import msgspec

    from hpcrl.sandboxes.limits_report import LimitsReport

    return msgspec.convert(answer["limits"], LimitsReport)


def _print_check(name: str, found: dict[str, Any]) -> None:
    """Print the rewards of each policy, and what is wrong."""
    say(f"{name}: {'something is wrong' if found['problems'] else 'good'}")
    for policy, rewards in found["played"].items():
        say(f"  {policy}: reward {sum(rewards) / len(rewards):g} in the mean of {len(rewards)} rollouts")
    for problem in found["problems"]:
        say(f"  {problem}")
    for note in found["notes"]:
        say(f"  note: {note}")


def _wanted(recipe: Recipe, name: str | None) -> list[str]:
    from hpcrl.errors import UsageError

    names = [each.name for each in recipe.environments]
    if recipe.sft is not None:
        raise UsageError(
            "a supervised run (sft) has no environments\n    hint: hpcrl sft RECIPE --dry-run reads its data"
        )
    if name is not None and name not in names:
        raise UsageError(f"the recipe has no environment {name!r}\n    hint: it has {', '.join(names)}")
    return names if name is None else [name]


def _print(name: str, task: int, found: dict[str, Any], console: Console) -> None:
    from rich.text import Text

    def tell(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    def show(messages: list[dict[str, Any]]) -> None:
        for message in messages:
            for kind, text in message_pieces(message):
                lines = text.splitlines() or ["(nothing)"]
                said = "\n".join([f"  {kind}: {lines[0]}", *(f"    {line}" for line in lines[1:])])
                tell(said, KIND_STYLES.get(kind.partition(" (")[0], ""))

    tell(f"{name}, training task {task}", "bold")
    if "prompt" in found:
        tell("prompt", "dim")
        show(found["prompt"])
    if found.get("tools"):
        tell(f"tools\n  {', '.join(found['tools'])}", "dim")
    if "demonstration" in found:
        tell("demonstration", "dim")
        if found["demonstration"] is None:
            tell("  none: the environment has no demonstrations, and `hpcrl warmup` needs them")
        else:
            show(found["demonstration"])
    plays = (
        ("a policy with empty replies", found),
        ("a policy that replies with the demonstration", found.get("demonstrated")),
    )
    for policy, played in plays:
        if played is None or "reward" not in played:
            continue
        tell(f"rollout with {policy}", "dim")
        show(played["conversation"])
        parts = "".join(f", {part} {value:g}" for part, value in played["parts"].items())
        tell(f"  reward {played['reward']:g}{parts}")
        for note in played.get("notes", ()):
            tell(f"  note: {note}", "yellow")
    for part, what in found.get("refused", {}).items():
        tell(f"part {part!r} of a reward is {what}: a run leaves it out", "red")
    for failure in found.get("errors", ()):
        tell(f"{failure['stage']}: {failure['error']}", "red")

"""``hpcrl rollouts rescore``: what a run would have been trained on with other rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say, table_console
from hpcrl.cli.rollouts import EnvironmentOption, StateOption, StepOption, rollouts_app
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir

_MODULE = "hpcrl.rollouts.rescoring"
_MOST_REASONS = 5


def register(app: typer.Typer) -> None:
    """Add the command to its group, which `hpcrl.cli.rollouts` adds."""
    rollouts_app.command("rescore")(rescore)


def rescore(
    run: RunArgument,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="REWARD",
            help="Checker that replaces the recipe's: numeric, package.module:function, or as in a recipe in braces: "
            "'{kind: exact, extract: boxed}'. Repeatable. By default the environments compute rewards again unchanged.",
        ),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="Also audit how rewards are earned: by format alone, by duplicates, by length."),
    ] = False,
    environment: EnvironmentOption = None,
    state: StateOption = None,
    step: StepOption = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Compute rewards of stored rollouts again, and show the change for each step.

    Nothing is written. A rollout that is no longer stored completely counts as unknown, and is left out of all numbers.

    Exit code: 0 all went well, 1 a checker or an environment failed at a rollout.
    """
    from hpcrl.cli.progress import working
    from hpcrl.config.given_rewards import parse_rewards
    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.rollouts import choose_rollouts, read_ledger

    given = parse_rewards(rewards or ())
    found = find(run, root)
    # wrong options are reported before anything is started
    chosen = choose_rollouts(read_ledger(found), environment=environment, state=state, step=step)
    if not chosen:
        say("no finished rollout matches", err=True)
    request = {
        "run": str(found.path),
        "rewards": [reward.model_dump(mode="json") for reward in given],
        "environment": environment,
        "state": state,
        "step": step,
        "audit": audit,
    }
    with working(f"computing rewards of {len(chosen):,} rollouts"):
        answer = _ask(found, request)
    if as_json:
        say(json_text({"format_version": 1, "run": found.name, "rewards": request["rewards"], **answer}))
    else:
        _print(answer)
        for name, audited in answer.get("audit", {}).items():
            _print_audit(name, audited)
    raise typer.Exit(ExitCode.FAILED if answer["failed"] else ExitCode.OK)


def _ask(run: RunDir, request: dict[str, Any]) -> dict[str, Any]:
    from hpcrl.errors import ConfigError, Finding, UsageError
    from hpcrl.jobplan.packages import check_trial_packages
    from hpcrl.jobplan.role_python import ask_role_python, environment_role, hidden_reason, role_python

    if not run.is_own:
        raise UsageError(
            f"{run.path} is another user's, and its files name the programs that compute rewards\n"
            "    hint: ask its user to do it; or read recipe.yaml and plan.json of it, and do it with a copy (cp -r)"
        )
    plan, site = run.plan(), run.cluster()
    role = environment_role(plan)
    if reason := hidden_reason(plan, site, what="environments", role=role):
        raise UsageError(f"rewards cannot be computed here: {reason}\n    hint: do it on a node of the run's cluster")
    check_trial_packages(plan, role_python(plan, role), role)
    answer = ask_role_python(
        _MODULE,
        request=request,
        plan=plan,
        site=site,
        doing="compute rewards",
        timeout_s=None,
        slow_hint="",
        role=role,
    )
    if findings := answer.get("findings"):
        raise ConfigError([Finding(run.name, f["key"], f["what"], f["hint"]) for f in findings])
    if error := answer.get("error"):
        raise UsageError(f"rewards cannot be computed again: {error}")
    return answer


def _print(answer: dict[str, Any]) -> None:
    from rich.table import Table

    from hpcrl.runs.views.words import number

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("step", "rollouts", "known", "reward", "again", "changed", "groups", "reordered", "varied", "again")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for each in answer["steps"]:
        share = each["changed"] / each["known"] if each["known"] else None
        table.add_row(
            str(each["step"] if each["step"] is not None else each["state"]),
            f"{each['rollouts']:,}",
            f"{each['known']:,}",
            "" if each["mean_before"] is None else number(each["mean_before"]),
            "" if each["mean_after"] is None else number(each["mean_after"]),
            "" if share is None else f"{share:.1%}",
            f"{each['groups']:,}",
            f"{each['reordered']:,}",
            f"{each['varied_before']:,}",
            f"{each['varied_after']:,}",
        )
    if answer["steps"]:
        table_console().print(table)
    for word in ("unknown", "failed"):
        reasons = list(answer[word].items())
        for why, count in reasons[:_MOST_REASONS]:
            say(f"{word}: {count:,} rollouts: {why}")
        if len(reasons) > _MOST_REASONS:
            say(f"{word}: and {len(reasons) - _MOST_REASONS} other reasons")


def _print_audit(name: str, audited: dict[str, Any]) -> None:
    from hpcrl.runs.views.words import number

    say(f"\naudit of {name}: {audited['rewarded']:,} of {audited['rollouts']:,} rollouts have a reward above 0")
    only = audited["format_only"]
    if only is None:
        say("  format alone: the reward has no checker of kind format")
    else:
        shares = f"{only['share_of_rewarded']:.1%} of these, {only['share_of_reward']:.1%} of all reward"
        say(f"  format alone: {only['rollouts']:,} rollouts, {shares}")
    say(f"  duplicates: {audited['duplicated']:,} rewarded rollouts give the same reply to different prompts")
    for each in audited["duplicates"]:
        about = f"{each['rollouts']:,} times to {each['prompts']:,} prompts, reward {number(each['mean_reward'])}"
        say(f"    {about}: {each['text']!r}")
    longest = ", ".join(
        f"{each['id']} ({each['tokens']:,} tokens, {number(each['reward'])})" for each in audited["longest"]
    )
    say(f"  longest: {longest or 'none'}")
    if audited["mean_of_longest"] is not None:
        means = f"{number(audited['mean_of_longest'])}, of the others {number(audited['mean_of_others'])}"
        say(f"    mean reward of the longest tenth {means}")
    for kind, each in audited["suspicious"].items():
        say(f"  suspicious, {kind.replace('_', ' ')}: {each['rollouts']:,} rollouts: {', '.join(each['ids'])}")
    if not audited["suspicious"]:
        say("  suspicious: none")

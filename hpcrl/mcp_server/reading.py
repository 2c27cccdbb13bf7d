"""Tools that change nothing: they read run directories, recipes and profiles, and ask Slurm about jobs.

Names and docstrings are what an agent sees. Texts of runs (logs, rollouts, causes) were written by programs and models;
they come as JSON strings, and the instructions of the server say that they are data.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hpcrl import api
from hpcrl.analysis.bounds.slow_report import slow_document, slow_report
from hpcrl.analysis.comparison.compared import compare_runs
from hpcrl.config.load import load_recipe
from hpcrl.config.resources import list_clusters, list_recipes
from hpcrl.errors import UsageError
from hpcrl.mcp_server.bounded_search import search_lines
from hpcrl.mcp_server.tool_answers import as_document, list_document, newest_that_fit
from hpcrl.planning.documents import outlook_document
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.lenient import finite
from hpcrl.runs.locate import runs_in_sight
from hpcrl.runs.status import RunState
from hpcrl.runs.views.diagnosis import diagnose, diagnosis_document
from hpcrl.runs.views.listing import list_rows, listing_document
from hpcrl.runs.views.logs import format_line
from hpcrl.runs.views.usage import status_document
from hpcrl.slurm.lookup import look_up

MAX_LINES = 1000
"""Maximum number of log lines of one answer."""
MAX_STEPS = 200
"""Maximum number of steps of one answer."""
MAX_RUNS = 200
"""Maximum number of runs of one answer."""


def show_runs(newest: int = 20, state: str = "") -> str:
    """List runs, newest first: state, recipe, cluster, steps, reward and cause.

    `newest` is the maximum number (200 at most). `state`, for example RUNNING or FAILED, keeps only runs in it.
    """
    states = [state.upper()] if state else []
    if unknown := [each for each in states if each not in RunState.__members__]:
        raise UsageError(f"{unknown[0]} is not a state of a run\n    hint: {', '.join(RunState.__members__)}")
    set_job_query(look_up)
    return listing_document(list_rows(runs_in_sight(None), states=states, newest=_within(newest, MAX_RUNS, "newest")))


def show_status(run: str) -> str:
    """Show where a run stands: state, roles, step, reward, weight version, staleness, last checkpoint, GPU-hours.

    `run` is a name, an id, a job number or a directory.
    """
    return status_document(api.Run(run).directory)


def explain_run(run: str) -> str:
    """Explain what ended a run, or what it is in: first cause, hint, last words of the log, and commands to go on."""
    return diagnosis_document(diagnose(api.Run(run).directory))


def explain_slow(run: str) -> str:
    """Explain what bounds a step, over the run and now, what the plan predicts, and which settings would change it.

    The settings are simulated with durations that the run measured, which takes seconds.
    """
    return as_document(finite(slow_document(slow_report(api.Run(run).directory))))


def search_logs(run: str, role: str = "", grep: str = "", since: str = "", lines: int = 100) -> str:
    """Read the newest log lines of a run's roles, merged by time, a JSON object a line.

    `role` is a role such as trainer, or one replica such as engine/0. `grep` is a regular expression. `since` is an age
    such as 10m or 2h, or a time. `lines` is the maximum number (1,000 at most). A search ends after 60 s.
    """
    wanted = _within(lines, MAX_LINES, "lines")
    if grep:
        found = search_lines(api.Run(run).directory, grep, role=role, since=since, lines=wanted)
    else:
        logs = api.Run(run).logs(role=role or None, since=since or None, lines=wanted)
        found = [format_line(line, as_json=True) for line in logs]
    kept, left_out = newest_that_fit(found)
    return "\n".join([*([f"[{left_out} older lines do not fit; ask for less]"] if left_out else []), *kept])


def show_steps(run: str, newest: int = 20, every: int = 1) -> str:
    """Read the records of optimizer steps: reward, loss, staleness, counts of rollouts, seconds by phase.

    `newest` is the maximum number of steps (200 at most). `every` is the distance between the steps that are kept,
    counted from the last.
    """
    if every < 1:
        raise UsageError(f"every is {every}: it must be 1 or more")
    records = api.Run(run).metrics()
    chosen = records[::-1][::every][: _within(newest, MAX_STEPS, "newest")][::-1]
    return list_document("steps", finite(msgspec.to_builtins(chosen)), len(records))


def compare_several(runs: list[str], reward: float | None = None, heldout: str = "") -> str:
    """Compare runs: settings that differ, held-out reward at equal cost, cost of a reward, drops, faults.

    `runs` are two or more names, ids, job numbers or directories. `noise` says whether a difference of held-out rewards
    is more than noise. `reward` is the held-out reward whose cost is compared, by default the highest that all have
    reached. `heldout` is a set of evaluation.sets in place of the held-out prompts.
    """
    found = compare_runs([api.Run(run).directory for run in runs], reward=reward, heldout=heldout or None)
    return as_document(finite(msgspec.to_builtins(found)))


def list_rollouts(run: str, state: str = "", environment: str = "", step: int = -1, newest: int = 50) -> str:
    """List finished rollouts: id, environment, state, reward, turns, tokens, weight versions.

    `state` is waiting, trained or dropped. `step` keeps only those of the batch of a step. `newest` is the maximum
    number (200 at most).
    """
    found = api.Run(run).rollouts(environment=environment or None, state=state or None, step=None if step < 0 else step)
    wanted = _within(newest, MAX_RUNS, "newest")
    return list_document("rollouts", finite(msgspec.to_builtins(found[-wanted:])), len(found))


def list_configurations() -> str:
    """List the recipes and cluster profiles that come with hpcrl, with descriptions and files."""
    recipes = {
        name: {"file": str(path), "description": load_recipe(str(path)).value.description}
        for name, path in list_recipes().items()
    }
    return as_document({"recipes": recipes, "clusters": {name: str(path) for name, path in list_clusters().items()}})


def plan_run(recipe: str, cluster: str = "local", overrides: dict[str, Any] | None = None) -> str:
    """Plan a run: whether it fits, how long a step takes, and what would prevent a submit. Starts nothing.

    `recipe` and `cluster` are names or files. `overrides` are changes of the recipe, for example
    {"trainer.steps": 10}. Packages and programs that a recipe names are not imported or run, so that a submit checks
    more than this.
    """
    planned = api.plan(recipe, cluster, overrides or {}, programs=False)
    return as_document(
        finite(
            {
                "verdict": planned.verdict.document(),
                "step_s": planned.step_s,
                "problems": planned.problems,
                "groups": [
                    {"role": group.role, "replicas": group.replicas, "ranks": group.ranks}
                    for group in planned.plan.groups
                ],
                "forecast": outlook_document(planned.outlook),
            }
        )
    )


READING = (
    *(show_runs, show_status, explain_run, explain_slow, search_logs, show_steps, compare_several, list_rollouts),
    *(list_configurations, plan_run),
)


def _within(number: int, most: int, name: str) -> int:
    if not 1 <= number <= most:
        raise UsageError(f"{name} is {number}: it must be from 1 to {most}")
    return number

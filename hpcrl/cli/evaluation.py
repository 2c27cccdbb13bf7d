"""``hpcrl eval``: evaluate a model by itself, with intervals and pass@k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli.options import JsonOption, SetOption
from hpcrl.cli.output import json_text, say, screen, table_console
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import RunsRootOption, ask_slurm, find, profile_roots, runs_root

if TYPE_CHECKING:
    from pathlib import Path

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.load import Loaded
    from hpcrl.runs.rundir import RunDir
    from hpcrl.submit.evaluation import EvaluationRequest


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN|MODEL",
            help="What to evaluate: a recipe (its start model), a run (a version of it) or a model directory.",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="Recipe with the environments and engines for a model directory, or for a run in place of its own.",
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option("--version", metavar="N", min=0, help="Version of RUN; the newest full one by default."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", metavar="K", min=1, help="Samples of each prompt.")] = 1,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", metavar="N", min=1, help="Held-out prompts; by default those of the recipe."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Sampling temperature; 0 is greedy. Default: evaluation.sampling. Several samples need a value "
            "above 0.",
        ),
    ] = None,
    environments: Annotated[
        list[str] | None,
        typer.Option("--environment", "-e", metavar="NAME", help="Only this environment. Repeatable."),
    ] = None,
    pass_reward: Annotated[
        float, typer.Option("--pass-reward", metavar="REWARD", help="Minimum reward of a sample that passes.")
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="SEED", min=0, help="Seed of samples and confidence intervals; default: the recipe's."
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=output_file, help="Also write the result to this file, as JSON."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", metavar="NAME", help="Cluster profile; by default `local`, or that of RUN."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="RUN", help="Name of the new run.")] = None,
    overrides: SetOption = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Start the evaluation and return; `hpcrl eval` of the new run shows the result."),
    ] = False,
    on_engines: Annotated[
        bool,
        typer.Option("--on-engines", help="Let the engines of RUN do it while it trains, at the version they serve."),
    ] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Evaluate a model on held-out prompts: mean reward and pass@k by environment, with 95 % intervals.

    An evaluation is a separate run with engines and without a trainer, on this machine or as a job. Its rollouts are in
    its ledger (`hpcrl rollouts ls`). `hpcrl resume` continues an interrupted evaluation. With the name of an
    evaluation, `hpcrl eval` shows its result.

    With --on-engines no new run is made: a run that trains evaluates the version that its engines serve, at the same
    time as its own rollouts.

    Exit code: 0 completed, 1 failed, 130 cancelled.
    """
    from pathlib import Path

    from hpcrl.config.load import Loaded
    from hpcrl.errors import UsageError
    from hpcrl.runs.start.newest_weights import newest_weights
    from hpcrl.submit.evaluation import EvaluationRequest, is_model, is_recipe

    file = None if output is None else Path(output)
    if file is not None and file.exists():
        raise UsageError(f"{file} exists already\n    hint: --output with another name")
    request = EvaluationRequest(
        samples=samples,
        prompts=prompts,
        temperature=temperature,
        environments=tuple(environments or ()),
        pass_reward=pass_reward,
        seed=seed,
    )
    if on_engines:
        if recipe or overrides or cluster or name or detach or version is not None:
            raise UsageError(
                "--on-engines takes recipe, engines and version of the run as they are\n"
                "    hint: leave out --recipe, --set, --cluster, --name, --detach and --version"
            )
        _on_engines(find(target, root), request, file, as_json=as_json)
        return
    given, from_run, more = target, None, list(overrides or ())
    site: str | Loaded[ClusterProfile] = cluster or "local"
    if is_model(target):
        if recipe is None:
            raise UsageError(
                f"{target} is a model: evaluating it needs the environments of a recipe\n    hint: --recipe RECIPE"
            )
        given, more = recipe, [*more, f"model.path={Path(target).resolve()}"]
    elif is_recipe(target):
        if recipe is not None:
            raise UsageError(
                f"{target} is a recipe; --recipe is for model directories and runs\n    hint: leave it out"
            )
    else:
        found = find(target, root)
        if found.recipe().job.payload == "evaluation":
            raise typer.Exit(_finish(found, file, as_json=as_json, new=False))
        given, from_run = recipe or _recipe_of(found), newest_weights(found, version)
        # a profile that the run was given by its path is found by no name, and another one may have that name
        site = cluster or Loaded(found.cluster(), found.cluster_path, {})
    if version is not None and from_run is None:
        raise UsageError(f"--version needs a run, and {target} is not a run\n    hint: leave it out")
    run = _start(given, site, more, request, name=name, from_run=from_run, root=root)
    if detach:
        say(run.name)
        say(f"  hpcrl eval {run.name}\n  hpcrl cancel {run.name}", err=True)
        return
    raise typer.Exit(_finish(run, file, as_json=as_json, new=True))


def _recipe_of(run: RunDir) -> str:
    """Return the path of a run's recipe (UsageError where it cannot evaluate)."""
    from hpcrl.errors import UsageError

    if run.recipe().sft is not None:
        raise UsageError(
            f"{run.name} is a supervised run: it has no environments and no engines\n"
            "    hint: --recipe RECIPE, which has them"
        )
    return str(run.recipe_path)


def _on_engines(run: RunDir, request: EvaluationRequest, output: Path | None, *, as_json: bool) -> None:
    """Let a run that trains evaluate what its engines serve, and show the result."""
    from hpcrl.cli.progress import working
    from hpcrl.runs.running_evaluation import evaluate_on_engines
    from hpcrl.submit.evaluation import evaluation_set

    recipe = run.recipe()
    seed = recipe.seed if request.seed is None else request.seed
    with working(f"the engines of {run.name} evaluate"):
        found = evaluate_on_engines(run, evaluation_set(recipe, request), seed=seed)
    about = {"format_version": 1, "run": run.name, "recipe": recipe.name, "model": recipe.model.path}
    _show({**about, **found}, output, as_json=as_json)
    first, last = found["version"], found["last_version"]
    say(f"version {first}" if first == last else f"versions {first} to {last}", err=True)


def _start(
    recipe: str,
    site: str | Loaded[ClusterProfile],
    overrides: list[str],
    request: EvaluationRequest,
    *,
    name: str | None,
    from_run: str | None,
    root: str | None,
) -> RunDir:
    """Submit the run that evaluates."""
    import os
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.submit.evaluation import evaluation_name, evaluation_settings
    from hpcrl.submit.prepare import prepare
    from hpcrl.submit.start import submit

    with working("checking whether it would start"):
        settings = [*overrides, *evaluation_settings(recipe, overrides, request)]
        prepared = prepare(
            recipe,
            site,
            settings,
            environ=os.environ,
            cwd=Path.cwd(),
            name=name or evaluation_name,
            root=lambda profile: runs_root(root, profile),
            from_run=from_run,
            roots=profile_roots if root is None else None,
        )
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    prepared.refuse()
    ask_slurm()
    if prepared.source is not None:
        say(f"copying the weights of {prepared.source.origin}", err=True)
    run = submit(prepared, from_run=from_run)
    say(f"submitted {run.name} in {run.path}", err=True)
    return run


def _finish(run: RunDir, output: Path | None, *, as_json: bool, new: bool) -> int:
    """Wait for the end of an evaluation and show its result; returns the exit code."""
    from hpcrl.errors import ExitCode, RunFailedError
    from hpcrl.runs.evaluation_result import read_result
    from hpcrl.runs.record import RunRecord
    from hpcrl.runs.registry import reference
    from hpcrl.runs.status import RunState
    from hpcrl.runs.views.follow import follow
    from hpcrl.submit.submission import interrupt

    submissions = RunRecord.read(run).submissions
    before = submissions[-1].after_attempt if submissions else 0
    # Ctrl-C of a viewer does not end the evaluation
    stop = (lambda count: interrupt(run, count)) if new else None
    view = follow(run, screen(err=True), on_interrupt=stop, after_attempt=before)
    if view.state is not RunState.COMPLETED:
        named = reference(run)
        say(f"  hpcrl why {named}\n  hpcrl resume {named}", err=True)
        if view.state is RunState.CANCELLED:
            return ExitCode.CANCELLED
        return view.cause.kind.exit_code if view.cause is not None else ExitCode.FAILED
    result = read_result(run)
    if result is None:
        raise RunFailedError(f"{run.name} has completed without a result in {run.path}")
    _show(result, output, as_json=as_json)
    return ExitCode.OK


def _show(result: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    from hpcrl.storage.files import atomic_write

    if output is not None:
        atomic_write(output, f"{json_text(result)}\n".encode())
    if as_json:
        say(json_text(result))
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    ks = sorted(result["pass_at"], key=int)
    for column in ("environment", "prompts", "samples", "reward", *(f"pass@{k}" for k in ks), "truncated", "failed"):
        table.add_column(column, justify="left" if column == "environment" else "right", no_wrap=True)
    rows = list(result["by_env"].items())
    if len(rows) > 1:
        rows.append(("all", result))
    for name, found in rows:
        means = [found["mean"], *(found["pass_at"][k] for k in ks)]
        counts = (f"{found[key]:,}" for key in ("prompts", "samples"))
        table.add_row(name, *counts, *map(_interval, means), f"{found['truncated']:,}", f"{found['failed']:,}")
    table_console().print(table)
    how = "greedy" if not result["temperature"] else f"temperature {result['temperature']:g}"
    failures = "0" if result["failures"] == "zero" else "nothing"
    say(f"{how}; passed from reward {result['pass_reward']:g} on; failed ones count as {failures}", err=True)


def _interval(mean: dict[str, Any]) -> str:
    from hpcrl.runs.views.words import number

    if mean["value"] is None:
        return "-"
    if mean["low"] is None:
        return number(mean["value"])
    return f"{number(mean['value'])} [{number(mean['low'])}, {number(mean['high'])}]"

"""``hpcrl simulate``: a run of a recipe in any size, before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import CalibrationOption, ClusterOption, JsonOption, RecipeArgument, SetOption, TablesOption
from hpcrl.cli.output import json_text, markup, say, table_console
from hpcrl.cli.selection import RunsRootOption

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.recipe import Recipe
    from hpcrl.planning.report import Outlook
    from hpcrl.simulation import Durations, SimulationResult


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(simulate)


def simulate(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    durations: Annotated[
        list[str] | None,
        typer.Option(
            "--durations",
            metavar="FILE|RUN",
            help="Durations: a file (docs/simulation.md), or a run to measure (repeat it for several). "
            "Default: what the planner predicts.",
        ),
    ] = None,
    calibration: CalibrationOption = None,
    tables: TablesOption = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="N,N,…",
            help="Numbers of nodes; roles and batch scale in proportion. Default: the recipe's.",
        ),
    ] = None,
    days: Annotated[float, typer.Option("--days", help="Simulated time.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal results.")] = 0,
    mtbf_h: Annotated[
        float | None,
        typer.Option("--mtbf-h", metavar="HOURS", help="Mean time between failures of one node. Default: no failures."),
    ] = None,
    requeue_s: Annotated[
        float,
        typer.Option("--requeue-s", metavar="SECONDS", help="Time from a node failure until the next attempt starts."),
    ] = 60.0,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            metavar="ENGINES",
            min=0,
            help="Engines to simulate, 0 for all. Default: as many as take about a minute; they stand for all, with a "
            "batch that is smaller in proportion.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Directory for JSON and a plot of each size.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save-durations", metavar="FILE", help="Output file for the durations that were used."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Simulate the asynchronous loop: step times, who waits for whom, staleness, KV, failures, goodput.

    A side waits what a step takes longer than it would if the other side took no time, as in `hpcrl plan`.
    """

    from pydantic import ValidationError

    from hpcrl.cli.planning_inputs import prepare_forecast, say_refusals
    from hpcrl.cli.progress import working
    from hpcrl.errors import UsageError
    from hpcrl.simulation import Failures, make_scenario, save_durations
    from hpcrl.simulation import simulate as simulate_scenario

    prepared = prepare_forecast(recipe, cluster, overrides)
    loaded, site = prepared.recipe.value, prepared.site.value
    if loaded.sft is not None:
        raise UsageError("a supervised run (sft) has a trainer alone: there are no rollouts to simulate")
    say_refusals(prepared)
    with working("predicting durations"):
        outlook, found = _durations(loaded, site, durations or [], calibration, tables, root)
    try:
        failures = Failures(mtbf_h=mtbf_h, requeue_s=requeue_s, spares=sum(loaded.job.spare_nodes.values()))
    except ValidationError:
        raise UsageError(f"--mtbf-h {mtbf_h} and --requeue-s {requeue_s}: both are positive numbers") from None
    if save is not None:
        save_durations(found, save)
    results = []
    for size in _sizes(nodes):
        scenario = make_scenario(
            loaded, site, found, nodes=size, days=days, seed=seed, failures=failures, sample=sample
        )
        if size is not None and scenario.size.nodes != size:
            say(f"{size} nodes: {scenario.size.nodes} are simulated, because replicas are whole", err=True)
        with working(f"simulating {scenario.size.nodes:,} nodes") as told:
            result = simulate_scenario(scenario, told.share)
        results.append(result)
        if output is not None:
            _write(result, output, quiet=as_json)
    if as_json:
        documents = [result.model_dump(mode="json") for result in results]
        say(json_text({"version": 1, "results": documents}, indent=None))
    else:
        _print(results)
        if outlook is not None and nodes is None and results[0].steps:
            _print_beside_plan(outlook, results[0])


def _sizes(text: str | None) -> list[int | None]:
    from hpcrl.errors import UsageError

    if text is None:
        return [None]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--nodes {text}: must be whole numbers with commas between, like 28,280") from None


def _durations(
    recipe: Recipe,
    cluster: ClusterProfile,
    sources: list[str],
    calibration: str | None,
    tables: list[str] | None,
    root: str | None,
) -> tuple[Outlook | None, Durations]:
    """Return the durations from one file, from runs, or from the planner, with the planner's outlook."""
    from hpcrl.cli.planning_inputs import read_calibration
    from hpcrl.errors import UsageError
    from hpcrl.planning.report import find_facts, make_outlook
    from hpcrl.simulation import durations_from_outlook, load_durations

    if not sources:
        rests_on = read_calibration(calibration, cluster, tables)
        outlook = make_outlook(recipe, cluster, rests_on, find_facts(recipe))
        return outlook, durations_from_outlook(outlook, rests_on)
    if calibration is not None or tables:
        option = "--tables" if calibration is None else "--calibration"
        raise UsageError(f"{option} applies to the planner's predictions: leave it out with --durations")
    files = [source for source in sources if Path(source).is_file() or Path(source).suffix in (".yaml", ".yml")]
    if not files:
        from hpcrl.cli.selection import find
        from hpcrl.simulation.inputs.measure import measure

        return None, measure(*(find(source, root) for source in sources))
    if len(sources) > 1:
        raise UsageError(f"--durations: one file or several runs, not {', '.join(sources)}")
    return None, load_durations(Path(files[0]))


def _write(result: SimulationResult, directory: Path, *, quiet: bool) -> None:
    from hpcrl.errors import MissingExtraError
    from hpcrl.simulation.results.picture import draw
    from hpcrl.storage.files import atomic_write

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"simulation-{result.nodes}.json"
    atomic_write(path, result.model_dump_json(indent=2).encode() + b"\n")
    say(path, err=quiet)
    try:
        say(draw(result, path.with_suffix(".png")), err=quiet)
    except MissingExtraError as error:
        # the figures are printed: a missing picture is not a failure
        say(f"no picture: {error}", err=True)


def _print(results: list[SimulationResult]) -> None:
    from rich.table import Table

    from hpcrl.cli.planning_answers import duration_text
    from hpcrl.simulation.results.tables import rows

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("nodes")
    for result in results:
        table.add_column(f"{result.nodes:,}", justify="right")
    for name, values in rows(results):
        table.add_row(name, *values)
    console = table_console()
    first = results[0]
    head = "[bold]{}[/bold]: {} simulated, seed {}"
    console.print(markup(head, first.recipe, duration_text(first.simulated_s), first.seed))
    console.print(f"durations: {first.durations or 'from a file'}\n", highlight=False, soft_wrap=True)
    console.print(table)
    for result in results:
        if result.thinning > 1:
            note = (
                f"{result.nodes:,} nodes: {result.engines_simulated} of {result.engines} engines, with their share of "
                "the rollouts, stand for all; counts are of the sample, shares and rates are those of the whole "
                "(--sample 0 simulates all)"
            )
            console.print(note, highlight=False, soft_wrap=True)
        if result.merged_turns > 1:
            note = f"{result.nodes:,} nodes: {result.merged_turns} turns of a rollout as one (--sample 0: one by one)"
            console.print(note, highlight=False, soft_wrap=True)
        if result.engines_wait is None:
            note = f"{result.nodes:,} nodes: too few steps to measure how long engines wait; raise --days"
            console.print(note, highlight=False, soft_wrap=True)
        for warning in result.warnings:
            say(f"{result.nodes} nodes: {warning}", err=True)


def _print_beside_plan(outlook: Outlook, result: SimulationResult) -> None:
    """Print the corresponding figures of `hpcrl plan` and the reasons for the difference."""
    from rich.table import Table

    from hpcrl.cli.planning_answers import duration_text

    loop = outlook.loop
    if loop is None:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("the same figures", "hpcrl plan", "simulated"):
        table.add_column(column, justify="left" if column == "the same figures" else "right")
    table.add_row("step", duration_text(loop.step_s), duration_text(result.step_s.mean))
    waits = result.phases.get("wait_batch", 0.0)
    table.add_row("trainer waits", f"{loop.trainer_waits:.1%}", f"{waits:.1%}")
    engines = "?" if result.engines_wait is None else f"{result.engines_wait:.1%}"
    table.add_row("engines wait", f"{loop.engines_wait:.1%}", engines)
    table.add_row("staleness", f"{loop.staleness:.1f}", f"{result.staleness.mean:.1f}")
    console = table_console()
    console.print()
    console.print(table)
    console.print(
        "Both rest on the same times. The plan is the mean of a steady state; the simulation also has what chance "
        "does: batches that wait for their longest rollouts, rollouts that come in waves, and the filling of the loop.",
        highlight=False,
    )

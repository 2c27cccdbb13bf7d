"""``hpcrl plan``: what a submit would start, whether it fits, how fast it will be, and what would be better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli.completion import complete_settings
from hpcrl.cli.help import PlainGroup
from hpcrl.cli.options import CalibrationOption, ClusterOption, JsonOption, RecipeArgument, SetOption, TablesOption
from hpcrl.cli.output import json_text, say, table_console
from hpcrl.cli.output_file import output_file
from hpcrl.cli.planning_inputs import prepare_forecast, read_calibration, say_refusals
from hpcrl.cli.planning_layout import print_environment, print_plan
from hpcrl.cli.selection import RunArgument, RunsRootOption

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.recipe import Recipe
    from hpcrl.planning.calibration.calibration_file import Calibration
    from hpcrl.planning.memory.settings import RealPass
    from hpcrl.submit.prepare import PreparedRun

_DEFAULT = "show"


class _DefaultGroup(PlainGroup):
    """``hpcrl plan RECIPE`` means ``hpcrl plan show RECIPE``.

    What is not the name of a command is a recipe; a recipe file called like one is given as ``./diff``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultGroup,
    no_args_is_help=True,
    help="Plan a run: does it fit, how long is a step, what limits it, what would be faster. Changes nothing.",
)


def register(parent: typer.Typer) -> None:
    """Add the command group."""
    parent.add_typer(app, name="plan")


@app.command(_DEFAULT)
def show(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=2, help="Use the best split of this number of nodes, not the recipe's.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each number with its formula, its inputs and its source.")
    ] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Show the command of each role.")] = False,
    environment: Annotated[
        bool, typer.Option("--env", help="Show the environment of each role and where each variable comes from.")
    ] = False,
    real_model: Annotated[
        bool,
        typer.Option(
            "--real-model",
            help="Measure the trainer's activations by running the model's code with torch (takes seconds).",
        ),
    ] = False,
    calibration: CalibrationOption = None,
    tables: TablesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the resolved plan and its forecast (`hpcrl plan RECIPE` does the same). Changes nothing.

    Exit code: 0 it fits, 3 it does not, 4 unknown: the model's sizes are not known, or the profile lacks a
    number. Whether `hpcrl submit` would start it stands in `starts`, with the exit code of that in --json; Slurm is
    asked where nothing else is missing.
    """
    import json

    from hpcrl.cli.planning_answers import print_answers, print_verdict, starts_document
    from hpcrl.cli.planning_tables import print_explanation, print_outlook
    from hpcrl.cli.progress import working
    from hpcrl.config.rules.table import unstartable
    from hpcrl.planning.documents import outlook_document
    from hpcrl.planning.report import find_facts, make_outlook
    from hpcrl.planning.search.recipe import better_document, better_split
    from hpcrl.planning.spare_worth import spare_worth
    from hpcrl.planning.verdict import judge
    from hpcrl.submit.prepare import try_programs
    from hpcrl.submit.start import with_admission

    prepared = prepare_forecast(recipe, cluster, overrides)
    site = prepared.site
    measured = read_calibration(calibration, site.value, tables)
    if nodes is not None:
        prepared = _best_split(prepared, measured, nodes)
    wanted, resolved = prepared.recipe.value, prepared.outlined()
    facts = find_facts(wanted)
    with working("computing memory and times") as told:
        real = _measured(wanted, site.value) if real_model else None
        outlook = make_outlook(wanted, site.value, measured, facts, real)
        verdict = judge(outlook, facts)
        told.share(0.2, "computing ranges")
        _ = outlook.ranges
        told.share(0.6, "comparing other splits of the nodes")
        better = better_split(outlook, measured) if verdict.fits else None
    blocked = unstartable(wanted, site.value)
    with working("checking whether it would start"):
        prepared = with_admission(try_programs(prepared))
    if as_json:
        parts = {"verdict": verdict.document(), "unstartable": blocked, "better": better_document(better)}
        worth = spare_worth(resolved, site.value)
        parts |= {"starts": starts_document(prepared), "spares": None if worth is None else worth.document()}
        document = {**json.loads(resolved.model_dump_json()), "forecast": {**outlook_document(outlook), **parts}}
        say(json_text(document))
        raise typer.Exit(verdict.exit_code)
    console = table_console()
    print_verdict(console, verdict, outlook)
    print_answers(console, verdict, outlook, prepared, blocked, better)
    print_plan(resolved, site, commands=commands)
    print_outlook(console, outlook)
    if real is not None:
        console.print(str(real), highlight=False, soft_wrap=True)
    if explain:
        print_explanation(console, outlook, measured)
    if environment:
        print_environment(wanted, prepared.profile, resolved)
    raise typer.Exit(verdict.exit_code)


def _measured(recipe: Recipe, cluster: ClusterProfile) -> RealPass:
    from hpcrl.planning.memory.real_model import measure_pass

    return measure_pass(recipe, cluster)


def _best_split(prepared: PreparedRun, calibration: Calibration, nodes: int) -> PreparedRun:
    """Return the run with the best split of this number of nodes."""
    from dataclasses import replace

    from hpcrl.errors import DoesNotFitError
    from hpcrl.planning.search.recipe import node_range, run_search
    from hpcrl.planning.times.from_recipe import with_layout
    from hpcrl.submit.prepare import examine

    loaded, site = prepared.recipe, prepared.site
    found = run_search(loaded.value, site.value, calibration, node_range(str(nodes)))
    if not found.candidates:
        raise DoesNotFitError(f"no split of {nodes} nodes fits\n    {found.why_not}")
    split = with_layout(loaded.value, found.candidates[0].layout)
    return examine(replace(loaded, value=split), site, prepared.place)


@app.command()
def search(
    recipe: RecipeArgument,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="N or A..B",
            help="Numbers of nodes to look at, for example 20..40. Default: from three quarters of the recipe's nodes "
            "to a quarter more, limited by the profile's nodes.",
        ),
    ] = None,
    cluster: ClusterOption = "local",
    overrides: SetOption = None,
    picture: Annotated[str | None, typer.Option("--picture", metavar="FILE", help="Write an SVG.")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Show all layouts that were found, not only the marked ones."),
    ] = False,
    calibration: CalibrationOption = None,
    tables: TablesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best splits of nodes among trainer and engines, and the best layouts for each. Changes nothing.

    Shown are the layout with the fewest GPU-hours a step, the knee (from which on more nodes shorten a step little),
    the fastest, the fastest of the recipe's own number of nodes (`same nodes`), and the recipe's own. Below stands for
    each what changes the recipe to it.
    """
    from pathlib import Path

    from hpcrl.cli.planning_tables import print_candidates, print_settings
    from hpcrl.cli.progress import working
    from hpcrl.errors import DoesNotFitError
    from hpcrl.planning.search.picture import search_svg
    from hpcrl.planning.search.recipe import default_range, node_range, run_search, search_document
    from hpcrl.planning.search.splits import pareto
    from hpcrl.storage.files import atomic_write

    prepared = prepare_forecast(recipe, cluster, overrides)
    say_refusals(prepared)
    loaded, site = prepared.recipe, prepared.site
    wanted = default_range(loaded.value, site.value) if nodes is None else node_range(nodes)
    measured = read_calibration(calibration, site.value, tables)
    with working(f"comparing splits of {wanted[0]} to {wanted[-1]} nodes") as told:
        found = run_search(loaded.value, site.value, measured, wanted, told.share)
    if as_json:
        say(json_text(search_document(found, loaded.value)))
    else:
        console = table_console()
        best, marks = pareto(found.candidates), found.marks
        names = {id(candidate): mark for mark, candidate in marks}
        rows = [*marks]
        if everything:
            rows = [(names.get(id(c), "best" if c in best else ""), c) for c in found.candidates]
        if found.own is not None:
            rows.append(("recipe, does not fit" if found.own_short else "recipe", found.own))
        if rows:
            print_candidates(console, rows)
        if not everything and len(found.candidates) > len(marks):
            left = f"{len(found.candidates)} layouts were found, {len(best)} are best in nodes or time"
            console.print(f"{left}: --all shows them", highlight=False, soft_wrap=True)
        print_settings(console, loaded.value, marks, ["hpcrl", "plan", recipe, "-c", cluster], overrides or ())
        for note in found.notes:
            console.print(note, highlight=False, soft_wrap=True)
    if not found.candidates:
        raise DoesNotFitError(f"nothing fits\n    {found.why_not}")
    if picture is not None:
        title = f"{loaded.value.name} on {site.value.name}"
        atomic_write(Path(picture), search_svg(found.candidates, title, found.own).encode())
        say(f"wrote {picture}", err=True)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Recipe, or a run.")],
    second: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Recipe, or a run; with --set, A itself by default.")
    ] = None,
    cluster: ClusterOption = "local",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a value of the second recipe: trainer.steps=10. Repeatable.",
            autocompletion=complete_settings,
        ),
    ] = None,
    calibration: CalibrationOption = None,
    tables: TablesOption = None,
    root: RunsRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two recipes or runs, field by field, and what that does to times. Changes nothing.

    `hpcrl plan diff A --set KEY=VALUE` compares a recipe, or a run, with itself changed.

    Exit code: 0 both fit, or that is unknown; 3 one of them does not fit, in memory or in nodes, as of `hpcrl plan`.
    """

    from hpcrl.cli.planning_diff import Side, compare, print_difference
    from hpcrl.cli.progress import working
    from hpcrl.errors import ExitCode, UsageError

    if second is None and not overrides:
        raise UsageError(
            f"there is nothing to compare {first} with\n    hint: name another recipe or run, or --set KEY=VALUE"
        )
    changed = Side(second or first, tuple(overrides or ()))
    with working("computing both forecasts"):
        found = compare(Side(first), changed, cluster, root, lambda site: read_calibration(calibration, site, tables))
    if as_json:
        say(json_text(found.document()))
    else:
        print_difference(table_console(), found)
    if found.first.short or found.second.short:
        raise typer.Exit(ExitCode.DOES_NOT_FIT)


@app.command()
def calibrate(
    run: RunArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=output_file, help="Output file; standard output by default."
        ),
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Make a calibration file from what a run measured: step seconds, tokens, engine rates, lengths of rollouts.

    `hpcrl plan --calibration` and `hpcrl simulate --durations` take it.
    """
    from pathlib import Path

    from hpcrl.cli.selection import find
    from hpcrl.errors import UsageError
    from hpcrl.planning.fit_calibration import calibrate as fit
    from hpcrl.planning.fit_calibration import calibration_yaml
    from hpcrl.planning.report import find_facts
    from hpcrl.simulation.inputs.durations import durations_document
    from hpcrl.simulation.inputs.measure import measure
    from hpcrl.storage.files import atomic_write

    found = find(run, root)
    facts = find_facts(found.recipe())
    fitted = fit(found, None if isinstance(facts, str) else facts)
    try:
        fitted = fitted.model_copy(update={"durations": durations_document(measure(found))})
    except UsageError as error:
        say(f"the file is only for `hpcrl plan`, not for `hpcrl simulate`: {error}", err=True)
    text = calibration_yaml(fitted)
    if output is None:
        say(text, nl=False)
    else:
        atomic_write(Path(output), text.encode())
        say(f"wrote {output}", err=True)


@app.command()
def profile(
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", callback=output_file, help="Output file of the measured times."),
    ],
    cluster: ClusterOption = "local",
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME|DIR", help="Measure this model's shapes. Default: a grid.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="What to measure.")] = "cuda",
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes that measure collectives; 1 measures none.")
    ] = 2,
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, max=60, help="Maximum duration.")] = 5.0,
    timed: Annotated[str | None, typer.Option("--python", metavar="PATH", help="Interpreter with torch.")] = None,
) -> None:
    """Measure kernels on this machine: matrix products, attention, collectives, by shape. Takes minutes.

    Run it on one node of the site, with all of its GPUs free. What it writes is given to `--tables` or named in
    `paths.tables` of the cluster profile.
    """
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.config.load import load_cluster
    from hpcrl.planning.profile_tables import measure_kernels, table_yaml
    from hpcrl.storage.files import atomic_write

    site = load_cluster(cluster).value
    with working(f"measuring kernels on {device}, for {minutes:g} min at most"):
        found, left_out = measure_kernels(site, model, device=device, ranks=ranks, limit_s=60 * minutes, python=timed)
    atomic_write(Path(output), table_yaml(found).encode())
    for what in left_out:
        say(f"left out: {what}", err=True)
    count = sum(len(kind) for kind in (found.gemm, found.grouped_gemm, found.attention, found.collectives))
    say(f"wrote {output}: {count} measured times on {found.device}", err=True)

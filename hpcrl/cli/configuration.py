"""``hpcrl recipe`` and ``hpcrl cluster``: list, check, show, schema, migrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli.completion import complete_clusters
from hpcrl.cli.options import ClusterOption, JsonOption, RecipeArgument, SetOption
from hpcrl.cli.output import fits, say, table_console
from hpcrl.cli.output_file import output_file

if TYPE_CHECKING:
    from hpcrl.config.earlier import FileKind
    from hpcrl.config.load import Loaded

recipe_app = typer.Typer(help="Recipes: what to train.", no_args_is_help=True)
cluster_app = typer.Typer(help="Cluster profiles: where to train.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command groups."""
    app.add_typer(recipe_app, name="recipe")
    app.add_typer(cluster_app, name="cluster")


@recipe_app.command("ls")
def recipe_list(as_json: JsonOption = False) -> None:
    """List the recipes that come with hpcrl."""
    from hpcrl.config.load import load_recipe
    from hpcrl.config.resources import list_recipes

    _print_listing(
        [
            {"name": name, "description": load_recipe(str(path)).value.description, "path": str(path)}
            for name, path in list_recipes().items()
        ],
        as_json,
    )


@recipe_app.command("check")
def recipe_check(recipe: RecipeArgument, cluster: ClusterOption = "local", overrides: SetOption = None) -> None:
    """Check all that `hpcrl submit` checks: values, rules, the model, interpreters and packages, your environments.

    Environments of your own are imported and made, each in a process of its own, as the orchestrator would. A start
    model that `hpcrl warmup` has yet to make is not a mistake.

    Exit code: 0 a submit would start it, or will once the start model is made; 2 it would not, with every reason.
    """
    import os

    from hpcrl.cli.progress import working
    from hpcrl.config.recipe import HostedEnv
    from hpcrl.config.rules.table import RULES
    from hpcrl.submit.prepare import prepare

    with working("checking whether it would start"):
        prepared = prepare(recipe, cluster, overrides or (), environ=os.environ, cwd=Path.cwd())
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    prepared.refuse(allow_unmade=True)
    loaded, unmade = prepared.recipe, prepared.unmade
    own = [env for env in loaded.value.environments if isinstance(env, HostedEnv) and env.try_before_submit]
    tried = own and not any(note.startswith("environments were not tried") for note in prepared.notes)
    made = f", {len(own)} of your environments made" if tried else ""
    if unmade is not None:
        say(f"note: {unmade.what}\n    hint: {unmade.hint}", err=True)
        made += "; its start model does not exist yet"
    say(f"{loaded.source}: good on {prepared.site.value.name} ({len(RULES)} rules checked{made})")


@recipe_app.command("show")
def recipe_show(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Show every value of a recipe and where it comes from.

    For the recipe.yaml in a run directory, the source of each value is that at the submit.
    """
    import os

    from hpcrl.config.joined import with_environment
    from hpcrl.config.load import load_recipe

    # like on a site with Slurm
    loaded = with_environment(load_recipe(recipe, overrides or ()), os.environ)
    _print_resolved(_with_provenance(loaded), as_json)


def _with_provenance(loaded: Loaded[Any]) -> Loaded[Any]:
    """Add to a recipe that a run was submitted with where its values come from, the run that it began with included."""
    import dataclasses

    from hpcrl.errors import RunDirError
    from hpcrl.runs.record import RunRecord
    from hpcrl.runs.rundir import RunDir

    try:
        record = RunRecord.read(RunDir(loaded.source.resolve().parent))
    except RunDirError:
        return loaded
    origins = dict(loaded.origins)
    for key, origin in record.provenance.items():
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if origins.get(path, "") != "--set":
            origins[path] = origin
    return dataclasses.replace(loaded, origins=origins)


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    import json

    from hpcrl.config.recipe import Recipe

    schema = Recipe.model_json_schema()
    # the loader takes these keys before the model sees it
    schema["properties"]["schema"] = {"type": "integer", "description": "Form of the file (`hpcrl recipe migrate`)."}
    schema["properties"]["extends"] = {"type": "string", "description": "Path or name of a recipe to start from."}
    say(json.dumps(schema, indent=2))


_FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="File to change.", exists=True, dir_okay=False)]
_WriteOption = Annotated[bool, typer.Option("--write", help="Change the file; without it, only show the changes.")]


@recipe_app.command("migrate")
def recipe_migrate(file: _FileArgument, write: _WriteOption = False) -> None:
    """Bring a recipe of an earlier version of hpcrl into the current form; comments and order stay.

    Migrate a file that it extends separately. `schema` at the top of a recipe is the number of its form.

    Exit code: 0 it has the current form, or its changes are shown; 2 you must change a setting yourself.
    """
    _migrate(file, "recipe", write)


@recipe_app.command("import")
def recipe_import(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="TOML of prime-rl, YAML of verl or NeMo-RL, or a script of slime, miles or verl.",
            exists=True,
            dir_okay=False,
        ),
    ],
    system: Annotated[
        str | None, typer.Option("--from", metavar="SYSTEM", help="prime-rl, verl, nemo-rl or slime; found by default.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=output_file, help="File of the recipe; without it, only show."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a recipe of another system's settings, and say for each of them what became of it, and why.

    Nothing of the file is executed. The recipe begins with a comment that lists what did not carry over.

    Exit code: 0 the recipe fulfils all rules; 2 you must add something to it, which is listed.
    """
    from hpcrl.cli.recipe_import import show_import

    show_import(file, system, output, as_json=as_json)


@cluster_app.command("migrate")
def cluster_migrate(file: _FileArgument, write: _WriteOption = False) -> None:
    """Bring a cluster profile of an earlier version of hpcrl into the current form; comments and order stay.

    Exit code: 0 it has the current form, or its changes are shown; 2 a person has to change a setting.
    """
    _migrate(file, "cluster profile", write)


def _migrate(file: Path, kind: FileKind, write: bool) -> None:
    import difflib

    from hpcrl.config.migrate import migrated_text
    from hpcrl.storage.files import atomic_write

    before, after = migrated_text(file, kind)
    if before == after:
        say(f"{file} has the current form")
        return
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    say("\n".join(lines))
    if write:
        mode = file.stat().st_mode & 0o777
        atomic_write(file, after.encode())
        file.chmod(mode)
        say(f"changed {file}", err=True)
    else:
        say("nothing was changed; --write changes the file", err=True)


@cluster_app.command("ls")
def cluster_list(as_json: JsonOption = False) -> None:
    """List cluster profiles: of the user, of the site, of the package, of this directory."""
    from hpcrl.config.load import load_cluster
    from hpcrl.config.resources import list_clusters
    from hpcrl.errors import ConfigError

    rows = []
    for name, path in list_clusters().items():
        try:
            description = load_cluster(str(path)).value.description
        except ConfigError:
            # a profile that is being written must not hide the others
            description = f"(not valid: hpcrl cluster check {name})"
        rows.append({"name": name, "description": description, "path": str(path)})
    _print_listing(rows, as_json)


@cluster_app.command("show")
def cluster_show(
    cluster: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Cluster profile: a name or a file.", autocompletion=complete_clusters),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show every value of a cluster profile and where it comes from."""
    from hpcrl.config.load import load_cluster

    _print_resolved(load_cluster(cluster), as_json)


def _print_listing(rows: list[dict[str, str]], as_json: bool) -> None:
    import json

    from rich.table import Table

    if as_json:
        say(json.dumps(rows, indent=2))
        return
    console = table_console()

    def table(*columns: str) -> Table:
        made = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            made.add_column(column, no_wrap=column != "description")
        for row in rows:
            made.add_row(*(row[column] for column in columns))
        return made

    whole = table("name", "description", "path")
    # a path that wraps cannot be copied
    if fits(console, whole):
        console.print(whole)
    else:
        console.print(table("name", "description"))
        say("a wider terminal shows their files, too, and so does --json", err=True)


def _print_resolved(loaded: Loaded[Any], as_json: bool) -> None:
    import json

    from rich.table import Table
    from rich.text import Text

    from hpcrl.config.load import leaves

    rows = [(".".join(str(part) for part in path), value, loaded.origin(path)) for path, value in leaves(loaded.value)]
    if as_json:
        say(json.dumps([{"key": k, "value": v, "origin": o} for k, v, o in rows], indent=2))
        return
    console = table_console()
    # a file's name replaces its path only where it is unique
    files = {origin.rpartition(":")[0] for _, _, origin in rows}
    names = [file.rpartition("/")[2] for file in files]

    def table(*, short: bool) -> Table:
        made = Table(box=None, header_style="bold", pad_edge=False)
        # a key is copied to --set: it must not be broken over lines
        made.add_column("key", no_wrap=True)
        for column in ("value", "origin"):
            made.add_column(column, overflow="fold")
        for key, value, origin in rows:
            style = "dim" if origin == "default" else ""
            name = origin.rpartition("/")[2]
            where = name if short and names.count(name.rpartition(":")[0]) == 1 else origin
            made.add_row(key, Text(json.dumps(value), style=style), Text(where, style=style))
        return made

    whole = table(short=False)
    console.print(whole if fits(console, whole) else table(short=True))

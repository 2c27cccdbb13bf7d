"""Screen of ``hpcrl recipe import``: the fate of each setting, the recipe, and what is missing."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, cast, get_args

import typer

from hpcrl.cli.output import json_text, say, table_console
from hpcrl.config.foreign.foreign_settings import ForeignSetting, Outcome
from hpcrl.config.foreign.importing import ImportedRecipe, System, import_recipe
from hpcrl.config.load import load_recipe
from hpcrl.config.secret_values import is_secret_name
from hpcrl.errors import ConfigError, ExitCode, UsageError
from hpcrl.storage.files import atomic_write

_WIDTH = 40
"""Maximum characters of a value on the screen."""


def show_import(file: Path, system: str | None, output: Path | None, *, as_json: bool) -> None:
    """Print what a foreign file becomes, and write the recipe where ``output`` names a file.

    Raises
    ------
    UsageError
        The system is not known, the file cannot be read, or ``output`` exists.
    typer.Exit
        The recipe lacks something.
    """
    if system is not None and system not in get_args(System):
        raise UsageError(f"--from {system} is not a known system\n    hint: one of {', '.join(get_args(System))}")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists\n    hint: name another file, or remove it")
    name = output.stem if output is not None else None
    made = import_recipe(file, cast("System | None", system), name=name)
    text = made.text(file.name)
    problems = _problems(text, made.tree["name"])
    if output is not None:
        atomic_write(output, text.encode())
    if as_json:
        rows = [
            {"key": each.key, "value": _shown(each), "outcome": each.outcome, "target": each.target, "note": each.note}
            for each in made.settings
        ]
        say(json_text({"system": made.system, "recipe": made.tree, "settings": rows, "to_do": problems}))
    else:
        _print(made, text, problems, output)
    if problems:
        raise typer.Exit(ExitCode.USAGE)


def _shown(setting: ForeignSetting) -> Any:
    """Return the value of a setting for people: some systems take keys of services in their files."""
    name = setting.key.rpartition(".")[2]
    secret = is_secret_name(name, likely=False) or re.search(r"(wandb|swanlab)[-_](api[-_])?key$", name)
    return "(a secret)" if secret and setting.value not in (None, "", False) else setting.value


def _problems(text: str, name: str) -> list[str]:
    """Return what keeps the recipe from being loaded, a sentence each."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_recipe(str(path))
        except ConfigError as error:
            return [f"{each.key}: {each.what}" + (f" ({each.hint})" if each.hint else "") for each in error.findings]
    return []


def _print(made: ImportedRecipe, text: str, problems: list[str], output: Path | None) -> None:
    from rich.table import Table

    table = Table("setting", "value", "becomes", "note", box=None, pad_edge=False)
    for each in made.settings:
        value = str(_shown(each))
        shown = value if len(value) <= _WIDTH else f"{value[:_WIDTH]}…"
        table.add_row(each.key, shown, each.target or str(each.outcome), each.note)
    table_console().print(table, soft_wrap=True)
    counts = {outcome: sum(each.outcome is outcome for each in made.settings) for outcome in Outcome}
    say("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) + f" (from {made.system})")
    if output is None:
        say(f"\n{text}", nl=False)
    else:
        say(f"wrote {output}; hpcrl recipe check {output} looks at the rest")
    for problem in problems:
        say(f"to do: {problem}", err=True)

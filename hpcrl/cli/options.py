"""Arguments and options that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from hpcrl.cli.completion import complete_clusters, complete_recipes, complete_settings
from hpcrl.cli.output import say

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Recipe file, or the name of a packaged recipe.", autocompletion=complete_recipes
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="NAME",
        help="Cluster profile: a name or a file.",
        autocompletion=complete_clusters,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the recipe: trainer.steps=10. Repeatable.",
        autocompletion=complete_settings,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="WORD", help="Word by which the run is found: hpcrl ls --tag WORD. Repeatable."),
]
TagFilterOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="WORD", help="Only runs with this tag, such as the name of a sweep. Repeatable."),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="File of measured efficiencies and workloads (`hpcrl plan calibrate`), in place of the built-in ones.",
    ),
]

TablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tables",
        metavar="FILE",
        help="File of kernel times (`hpcrl plan profile`), in addition to those of the profile. Repeatable.",
    ),
]


def _number_behind(prefix: str, what: str) -> Callable[[str | int], int]:
    """Return a parser of a number, also in the form of a directory's name: ``80``, ``v80``, ``v000080``."""

    def read(word: str | int) -> int:
        found = re.fullmatch(rf"(?:{prefix})?(\d{{1,18}})", str(word))
        if found is None:
            raise typer.BadParameter(f"{word!r} is not a {what}: a whole number, also as {prefix}{80:06d}")
        return int(found[1])

    return read


STEP = _number_behind("step-", "step")
VERSION = _number_behind("v", "version")


def confirm(question: str) -> None:
    """Ask before something is ended or removed.

    Raises
    ------
    UsageError
        The question cannot be asked: there is neither a terminal nor an answer on the standard input.
    typer.Exit
        The answer was no (exit code 1).
    """
    from hpcrl.errors import ExitCode, UsageError

    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise  # Ctrl-C
        say(err=True)
        raise UsageError("there is no terminal to ask on; nothing was changed\n    hint: --yes") from None
    if not agreed:
        say("nothing was changed", err=True)
        raise typer.Exit(ExitCode.FAILED)

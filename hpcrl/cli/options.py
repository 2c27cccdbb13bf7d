"""Arguments and options that several commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hpcrl.cli.completion import complete_clusters, complete_recipes, complete_settings
from hpcrl.cli.help import PlainGroup
from hpcrl.cli.output import say

__all__ = [
    "STEP",
    "VERSION",
    "CalibrationOption",
    "ClusterOption",
    "JsonOption",
    "ListGroup",
    "RecipeArgument",
    "SetOption",
    "TablesOption",
    "confirm",
]


class ListGroup(PlainGroup):
    """Commands of which one is called ``list``, for those who type ``ls``, too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or of its other name."""
        return super().get_command(ctx, "list" if cmd_name == "ls" else cmd_name)


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
        help="Change a value of the recipe: trainer.steps=10. Repeatable.",
        autocompletion=complete_settings,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration", metavar="FILE", help="Efficiencies and workloads (of `hpcrl plan calibrate`) in place of ours."
    ),
]

TablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tables",
        metavar="FILE",
        help="Kernel times of `hpcrl plan profile`, beside those of the profile. Repeatable.",
    ),
]


def _number_behind(prefix: str, what: str) -> Callable[[str | int], int]:
    """Reads a number, also as it stands in the name of a directory: ``80``, ``v80``, ``v000080``."""

    def read(word: str | int) -> int:
        found = re.fullmatch(rf"(?:{prefix})?(\d{{1,18}})", str(word))
        if found is None:
            raise typer.BadParameter(f"{word!r} is no {what}: a whole number, also as {prefix}{80:06d}")
        return int(found[1])

    return read


STEP = _number_behind("step-", "step")
VERSION = _number_behind("v", "version")


def confirm(question: str) -> None:
    """Ask before something is ended or removed.

    Raises
    ------
    UsageError
        There is nobody to ask: no terminal, and no answer on the standard input.
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

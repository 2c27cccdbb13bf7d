"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["CalibrationOption", "ClusterOption", "JsonOption", "RecipeArgument", "SetOption"]

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a packaged recipe.")]
ClusterOption = Annotated[
    str, typer.Option("--cluster", "-c", metavar="NAME", help="Cluster profile: a name or a file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe: trainer.steps=10. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration", metavar="FILE", help="Efficiencies and workloads (of `hpcrl plan calibrate`) in place of ours."
    ),
]

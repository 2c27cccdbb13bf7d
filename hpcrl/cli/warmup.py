"""``hpcrl warmup``: make the small start model of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.options import RecipeArgument, SetOption
from hpcrl.cli.output import say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("warmup")(warmup)


def warmup(
    recipe: RecipeArgument,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Target directory; model.path by default.")
    ] = None,
    overrides: SetOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing model.")] = False,
) -> None:
    """Make the start model of a recipe by a short supervised training on its environments."""
    import os
    import signal
    import subprocess
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    from hpcrl.config.load import load_recipe
    from hpcrl.errors import ExitCode, MissingExtraError, UsageError
    from hpcrl.jobplan import absolute_paths
    from hpcrl.processes.interpreter import module_command
    from hpcrl.storage.files import StagedDirectory

    loaded = load_recipe(recipe, overrides or ())
    if loaded.value.model.warmup is None:
        raise UsageError(f"{loaded.source} has no model.warmup: it uses an existing model")
    resolved = absolute_paths(loaded.value, Path.cwd())
    target = Path(output).resolve() if output is not None else Path(resolved.model.path)
    if target.exists() and not replace:
        raise UsageError(f"{target} exists already\n    hint: use it as it is, or give --replace or --output")
    if find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    # an unusable directory is reported at once, not after the import of torch
    stage = StagedDirectory(target, token=f"tried-{os.getpid()}")
    stage.create()
    stage.discard()
    # a process of its own: the command line never imports torch
    command = module_command(sys.executable, "hpcrl.trainer.warmup.make", "--output", str(target))
    if replace:
        command.append("--replace")
    # Ctrl-C reaches all processes of the terminal: this one ends the other, which then has time to tidy up
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    try:
        process.communicate(resolved.model_dump_json())
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        say(f"interrupted; {target} was not written", err=True)
        raise typer.Exit(ExitCode.CANCELLED) from None
    raise typer.Exit(process.returncode)

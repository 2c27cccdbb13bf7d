"""The Typer application and its entry point."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from copy import copy
from typing import Annotated

import typer

from hpcrl import __version__
from hpcrl.cli import (
    cancel,
    checkpoints,
    configuration,
    devcluster,
    environments,
    evaluation,
    first_run,
    models,
    planning,
    remove,
    render,
    requeue,
    rescoring,
    resume,
    rollouts,
    runs,
    scale,
    sft,
    shell,
    simulate,
    site_environments,
    sites,
    store,
    submit,
    wait,
    warmup,
    weights,
)
from hpcrl.cli.completion import bash_values
from hpcrl.cli.help import make_plain
from hpcrl.cli.output import say
from hpcrl.cli.streams import fill_standard_streams
from hpcrl.errors import ExitCode, HpcrlError, MissingExtraError, refusal
from hpcrl.installing import extra_of

__all__ = ["app", "main"]

app = typer.Typer(
    name="hpcrl",
    help="Asynchronous reinforcement learning of large mixture-of-experts language models on Slurm clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"hpcrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for module in (
    submit,
    sft,
    resume,
    wait,
    cancel,
    scale,
    requeue,
    shell,
    runs,
    remove,
    weights,
    checkpoints,
    rollouts,
    rescoring,
    store,
    planning,
    simulate,
    render,
    configuration,
    environments,
    evaluation,
    sites,
    site_environments,
    first_run,
    models,
    warmup,
    devcluster,
):
    module.register(app)


make_plain(app)


def _of(words: Sequence[str]) -> typer.Typer:
    """The application that has no command but the one that ``words`` begin with, or all where that is none.

    Typer makes all commands before it looks which one is called: as much time as all imports of most commands.
    """
    name = words[0] if words and "_HPCRL_COMPLETE" not in os.environ else ""
    commands = [one for one in app.registered_commands if one.name == name]
    groups = [one for one in app.registered_groups if one.name == name]
    if not commands and not groups:
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def main() -> None:
    """Run the command line; errors for people become one message and a documented exit code."""
    fill_standard_streams()
    values = bash_values(os.environ)
    if values is not None:
        say("\n".join(values))
        return
    # a command imports much and leaves no cycles worth looking for: every look goes through all of it
    gc.set_threshold(100_000)
    try:
        _of(sys.argv[1:])(prog_name="hpcrl")
    except HpcrlError as error:
        say(f"hpcrl: {error}", err=True)
        sys.exit(error.exit_code)
    except ImportError as error:
        if (extra := extra_of(error)) is None:
            raise
        missing = MissingExtraError(extra, error.name or extra)
        say(f"hpcrl: {missing}", err=True)
        sys.exit(missing.exit_code)
    except BrokenPipeError:
        # the reader of our output went away (`hpcrl logs | head`): not our failure
        sys.stderr.close()
        sys.exit(ExitCode.OK)
    except OSError as error:
        if (refused := refusal(error)) is None:
            raise
        if error.filename is None:  # standard output may be what was refused, and would be once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"hpcrl: {refused}", err=True)
        sys.exit(refused.exit_code)

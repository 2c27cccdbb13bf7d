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
    board,
    cancel,
    checkpoints,
    comparing,
    configuration,
    devcluster,
    environments,
    evaluation,
    first_run,
    keeping,
    mcp,
    models,
    notifications,
    planning,
    profiling,
    recipe_new,
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
    sinks,
    site_environments,
    sites,
    store,
    submit,
    swe,
    sweeps,
    tracing,
    wait,
    warmup,
    weights,
)
from hpcrl.cli.completion import bash_values
from hpcrl.cli.extensions import with_extensions
from hpcrl.cli.help import RootGroup, make_plain
from hpcrl.cli.output import say
from hpcrl.cli.streams import fill_standard_streams
from hpcrl.errors import ExitCode, HpcrlError, MissingExtraError, refusal
from hpcrl.installing import extra_of

app = typer.Typer(
    name="hpcrl",
    cls=RootGroup,
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
    sweeps,
    sft,
    resume,
    wait,
    cancel,
    scale,
    requeue,
    shell,
    runs,
    board,
    comparing,
    tracing,
    profiling,
    remove,
    keeping,
    weights,
    checkpoints,
    rollouts,
    rescoring,
    store,
    planning,
    simulate,
    render,
    recipe_new,
    configuration,
    environments,
    evaluation,
    swe,
    sites,
    site_environments,
    first_run,
    models,
    notifications,
    sinks,
    warmup,
    mcp,
    devcluster,
):
    module.register(app)


make_plain(app)


_WITHOUT_COMMANDS = ("--version",)
"""First words with which no command is looked for."""


def _of(words: Sequence[str]) -> typer.Typer:
    """Return the application with only the command that ``words`` begin with, or with all commands where none matches.

    Typer builds all commands before it looks up the one that is called, which takes as long as the imports of most
    commands together.
    """
    completing = "_HPCRL_COMPLETE" in os.environ
    name = words[0] if words and not completing else ""
    commands = [one for one in app.registered_commands if one.name == name]
    groups = [one for one in app.registered_groups if one.name == name]
    if not commands and not groups:
        return app if name in _WITHOUT_COMMANDS else with_extensions(app, [] if completing else words)
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
    # a command imports much and makes few cycles: each collection would traverse all objects
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
        # the reader of the output closed it (`hpcrl logs | head`): not a failure of hpcrl
        sys.stderr.close()
        sys.exit(ExitCode.OK)
    except OSError as error:
        if (refused := refusal(error)) is None:
            raise
        if error.filename is None:  # standard output may be the stream that failed, and would fail once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"hpcrl: {refused}", err=True)
        sys.exit(refused.exit_code)

"""``hpcrl checkpoint``: the joint checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import STEP, JsonOption, confirm
from hpcrl.cli.output import markup, say, table_console
from hpcrl.cli.selection import OptionalRunArgument, RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.views.checkpoints import CheckpointItem

checkpoint_app = typer.Typer(help="Joint checkpoints of a run.", no_args_is_help=True)

AllStepsArgument = Annotated[int | None, typer.Argument(metavar="[STEP]", parser=STEP, help="Step; all by default.")]
NewestStepArgument = Annotated[
    int | None, typer.Argument(metavar="[STEP]", parser=STEP, help="Step; the newest by default.")
]
StepArgument = Annotated[int, typer.Argument(metavar="STEP", parser=STEP, help="Step.")]
SizesOption = Annotated[bool, typer.Option("--sizes", help="Compare sizes of files only; read no data.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(checkpoint_app, name="checkpoint")


@checkpoint_app.command("ls")
def checkpoint_ls(run: OptionalRunArgument = None, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List checkpoints: which were verified, by whom and when. Exit code 1 where one is known to be damaged.

    Sizes are compared, data is not read: hpcrl checkpoint verify does that.
    """
    from hpcrl.runs.views.checkpoints import checkpoint_items, items_document

    found = find(run, root)
    items = checkpoint_items(found)
    _print(found, items, items_document(found, items) if as_json else None)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: RunArgument,
    step: AllStepsArgument = None,
    sizes: SizesOption = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Read every byte and compare with the manifest. Exit code 1 where something is damaged."""
    from hpcrl.runs.views.checkpoints import items_document, verify_checkpoints

    found = find(run, root)
    items = verify_checkpoints(found, step, content=not sizes)
    document = items_document(found, items) if as_json else None
    _print(found, items, document)


@checkpoint_app.command("show")
def checkpoint_show(
    run: RunArgument, step: NewestStepArgument = None, as_json: JsonOption = False, root: RunsRootOption = None
) -> None:
    """Show one checkpoint: who saved it, how long that took, and what a resume from it restores."""
    import json

    from rich.filesize import decimal
    from rich.table import Table

    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.checkpoints import checkpoint_details

    details = checkpoint_details(find(run, root), step)
    if as_json:
        say(json.dumps(details, indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for key in ("step", "policy_version", "path", "attempt", "world_size", "save_s", "blocked_s", "problem"):
            if (value := details.get(key)) not in (None, ""):
                table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        if details["pin"] is not None:
            table.add_row("pin", "{reason} ({by})".format(**details["pin"]))
        for key, value in details.get("orchestrator", {}).items():
            table.add_row(key, str(value))
        table.add_row("size", f"{decimal(details['bytes'])} in {details['files']} files")
        for name, record in details.get("records", {}).items():
            table.add_row(f"  {name}", f"{decimal(record['bytes'])}  {record['xxh3_128']}")
        table_console().print(table)
    if details["problem"]:
        raise typer.Exit(ExitCode.FAILED)


@checkpoint_app.command("pin")
def checkpoint_pin(
    run: RunArgument,
    step: StepArgument,
    reason: Annotated[str, typer.Option("--reason", "-m", metavar="TEXT", help="Reason for keeping it.")],
    root: RunsRootOption = None,
) -> None:
    """Keep a checkpoint: neither the run nor `prune` removes it."""
    import getpass

    from hpcrl.checkpoints import CheckpointLedger
    from hpcrl.checkpoints.pins import pin

    pin(CheckpointLedger(find(run, root).checkpoints_dir), step, reason=reason, by=getpass.getuser())
    say(f"the checkpoint of step {step} is pinned", err=True)


@checkpoint_app.command("unpin")
def checkpoint_unpin(run: RunArgument, step: StepArgument, root: RunsRootOption = None) -> None:
    """Let a pinned checkpoint be removed again."""
    from hpcrl.checkpoints.pins import pins_of

    was = pins_of(find(run, root).checkpoints_dir).remove(step)
    say(f"the checkpoint of step {step} is {'no longer' if was else 'not'} pinned", err=True)


@checkpoint_app.command("prune")
def checkpoint_prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="N", help="Newest ones to keep. Default: the recipe's.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, metavar="N", help="Keep multiples of N steps. Default: the recipe's."),
    ] = None,
    steps: Annotated[
        list[int] | None, typer.Option("--step", metavar="STEP", help="Remove only this step. Repeatable.")
    ] = None,
    sizes: SizesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Remove checkpoints that need not be kept. Pinned ones stay, and at least one that was verified.

    May be called while the run is alive: an entry goes with one rename, and a save never needs an older entry.
    """
    from rich.filesize import decimal

    from hpcrl.checkpoints import CheckpointLedger
    from hpcrl.runs.views.checkpoints import plan_prune

    found = find(run, root)
    config = found.recipe().checkpoint
    doomed = plan_prune(
        found,
        keep_last=config.keep_last if keep_last is None else keep_last,
        keep_every=config.keep_every_steps if keep_every is None else keep_every,
        steps=steps or (),
        content=not sizes,
    )
    for item in doomed:
        say(f"step {item.step}: {decimal(item.bytes)} in {item.path}", err=True)
    if not doomed or dry_run:
        say("nothing was removed" + (" (--dry-run)" if doomed else ": there is nothing to remove"), err=True)
        return
    if not yes:
        confirm(f"remove {len(doomed)} of {found.name}?")
    ledger = CheckpointLedger(found.checkpoints_dir)
    for item in doomed:
        ledger.remove(item.step)
        say(item.step)


@checkpoint_app.command("export")
def checkpoint_export(
    run: RunArgument,
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Target directory; must not exist.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", help="Step; the newest valid checkpoint by default.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: the recipe's."),
    ] = None,
    model_dir: Annotated[
        str | None,
        typer.Option(
            "--model-dir",
            metavar="DIR",
            help="Directory with configuration and tokenizer. Default: the start model of the run.",
        ),
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model directory.

    transformers and vLLM load it, and a new run may begin with it: hpcrl submit ... --set model.path=DIR
    """
    import subprocess
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    from hpcrl.errors import MissingExtraError, UsageError
    from hpcrl.processes.interpreter import module_command

    found = find(run, root)
    target = Path(output).resolve()
    if target.exists():
        raise UsageError(f"{target} exists already\n    hint: another --output")
    for module in ("torch", "safetensors"):
        if find_spec(module) is None:
            raise MissingExtraError("trainer", module)
    # a process of its own: the command line never imports torch
    command = module_command(sys.executable, "hpcrl.trainer.state.export", str(found.path), str(target))
    for option, value in (("--step", step), ("--dtype", dtype), ("--model-dir", model_dir)):
        if value is not None:
            command += [option, str(value)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _print(run: RunDir, items: list[CheckpointItem], document: str | None) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.words import age
    from hpcrl.storage.quarantine import list_asides

    if document is not None:
        say(document)
    elif not items:
        say(f"{run.name} has none", err=True)
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("step", "age", "size", "files", "attempt", "ranks", "saved in", "pin", "state"):
            table.add_column(column, overflow="fold")
        for item in items:
            table.add_row(
                str(item.step),
                "?" if item.age_s is None else age(item.age_s),
                decimal(item.bytes),
                str(item.files),
                "?" if item.attempt is None else str(item.attempt),
                "?" if item.world_size is None else str(item.world_size),
                "?" if item.save_s is None else f"{item.save_s:.2f} s",
                item.pin or "",
                markup("[red]{}[/red]", item.state) if item.problem else item.state,
            )
        table_console().print(table)
    if document is None:
        for aside in list_asides(run.checkpoints_dir, "step-"):
            say(f"put aside until the run has passed it again: step {aside.number} in {aside.path}", err=True)
    if any(item.problem for item in items):
        raise typer.Exit(ExitCode.FAILED)

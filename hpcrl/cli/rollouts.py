"""``hpcrl rollouts``: look at the rollouts of a run, and prove that each was used exactly once."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrl.cli.conversations import print_pieces
from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say, table_console
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import OptionalRunArgument, RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hpcrl.dock.ledger.replay import Held
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.views.rollout_export import RoutedLayout
    from hpcrl.runs.views.rollouts import RolloutItem

rollouts_app = typer.Typer(help="Rollouts of a run.", no_args_is_help=True)


class Order(StrEnum):
    """The column that rows are sorted by."""

    ID = "id"
    REWARD = "reward"
    TOKENS = "tokens"
    STALENESS = "staleness"
    ENDED = "ended"


class Format(StrEnum):
    """The file format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


EnvironmentOption = Annotated[
    str | None, typer.Option("--environment", "-e", metavar="NAME", help="Only those of this environment.")
]
StateOption = Annotated[
    str | None, typer.Option("--state", metavar="STATE", help="Only those that are waiting, trained or dropped.")
]
StepOption = Annotated[int | None, typer.Option("--step", metavar="STEP", min=1, help="Only those of this batch.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(rollouts_app, name="rollouts")


@rollouts_app.command("ls")
def rollouts_ls(
    run: OptionalRunArgument = None,
    environment: EnvironmentOption = None,
    state: StateOption = None,
    step: StepOption = None,
    sort: Annotated[Order, typer.Option("--sort", help="Sort key; the largest last.")] = Order.ID,
    count: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Only the last N rows; 0: all.")] = 30,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """List finished rollouts: reward, length, versions, and what became of each."""
    import msgspec
    from rich.table import Table

    from hpcrl.runs.views.rollouts import choose_rollouts, read_ledger, rollout_items
    from hpcrl.runs.views.words import number

    found = find(run, root)
    items = rollout_items(choose_rollouts(read_ledger(found), environment=environment, state=state, step=step))
    items.sort(key=lambda item: _sort_key(item, sort))
    shown = items[-count:] if count else items
    if as_json:
        say(json_text({"run": found.name, "rollouts": msgspec.to_builtins(shown)}))
        return
    if not shown:
        say("no rollout matches" if state or step or environment else "no rollout has finished yet", err=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("rollout", "environment", "reward", "tokens", "versions", "staleness", "state"):
        right = name in ("reward", "tokens", "staleness")
        table.add_column(name, justify="right" if right else "left", no_wrap=name not in ("environment", "state"))
    for item in shown:
        versions = {item.first_version, item.last_version}
        table.add_row(
            item.id,
            item.environment,
            number(item.reward),
            f"{item.tokens:,}",
            "-".join(map(str, sorted(versions))),
            "" if item.staleness is None else str(item.staleness),
            _said(item),
        )
    table_console().print(table)
    if len(shown) < len(items):
        say(f"the last {len(shown)} of {len(items)} (-n 0: all)", err=True)


def _sort_key(item: RolloutItem, order: Order) -> Any:
    group, _, member = item.id.partition("/")
    own = (int(group), int(member))
    match order:
        case Order.REWARD:
            return -math.inf if item.reward is None else item.reward, own
        case Order.TOKENS:
            return item.tokens, own
        case Order.STALENESS:
            return -1 if item.staleness is None else item.staleness, own
        case Order.ENDED:
            return item.ended_s, own
        case _:
            return own


def _said(item: RolloutItem) -> str:
    match item.state:
        case "trained":
            return f"trained in step {item.step}"
        case "dropped":
            return f"dropped: {item.why}"
        case _:
            return item.state


@rollouts_app.command("show")
def rollouts_show(
    run: RunArgument,
    rollout: Annotated[
        str, typer.Argument(metavar="GROUP/MEMBER", help="Name of a rollout, as `hpcrl rollouts ls` shows it.")
    ],
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show one rollout: its turns with their text, versions and log-probabilities.

    Control tokens, thinking, tool calls and answers of tools are named in the first column.
    Tokens are kept as long as a checkpoint may need them; of older ones there is the text, without its middle.
    """
    from hpcrl.runs.views.rollout_export import export_row, json_pieces
    from hpcrl.runs.views.rollouts import find_rollout, read_ledger

    found = find(run, root)
    held = find_rollout(read_ledger(found), rollout)
    if as_json:
        for piece in json_pieces(export_row(found, held, _decoder(found)), lines=True):
            say(piece, nl=False)
        say()
        return
    _print_rollout(found, held)


def _print_rollout(run: RunDir, held: Held) -> None:
    from rich.table import Table

    from hpcrl.runs.views.rollouts import rollout_details

    details = rollout_details(run, held)
    console = table_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    names = ("id", "environment", "prompt_index", "reward", "parts", "tokens", "sampled_tokens", "branches")
    for name in (*names, "first_version", "last_version", "staleness", "seconds", "state", "step", "why", "problem"):
        plain = name == "branches" and details.get(name) == 1
        if not plain and (value := details.get(name)) not in (None, "", {}):
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    columns = details.get("columns")
    if columns is not None and "routed_experts" in columns:
        table.add_row("routed_experts", _routes_in_words(columns))
    console.print(table)
    if columns is None:
        if text := details.get("text"):
            console.print(f"\n{text}", highlight=False)
        return
    for heading, pieces in _pieces(run, details, columns):
        console.print(f"\n{heading}", highlight=False, style="bold")
        print_pieces(pieces)


def _routes_in_words(columns: dict[str, Any]) -> str:
    tokens, layers, width = columns["routed_experts"].shape
    known = int(columns["routed_present"].sum())
    share = known / max(tokens, 1)
    return f"{width} a token in {layers} layers, known of {known:,} of {tokens:,} tokens ({share:.1%})"


def _decoder(run: RunDir) -> Callable[[list[int]], str] | None:
    """Return what makes text of tokens; None where the tokenizer of the run's model is not here."""
    try:
        from hpcrl.models.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer(Path(run.recipe().model.path))
    except Exception:  # noqa: BLE001 - the tokenizers package raises bare exceptions; tokens are shown without it
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _pieces(
    run: RunDir, details: dict[str, Any], columns: dict[str, Any]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the messages and the sampled texts, turn by turn: a heading, and kinds with their texts."""
    from hpcrl.analysis.spoken_turns import turns_in_pieces
    from hpcrl.dock.sequences import turn_fields, turn_places

    ids = columns["token_ids"].tolist()
    places = turn_places(details["turns"], columns.get("starts"))
    spoken = turns_in_pieces(run, [(ids[at.said : at.sampled], ids[at.sampled : at.end]) for at in places])
    for number, (at, turn, pieces) in enumerate(zip(places, details["turns"], spoken, strict=True), 1):
        said, sampled, wait_s, reply_s = turn[:4]
        part = slice(at.sampled, at.end)
        branch = ""
        if len(places) > 1 and "starts" in columns:
            sequence, shared, declared = turn_fields(turn)[4:]
            marks = [f"branch {sequence + 1}", *(["declared"] if declared else ())]
            branch = f" ({', '.join([*marks, *([f'behind {shared:,} tokens of before'] if shared else ())])})"
        yield f"turn {number}{branch}: said, {said} tokens, after {wait_s:.1f} s", pieces[0]
        versions = sorted(set(columns["versions"][part].tolist()))
        logprob = float(columns["logprobs"][part].mean()) if sampled else 0.0
        about = f"{sampled} tokens in {reply_s:.1f} s, version {'-'.join(map(str, versions))}"
        yield f"turn {number}: sampled, {about}, mean log-probability {logprob:.3f}", pieces[1]


@rollouts_app.command("verify")
def rollouts_verify(
    run: RunArgument,
    ledger_only: Annotated[
        bool, typer.Option("--ledger-only", help="Do not read the tokens of waiting rollouts.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Prove that each finished rollout was trained exactly once, or dropped for a reason, or still waits.

    Exit code 1 where something contradicts that.
    """
    import msgspec

    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.rollouts import verify_rollouts

    found = find(run, root)
    verdict = verify_rollouts(found, content=not ledger_only)
    if as_json:
        say(json_text({"run": found.name, **msgspec.to_builtins(verdict)}))
    else:
        attempts = "1 attempt" if verdict.attempts == 1 else f"{verdict.attempts} attempts"
        say(f"{verdict.finished:,} rollouts finished in {attempts}")
        say(f"  {verdict.trained:>9,}  trained, each in one of {verdict.steps:,} steps")
        if verdict.compared:
            say(f"  {verdict.compared:>9,}  of these steps compared with what the trainer itself recorded")
        for why, number in verdict.dropped.items():
            say(f"  {number:>9,}  dropped: {why}")
        say(f"  {verdict.waiting:>9,}  waiting for a step")
        if verdict.unfinished:
            say(f"  {verdict.unfinished:>9,}  in progress, with {verdict.turns:,} turns saved")
        if verdict.from_disk:
            say(f"  {verdict.from_disk:>9,}  rollouts were read by a rank from the shared filesystem, not from memory")
        for note in verdict.notes:
            say(f"note: {note}")
        for problem in verdict.problems:
            say(f"problem: {problem}")
        if not verdict.problems:
            say("nothing was lost, and nothing trained twice")
    if verdict.problems:
        raise typer.Exit(ExitCode.FAILED)


@rollouts_app.command("export")
def rollouts_export(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", callback=output_file, help="Where to write.")
    ],
    form: Annotated[
        Format | None, typer.Option("--format", help="Format; by default, the file's suffix decides.")
    ] = None,
    environment: EnvironmentOption = None,
    state: StateOption = None,
    step: StepOption = None,
    root: RunsRootOption = None,
) -> None:
    """Write rollouts into a file: JSON lines, or Parquet (with pyarrow).

    Every row has the same columns, each part of a reward one of its own. Tokens are in it where they are still kept.
    """
    from hpcrl.errors import UsageError
    from hpcrl.runs.views.rollout_export import RolloutExport, json_pieces, routed_layout
    from hpcrl.runs.views.rollouts import choose_rollouts, read_ledger
    from hpcrl.storage.files import written_whole

    if form is None:
        form = Format.PARQUET if output.suffix == ".parquet" else Format.JSONL
    if output.exists():
        raise UsageError(f"{output} exists already\n    hint: --output with another name")
    found = find(run, root)
    chosen = choose_rollouts(read_ledger(found), environment=environment, state=state, step=step)
    export = RolloutExport(found, chosen, _decoder(found))
    rows = map(export.row, chosen)
    with written_whole(output) as part:
        if form is Format.JSONL:
            with part.open("x") as stream:
                for row in rows:
                    stream.writelines(json_pieces(row))
                    stream.write("\n")
        else:
            _parquet_writer()(part, rows, routed_layout(found, chosen), export.parts)
    say(f"{len(chosen):,} rollouts in {output}", err=True)


def _parquet_writer() -> Callable[[Path, Iterable[dict[str, Any]], RoutedLayout | None, Sequence[str]], None]:
    from hpcrl.errors import UsageError
    from hpcrl.installing import install_command

    try:
        from hpcrl.runs.views.rollout_parquet import write_parquet
    except ImportError as error:
        hint = f"{install_command('export')}, or --format jsonl"
        raise UsageError(f"writing Parquet needs pyarrow, which is not installed\n    hint: {hint}") from error
    return write_parquet

"""Print forecasts, explanations, searches and differences for ``hpcrl plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcrl.cli.output import as_text, markup
from hpcrl.cli.planning_answers import duration_text, mesh_text, print_lines, range_text, side_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

    from hpcrl.config.recipe import Recipe
    from hpcrl.planning.calibration.calibration_file import Calibration
    from hpcrl.planning.memory.fit import RoleMemory
    from hpcrl.planning.memory.sandbox_memory import SandboxMemory
    from hpcrl.planning.report import Outlook
    from hpcrl.planning.search.splits import Candidate
    from hpcrl.planning.times.terms import Seconds, TimeTable

_BAR = 12
_NARROW = 100
"""Columns under which tables leave out what `--explain` or `--json` has."""
_NARROW_CANDIDATES = 120
"""The same of layouts that a search has found, which are wider."""


def _bar(share: float, console: Console) -> Text:
    whole = _BAR // 2 if console.width < _NARROW else _BAR
    full = round(min(max(share, 0.0), 1.0) * whole)
    return markup("[red]{}[/]{}" if share > 1 else "[green]{}[/]{}", "█" * full, "░" * (whole - full))


def print_outlook(console: Console, outlook: Outlook) -> None:
    """Print times, what binds, cost and warnings."""
    console.print()
    _print_memory(console, outlook)
    if outlook.loop is None:
        return
    _print_roles(console, outlook)
    _print_loop(console, outlook)


def _gib(value: float) -> str:
    return f"{value / (1 << 30):,.1f}" if value >= 1 << 30 else f"{value / (1 << 30):.2g}"


def _print_memory(console: Console, outlook: Outlook) -> None:
    """Print the contents of each kind of memory of each role at its peak."""
    from rich.table import Table

    if outlook.memory is None:
        return
    narrow = console.width < _NARROW
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("memory", "", "GiB of", "GiB", "free", *(() if narrow else ("at",)), "largest"):
        table.add_column(column, justify="right" if column in ("GiB of", "GiB", "free") else "left")
    for place in outlook.memory.places:
        largest = place.ledger.largest
        bar = "" if not place.capacity else _bar(place.needed / place.capacity, console)
        free = "?" if place.headroom is None else _gib(place.headroom) if place.ok else f"-{_gib(-place.headroom)}"
        table.add_row(
            f"{place.role.value} {place.kind}",
            bar,
            _gib(place.needed),
            "?" if place.capacity is None else _gib(place.capacity),
            f"{free} KV" if place.ok and place.kv_takes_rest else free if place.ok else markup("[red]{}[/]", free),
            *(() if narrow else (place.ledger.name,)),
            f"{largest.name} {_gib(largest.value)}",
        )
    console.print(table)
    lines: list[tuple[str, str | Text]] = [
        ("KV cache", _kv_line(place, outlook)) for place in outlook.memory.places if place.kv is not None
    ]
    if outlook.expert_margin is not None:
        lines.append(("experts", str(outlook.expert_margin)))
    if outlook.memory.sandboxes is not None:
        lines.append(("sandboxes", _sandbox_line(outlook.memory.sandboxes, outlook.sandbox_programs)))
    if lines:
        print_lines(console, lines)
    console.print()


def _kv_line(place: RoleMemory, outlook: Outlook) -> str:
    """Return the KV cache of a role in bytes, tokens and sequences.

    The plan's headroom of an engine's GPU is the KV cache beyond the one sequence that must fit, where the size of the
    cache is not fixed.
    """
    assert place.kv is not None
    length = outlook.recipe.engine.max_model_len
    one = place.kv.cache_bytes - (place.headroom or 0.0)
    beside = ""
    if place.kv_takes_rest and place.headroom and one > 0:
        beside = f" ({_gib(one)} for one sequence, {_gib(place.headroom)} left)"
    return (
        f"{place.role.value}: {_gib(place.kv.cache_bytes)} GiB a GPU{beside} hold {place.kv.tokens:,} tokens of a "
        f"rank, {place.kv.sequences:.1f} sequences of {length:,}"
    )


def _sandbox_line(found: SandboxMemory, programs: float | None) -> str | Text:
    """Return the memory and the processors of sandboxes; what may be more than there is stands out."""
    need = f"{found.count:,} at most on {found.node.text}, whose limits add up to {_gib(found.term.value)} GiB"
    has = "" if found.left is None else f"{_gib(max(0, found.left))} GiB are left there"
    memory = markup("{}, " + ("{}" if found.fits else "[yellow]{}[/]"), need, has) if has else as_text(need)
    if programs is None:
        return memory
    cpus = found.node.cpus
    runs = f"programs of about {programs:,.0f} run at a time" + ("" if cpus is None else f" on {cpus} CPUs")
    return memory + "; " + markup("[yellow]{}[/]" if cpus is not None and programs > cpus else "{}", runs)


def _print_roles(console: Console, outlook: Outlook) -> None:
    from rich.table import Table

    loop = outlook.loop
    assert loop is not None
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("role", "nodes", "GPUs", "layout", "its work", "of the step"):
        table.add_column(column, overflow="fold")
    for name, nodes, gpus, text, seconds in _role_rows(outlook):
        share = seconds / loop.step_s
        table.add_row(name, nodes, gpus, text, duration_text(seconds), f"{_bar(share, console)} {share:.0%}")
    console.print(table)


def _role_rows(outlook: Outlook) -> list[tuple[str, str, str, str, float]]:
    loop, layout = outlook.loop, outlook.layout
    assert loop is not None
    if layout is None:
        ranks = f"{outlook.recipe.trainer.ranks} ranks"
        engines = f"{outlook.recipe.engine.replicas} replicas"
        return [("trainer", "-", "-", ranks, loop.trainer_s), ("engine", "-", "-", engines, loop.rollout_s)]
    trainer = layout.trainer
    text = f"FSDP {trainer.ranks}, CP {trainer.context_parallel}, EP {trainer.expert_parallel}, {trainer.compute_dtype}"
    rows = [("trainer", str(trainer.nodes), str(trainer.ranks), text, loop.trainer_s)]
    for name, side in (("prefill", layout.prefill), ("engine" if layout.prefill is None else "decode", layout.decode)):
        if side is None:
            continue
        text = (
            f"{side.replicas} x EP {side.expert_parallel}" if side.expert_parallel > 1 else f"{side.replicas} replicas"
        )
        text += f", TP {side.tensor_parallel}, DP {side.data_parallel}, {side.weight_dtype}"
        seconds = loop.rollout_s
        if name == "prefill" and outlook.forecast is not None:
            seconds = outlook.forecast.prompt_busy_s
        rows.append((name, str(side.all_nodes), str(side.all_ranks), text, seconds))
    return rows


def _print_loop(console: Console, outlook: Outlook) -> None:
    loop = outlook.loop
    assert loop is not None
    durations = loop.served.durations
    holder = "the trainer" if loop.in_flight_limit == "trainer" else loop.in_flight_limit
    lines = [
        (
            "rollouts",
            f"median {duration_text(durations.quantile(0.5))}, 99 % within {duration_text(durations.quantile(0.99))}; "
            f"{loop.in_flight:.0f} in flight ({loop.started_per_s:.4g} a second, "
            f"each {duration_text(durations.mean)} on average), held by {holder}",
        ),
        ("staleness", f"{loop.staleness:.1f} on average, {loop.dropped:.1%} of rollouts too old"),
    ]
    whole = outlook.forecast
    if whole is not None:
        lines.append(("decode", f"{loop.served.batch:.0f} sequences a rank, {_token_text(outlook)} a token"))
        for name, what in (("handoff", "hand-off"), ("checkpoint", "checkpoint"), ("startup", "start-up")):
            table = whole.tables[name]
            beside = sum(term.value or 0.0 for term in table if not term.counts)
            known = outlook.ranges.get(name)
            within = "" if known is None else f", {range_text(known)}"
            text = (
                duration_text(table.seconds)
                + within
                + (f", {duration_text(beside)} more during the next steps" if beside else "")
            )
            if name == "handoff":
                text += _other_ways(whole.tables)
            lines.append((what, text))
        share = whole.share_bytes
        total = ", ".join(f"{value / 1e9:,.0f} GB {key}" for key, value in share.items() if value)
        lines.append(("shared fs", f"{total} a step"))
        hours = whole.layout.gpus * loop.step_s / 3600
        lines.append(("cost", f"{hours:,.1f} GPU-hours a step, {whole.gpu_hours_per_day:,.0f} a day"))
    console.print()
    print_lines(console, lines)
    console.print("Estimates; `--explain` shows the formula and the inputs of each.", highlight=False)


def _token_text(outlook: Outlook) -> str:
    assert outlook.loop is not None
    known = outlook.ranges.get("sampled_token")
    return duration_text(outlook.loop.served.token_s) + ("" if known is None else f" ({range_text(known)})")


_WAYS = {
    "handoff_filesystem": "if every node reads the shared filesystem",
    "handoff_fan_out": "by fan-out",
    "handoff_delta": "as a delta",
}


def _other_ways(tables: Mapping[str, TimeTable]) -> str:
    """Return the durations of the hand-off by other paths."""
    found = [f"{duration_text(tables[name].seconds)} {way}" for name, way in _WAYS.items() if name in tables]
    own = tables["handoff"].name.removeprefix("hand-off ")
    return f" {own}; it would be {', '.join(found)}" if found else f" {own}"


def print_explanation(console: Console, outlook: Outlook, calibration: Calibration) -> None:
    """Print every term with its formula and inputs, all assumptions, and all efficiencies with their sources."""
    from rich.table import Table

    from hpcrl.planning.ledger import explain

    for place in () if outlook.memory is None else outlook.memory.places:
        head = markup("\n[bold]{} {}[/bold] at {}", place.role.value, place.kind, place.ledger.name)
        console.print(head, highlight=False)
        for amount in place.ledger.terms:
            console.print(f"  {explain(amount)}", highlight=False, soft_wrap=True)
    if outlook.memory is not None and outlook.memory.sandboxes is not None:
        found = outlook.memory.sandboxes
        console.print(markup("\n[bold]sandboxes[/bold] on {}, not counted", found.node.text), highlight=False)
        console.print(f"  {explain(found.term)}", highlight=False, soft_wrap=True)
    for key, table in outlook.tables.items():
        head = markup("\n[bold]{}[/bold]: {}", table.name, duration_text(table.seconds))
        console.print(head, highlight=False)
        # a terminal is too narrow for six columns whose last ones are sentences
        wide = not console.is_terminal
        grid = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("term", "time", "range", "rests on", *(("formula", "inputs") if wide else ())):
            grid.add_column(column, overflow="fold")
        for term in table:
            known = outlook.ranges.get(f"{key}/{term.name}")
            within, origin = ("", "") if known is None else (range_text(known), known.origin)
            grid.add_row(term.name, _term_time(term), within, origin, *((term.formula, _inputs(term)) if wide else ()))
        console.print(grid)
        for term in () if wide else table:
            print_lines(console, [(f"  {term.name}", f"{term.formula}; {_inputs(term)}")])
    if outlook.forecast is not None and outlook.forecast.assumptions:
        console.print(markup("\n[bold]Assumptions and sources[/bold]"))
        for assumption in outlook.forecast.assumptions:
            console.print(f"  - {assumption}", highlight=False, soft_wrap=True)
    console.print(markup("\n[bold]Efficiencies and constants[/bold] (--calibration changes them)"))
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "value", "source"):
        grid.add_column(column, overflow="fold")
    for name, entry in [*calibration.efficiencies.items(), *calibration.constants.items()]:
        grid.add_row(name, f"{entry.value:.4g}", entry.source)
    console.print(grid)


def _term_time(term: Seconds) -> str | Text:
    if term.value is None:
        return markup("[red]unknown[/] ({})", term.missing)
    text = duration_text(term.value)
    return text if term.counts else f"({text})"


def _inputs(term: Seconds) -> str:
    def value(item: float | str) -> str:
        if isinstance(item, str):
            return item
        return f"{item:,.0f}" if abs(item) >= 1000 else f"{item:.4g}"

    return ", ".join(f"{name} {value(item)}" for name, item in term.inputs.items())


def print_candidates(console: Console, rows: Sequence[tuple[str, Candidate]]) -> None:
    """Print layouts of a search, each with a mark."""
    from rich.table import Table

    narrow = console.width < _NARROW_CANDIDATES
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "nodes", "trainer", "prefill", "decode", "step", "GPU-hours"):
        # marks and numbers of a layout are never cut: the layout itself wraps
        is_layout = column in ("trainer", "prefill", "decode")
        right = column in ("nodes", "step", "GPU-hours")
        table.add_column(column, justify="right" if right else "left", no_wrap=not is_layout)
    if not narrow:
        for column in ("slower", "trainer waits", "engines wait"):
            table.add_column(column)
    for mark, candidate in rows:
        table.add_row(mark.replace(", ", ",\n") if narrow else mark, *_candidate_row(candidate, narrow))
    console.print(table)
    if narrow and any(" on host" in mesh_text(candidate) for _, candidate in rows):
        console.print("opt., act.: optimizer states, activations on the host", highlight=False)


def print_settings(
    console: Console,
    recipe: Recipe,
    rows: Sequence[tuple[str, Candidate]],
    command: Sequence[str],
    overrides: Sequence[str],
) -> None:
    """Print for each row the command with the settings that make the recipe into it."""
    import shlex

    from hpcrl.planning.search.recipe import settings_of

    for mark, candidate in rows:
        settings = settings_of(recipe, candidate.layout)
        if not settings:
            console.print(f"\n{mark}: the recipe as it is", highlight=False)
            continue
        console.print(f"\n{mark} ({candidate.nodes} nodes):", highlight=False)
        words = [shlex.join(command), *(f"--set {shlex.quote(setting)}" for setting in (*overrides, *settings))]
        # one line each, so that a narrow terminal shows them whole and a shell accepts them when they are copied
        console.print(" \\\n      ".join([f"  {words[0]}", *words[1:]]), highlight=False, markup=False, soft_wrap=True)


def _candidate_row(candidate: Candidate, narrow: bool) -> tuple[Any, ...]:
    layout, loop = candidate.layout, candidate.forecast.loop
    assert loop is not None
    mesh = mesh_text(candidate)
    if narrow:
        mesh = mesh.replace(", ", " ").replace(" on host", "")
    waits = () if narrow else (loop.bound, f"{loop.trainer_waits:.0%}", f"{loop.engines_wait:.0%}")

    def side(shape: Any) -> str:
        return "-" if shape is None else side_text(shape) if narrow else f"{layout.size(shape)} ({side_text(shape)})"

    return (
        str(candidate.nodes),
        f"{layout.size(layout.trainer)} {mesh}" if narrow else f"{layout.size(layout.trainer)} ({mesh})",
        side(layout.prefill),
        side(layout.decode),
        duration_text(candidate.step_s),
        f"{candidate.gpu_hours:.1f}",
        *waits,
    )

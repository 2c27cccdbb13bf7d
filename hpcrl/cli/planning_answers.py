"""First lines of ``hpcrl plan``: whether it fits and can start, duration of a step, bottleneck, better settings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hpcrl.cli.output import as_text, markup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

    from hpcrl.planning.report import Outlook
    from hpcrl.planning.search.splits import Candidate
    from hpcrl.planning.times.ranges import Range
    from hpcrl.planning.verdict import Verdict
    from hpcrl.submit.prepare import PreparedRun

_KNOBS = 4
_CAUSES = 4
_HINT = "    hint: "


def duration_text(seconds: float | None) -> str:
    """Return a duration in seconds, minutes or hours with a sensible number of digits; ``?`` where unknown."""
    if seconds is None:
        return "?"
    scale, unit, digits = _unit(seconds)
    return f"{seconds * scale:{digits}} {unit}"


def range_text(found: Range) -> str:
    """Return a text like ``2.7 to 4.8 min``: both ends in the unit of the longer one."""
    scale, unit, digits = _unit(found.high)
    low, high = (f"{value * scale:{digits}}" for value in (found.low, found.high))
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def _unit(seconds: float) -> tuple[float, str, str]:
    if seconds >= 5400:
        return 1 / 3600, "h", ".1f"
    if seconds >= 90:
        return 1 / 60, "min", ".1f"
    if seconds >= 0.1 or seconds == 0:
        return 1.0, "s", ".1f"
    return 1e3, "ms", ".3g"


def print_verdict(console: Console, verdict: Verdict, outlook: Outlook) -> None:
    """Print whether the plan fits, the settings that would make it fit, and the unknowns."""
    if verdict.fits:
        tightest = f"; tightest: {verdict.tightest}" if verdict.tightest else ""
        console.print(markup("[green]fits[/]{}\n", tightest), highlight=False, soft_wrap=True)
        return
    say = partial(_print_hanging, console)
    knobs = {shortage.place.summary(): shortage.knobs for shortage in outlook.shortages}
    for what in verdict.short:
        say(markup("[bold red]DOES NOT FIT[/] {}", what))
        for knob in knobs.get(what, ())[:_KNOBS]:
            say(f"{_HINT}{knob}")
        if what in knobs and not knobs[what]:
            say("    no single setting known to hpcrl makes it fit")
    for what in verdict.unknown:
        say(markup("[bold red]NOT KNOWN[/] {}", what))
    if verdict.later:
        say(markup("[bold yellow]NOT KNOWN YET[/] {}", verdict.later))
    if verdict.skipped:
        say(markup("[bold yellow]SKIPPED[/] {}", "; ".join(verdict.skipped)))
    console.print()


def print_answers(
    console: Console,
    verdict: Verdict,
    outlook: Outlook,
    prepared: PreparedRun,
    unstartable: Sequence[str],
    better: Candidate | None,
) -> None:
    """Print whether the run can start, the range of a step with its causes, the bottleneck and better settings.

    Parameters
    ----------
    prepared:
        The run as ``hpcrl submit`` would prepare it.
    unstartable:
        Keys of the recipe that are planned and cannot be started by this version.
    """
    lines: list[tuple[str | Text, str | Text]] = [("starts", _starts(verdict, prepared, unstartable))]
    step, loop = outlook.step, outlook.loop
    if loop is None:
        # the verdict above names the numbers that the profile lacks
        because = "see above" if verdict.unknown else outlook.because
        lines.append(("step", f"not known: {because}"))
    else:
        known = "" if step is None else f"{range_text(step)}, expected "
        lines.append(("step", markup("[bold]{}{}[/]", known, duration_text(loop.step_s))))
        lines += [("", text) for text in _causes(step)]
        lines.append(("binds", _binding(outlook)))
        hints = " (hints above)" if any(shortage.knobs for shortage in outlook.shortages) else ""
        lines.append(("better", _better(outlook, better) if verdict.fits else f"make it fit first{hints}"))
    lines += [("not counted", what) for what in outlook.uncounted]
    for warning in () if outlook.forecast is None else outlook.forecast.warnings:
        lines.append((markup("[yellow]warning[/]"), warning))
    print_lines(console, lines)
    console.print()


def _print_hanging(console: Console, text: str | Text) -> None:
    """Print a text with a hanging indent on a terminal; write whole lines into a pipe."""
    from rich.text import Text

    for line in as_text(text).split("\n"):
        indent = len(_HINT) if line.plain.startswith(_HINT) else len(_HINT.removesuffix("hint: "))
        parts = line.wrap(console, max(20, console.width - indent)) if console.is_terminal else [line]
        for number, part in enumerate(parts):
            part.rstrip()
            console.print(Text(" " * indent if number else "") + part, highlight=False, soft_wrap=True)


def print_lines(console: Console, lines: Sequence[tuple[str | Text, str | Text]]) -> None:
    """Print a word and a sentence each; long sentences go on below themselves, and no line ends in blanks."""
    from rich.text import Text

    heads = [as_text(name) for name, _ in lines]
    width = max([9, *map(len, heads)]) + 2
    for head, (_, sentence) in zip(heads, lines, strict=True):
        for number, part in enumerate(as_text(sentence).wrap(console, max(20, console.width - width))):
            part.rstrip()
            begin = head if number == 0 else Text()
            begin.pad_right(width - len(begin))
            console.print(begin + part, highlight=False, soft_wrap=True)


def starts_document(prepared: PreparedRun) -> dict[str, Any]:
    """Give whether ``hpcrl submit`` would start a run as a JSON document."""
    problems = [{"where": f.where, "key": f.key, "what": f.what, "hint": f.hint} for f in prepared.problems]
    return {
        "ok": prepared.starts,
        "exit_code": int(prepared.exit_code),
        "problems": problems,
        "notes": list(prepared.notes),
    }


def _starts(verdict: Verdict, prepared: PreparedRun, unstartable: Sequence[str]) -> str | Text:
    """Say what ``hpcrl submit`` would say, and never more than that."""
    if unstartable:
        sections = dict.fromkeys(".".join(key.split(".")[:2]) for key in unstartable)
        return markup(
            "[bold yellow]no[/]: planned here, but this version cannot start it: {}\n"
            "hint: `--set job.payload=probe` submits the shape of the job",
            ", ".join(sections),
        )
    notes = "".join(f"\nnote: {note}" for note in prepared.notes)
    if prepared.problems:
        first, others = prepared.problems[0], len(prepared.problems) - 1
        what = first.what.replace(prepared.resolved.model.path, prepared.recipe.value.model.path)
        # models and packages are easier to change than nodes or memory
        word = "no" if verdict.fits is False else "not yet"
        text = markup("[bold yellow]{}[/]: hpcrl submit says: {}", word, what)
        if first.hint:
            text.append_text(as_text(f"\nhint: {first.hint}"))
        if others:
            text.append_text(as_text(f"\nand {others} more: hpcrl recipe check"))
        return text.append_text(as_text(notes))
    if verdict.fits is False:
        text = markup("[bold yellow]yes[/]: hpcrl submit starts it, but it does not fit")
        return text.append_text(as_text(notes))
    return f"yes: hpcrl submit starts it{notes}"


def _causes(step: Range | None) -> list[str]:
    """Return the main causes of the range, one line each."""
    if step is None or not step.causes:
        return []
    lines = []
    for cause in step.causes[:_CAUSES]:
        name = cause.name.removeprefix("efficiencies.").removeprefix("constants.").removeprefix("workloads.")
        ends = range_text(type(step)(cause.low, step.mid, cause.high))
        lines.append(f"{name} ({cause.origin}) alone: {ends}")
    left = len(step.causes) - _CAUSES
    if left > 0:
        lines.append(f"and {left} more (--json)")
    return lines


def _binding(outlook: Outlook) -> str:
    """Return the bottlenecks of the plan, in time and in memory."""
    loop = outlook.loop
    assert loop is not None
    text = "time: the trainer" if loop.bound == "trainer" else "time: rollouts"
    if loop.bound == "rollouts":
        text += f" ({loop.in_flight_limit if loop.served.limit == 'in flight' else loop.served.limit})"
    text += f" (trainer waits {loop.trainer_waits:.0%} of a step, engines {loop.engines_wait:.0%})"
    place = outlook.tightest
    if place is not None and place.headroom is not None and place.capacity:
        word = "free" if place.ok else "short"
        text += f"; memory: {place.role.value} {place.kind}, {abs(place.headroom) / place.capacity:.0%} {word}"
    return text


def _better(outlook: Outlook, better: Candidate | None) -> str:
    layout, loop = outlook.layout, outlook.loop
    if layout is None or loop is None:
        return "measure a run: hpcrl plan calibrate RUN"
    split = f"{layout.gpus} GPUs" if layout.shared_node else f"{layout.nodes} nodes"
    if layout.shared_gpus:
        return "there is no other split: trainer and engines have the same GPUs"
    if better is None:
        return f"no other split of {split} that hpcrl compares is faster; `hpcrl plan search` tries others"
    own = better.layout
    takes = "`hpcrl plan search` says how" if layout.shared_node else f"`--nodes {better.nodes}` takes it"
    prefill = "" if own.prefill is None else f", prefill {own.size(own.prefill)} ({side_text(own.prefill)})"
    return (
        f"trainer {own.size(own.trainer)} ({mesh_text(better)}){prefill}, decode {own.size(own.decode)} "
        f"({side_text(own.decode)}): {duration_text(better.step_s)} on the same {split}, "
        f"{1 - better.step_s / loop.step_s:.0%} less ({takes})"
    )


def mesh_text(candidate: Candidate) -> str:
    """Return the degrees of a trainer and its parts on the host."""
    trainer = candidate.layout.trainer
    features = ((trainer.offload_optimizer, "opt. on host"), (trainer.offload_activations, "act. on host"))
    names = [name for on, name in features if on]
    return ", ".join([f"CP {trainer.context_parallel}", f"EP {trainer.expert_parallel}", *names])


def side_text(shape: object) -> str:
    """Return the replicas of an engine and the ranks of each."""
    from hpcrl.planning.times.shapes import EngineShape

    assert isinstance(shape, EngineShape)
    return f"{shape.replicas} x EP {shape.expert_parallel}"

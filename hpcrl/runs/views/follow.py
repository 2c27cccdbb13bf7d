"""Following a run until it has ended: a live screen in a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hpcrl.runs.fleet import Fleet, read_fleet
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.run_progress import Progress, read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.failures import failure_warnings, heldout_words, mean_words, set_words
from hpcrl.runs.views.liveview import ROOMS, render
from hpcrl.runs.views.supervised import is_supervised, step_words
from hpcrl.runs.views.usage import Usage, read_usage
from hpcrl.runs.views.words import duration, number, staleness

_POLL_S = 1.0
_ALL = sys.maxsize


def follow(
    run: RunDir,
    console: Console,
    *,
    on_interrupt: Callable[[int], str] | None = None,
    after_attempt: int = 0,
) -> RunView:
    """Show a run until it has ended; return its last state.

    Parameters
    ----------
    run:
        The run.
    console:
        Console to show it on; a live table if it is a terminal, else lines.
    on_interrupt:
        Called at each Ctrl-C with its number (1, 2 …); returns the message to show. Without it Ctrl-C ends the
        following only (KeyboardInterrupt).
    after_attempt:
        Events of attempts up to this one are not printed again, where lines are written.
    """
    interrupts = 0
    screen = _LiveScreen(console) if console.is_terminal else _LineScreen(console, after_attempt)
    with screen:
        while True:
            try:
                view = observe(run)
                metrics = read_metrics(run)
                fleet = read_fleet(run, view.attempt, view.components)
                screen.show(view, read_progress(run, metrics), metrics, read_usage(run, view), fleet)
                if view.state.ended:
                    return view
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                if on_interrupt is None:
                    raise
                interrupts += 1
                screen.say(on_interrupt(interrupts))


class _LiveScreen:
    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._note = ""
        self._body: RenderableType = ""

    def __enter__(self) -> _LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, note: str) -> None:
        self._note = note

    def show(self, view: RunView, progress: Progress, metrics: list[StepRecord], usage: Usage, fleet: Fleet) -> None:
        note: list[RenderableType] = [Text(self._note, style="yellow")] if self._note else []
        self._body = fitted(self._live.console, view, progress, metrics, usage=usage, fleet=fleet, note=note)
        self._live.update(self._body, refresh=True)

    def lines(self, console: Console) -> list[str]:
        """Return the lines on the screen now, without colours."""
        return screen_lines(console, self._body)


def fitted(
    console: Console,
    view: RunView,
    progress: Progress,
    metrics: list[StepRecord],
    *,
    usage: Usage,
    fleet: Fleet,
    note: Sequence[RenderableType] = (),
) -> RenderableType:
    """Return the live screen of a run, reduced to the size of the console, and a note below it."""
    body: RenderableType = ""
    for room in ROOMS:
        body = Group(render(view, progress, metrics, usage, fleet, room=room, width=console.width), *note)
        # one line is left for the cursor; lines that do not fit would be cut at the bottom, where the engines are
        if len(screen_lines(console, body)) < console.height:
            break
    return body


def screen_lines(console: Console, body: RenderableType) -> list[str]:
    """Return the lines that a console would show, without colours."""
    lines = console.render_lines(body, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


class _LineScreen:
    """Screen for pipes and log files: one line per event."""

    def __init__(self, console: Console, after_attempt: int) -> None:
        self._console = console
        self._state = ""
        self._warnings: list[str] = []
        self._failing: set[str] = set()
        # attempt, then step or version: steps that a later attempt repeats are printed again
        self._step = self._version = self._set_before = (after_attempt, _ALL)
        self._sets: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> _LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, note: str) -> None:
        self._console.print(Text(note), soft_wrap=True)

    def show(self, view: RunView, progress: Progress, metrics: list[StepRecord], usage: Usage, fleet: Fleet) -> None:
        if view.state != self._state:
            self._state = view.state
            reason = f": {view.cause.message}" if view.cause is not None else ""
            self.say(f"{view.name} {view.state}{reason}")
            for line in view.cause.details if view.cause is not None else ():
                self.say(line)
        if view.warnings and not self._warnings:
            self.say(f"warning: {view.warnings[0]}")
        self._warnings = view.warnings
        for environment, warning in failure_warnings(progress.rollouts).items():
            if environment not in self._failing:
                self._failing.add(environment)
                self.say(f"warning: {warning}")
        for record in metrics:
            if (record.attempt, record.step) > self._step:
                self.say(_step_line(record, progress))
                self._step = (record.attempt, record.step)
        for evaluation in progress.evaluations:
            if (evaluation.attempt, evaluation.version) > self._version:
                late = "" if evaluation.due is None else f" (due at {evaluation.due}, which the engines skipped)"
                self.say(f"held-out reward {heldout_words(evaluation)} after step {evaluation.version}{late}")
                self._version = (evaluation.attempt, evaluation.version)
        for name, each in progress.evaluation_sets.items():
            if (each.attempt, each.version) > self._sets.get(name, self._set_before):
                self.say(f"held-out set {name}: {set_words(each)}, after step {each.version}")
                self._sets[name] = (each.attempt, each.version)


def _step_line(record: StepRecord, progress: Progress) -> str:
    seconds = sum(record.phases_s.values())
    waiting = record.phases_s.get("wait_batch", 0.0) / seconds if seconds else 0.0
    left = f"  left {duration(progress.eta_s)}" if record is progress.last and progress.eta_s is not None else ""
    skipped = "  SKIPPED: its gradient was not finite" if record.skipped else ""
    routes = "" if record.routing_mismatch is None else f"  routes {record.routing_mismatch:.1e}"
    if is_supervised(record):
        return (
            f"step {record.step}/{progress.total_steps}  {step_words(record)}"
            f"  {number(record.tokens_per_s, ',.0f')} tokens/s  {seconds:.1f} s{left}{skipped}"
        )
    own = record.mismatch_kl_by_lag.get("0")
    lag = "" if own is None else f" (lag 0 {own:.1e})"
    return (
        f"step {record.step}/{progress.total_steps}  reward {mean_words(record.reward_mean, record.reward_count)}"
        f"  {staleness(record, progress)}  kl {number(record.mismatch_kl, '.1e')}{lag}{routes}"
        f"  {number(record.tokens_per_s, ',.0f')} tokens/s  {seconds:.1f} s (waiting {waiting:.0%}){left}{skipped}"
    )

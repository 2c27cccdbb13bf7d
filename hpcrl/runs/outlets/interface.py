"""Protocols of sinks of metrics and of notifiers (docs/extending.md). Both run in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpcrl.errors import HpcrlError


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run whose metrics a sink is given.

    Attributes
    ----------
    name:
        Name of the run.
    directory:
        Its directory. Sinks may read everything in it, and write into ``sinks/``.
    attempt:
        Number of the attempt, from 1.
    recipe:
        The resolved recipe, as its file has it.
    last_step:
        The last step that the sink was given before, in this attempt or in one before it; 0 at the first start.
    """

    name: str
    directory: Path
    attempt: int
    recipe: Mapping[str, Any]
    last_step: int


class Stored(NamedTuple):
    """Contents of the store of a sink for one run.

    Attributes
    ----------
    step, version:
        The last step (0 where there is none) and the last evaluated version (-1 where there is none).
    """

    step: int
    version: int


class MetricSink(Protocol):
    """Takes the metrics of steps. One instance lives for an attempt, or until one of its methods raises.

    An exception is written into the log of the sink and ends its process, which is started again after a pause. It
    never touches the run. A sink that has a method ``evaluated(version, metrics)`` is given held-out evaluations, too,
    each once and in the order of versions: ``heldout_reward``, ``heldout_count``, ``heldout_failed``,
    ``heldout_by_env/NAME``, ``heldout_parts/NAME``, and ``time_s``.

    A method ``rollouts(step, rows)`` is given rollouts to read, every ``rollouts_every_steps`` of the recipe: rows with
    the columns `hpcrl.runs.outlets.samples.SAMPLE_COLUMNS`. Where it raises, it is called no more, and metrics go on.

    A method ``ended(state, summary)`` is called before ``close()`` where the run ends with the attempt: with
    ``COMPLETED``, ``FAILED`` or ``CANCELLED``, and the numbers of `hpcrl.runs.outlets.run_end.final_summary`. Where
    another attempt follows, ``close()`` alone is called.
    """

    def open(self, run: RunInfo) -> Stored | None:
        """Begin, or continue after ``run.last_step``.

        Returns
        -------
        Stored or None
            What is stored of this run, where the sink can tell: it is given what comes after it. None: what comes
            after ``run.last_step``.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step.

        Steps come in ascending order, each once over all attempts; after a crash of the sink the last one may come
        again. Those that a restart computes again are not given again.

        Parameters
        ----------
        step:
            From 1; equals the policy version that the step makes.
        metrics:
            Finite numbers by name. Names are those of `hpcrl.runs.metrics.StepRecord`, with what is below one behind a
            ``/``: ``reward_mean``, ``reward_by_env/words``, ``phases_s/wait_batch``; and those of
            `hpcrl.runs.outlets.derived`: ``staleness_p90``, ``gpu_hours``, ``fleet/kv_usage/max``.
        """
        ...

    def close(self) -> None:
        """End: the attempt has ended and all of its steps were given."""
        ...


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about a run.

    Attributes
    ----------
    id:
        Id of the fact in all runs: the same in every try.
    event:
        One of `hpcrl.config.outlets.NoticeEvent`, or ``test``.
    name, directory, attempt:
        As in `RunInfo`; 0 where no attempt has begun.
    step:
        The last step on record; 0 where there is none.
    time_s:
        Time of the event in seconds since the epoch.
    title:
        One line.
    why:
        What happened, the evidence or the reason, and the next command, as ``hpcrl why`` has them: three lines.
    """

    id: str
    event: str
    name: str
    directory: Path
    attempt: int
    step: int
    time_s: float
    title: str
    why: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return title and lines as one text."""
        return "\n".join((self.title, *self.why))

    def document(self) -> dict[str, Any]:
        """Return the message for programs, as JSON has it."""
        return {
            "schema": NOTICE_SCHEMA,
            "id": self.id,
            "event": self.event,
            "run": self.name,
            "directory": str(self.directory),
            "attempt": self.attempt,
            "step": self.step,
            "time_s": self.time_s,
            "title": self.title,
            "why": list(self.why),
        }


NOTICE_SCHEMA = "hpcrl.notice/1"


class NotSentError(HpcrlError):
    """The message has certainly not been sent, and another try may succeed.

    Parameters
    ----------
    why:
        Reason, without secrets.
    after_s:
        Minimum pause in seconds until the next try.
    """

    def __init__(self, why: str, *, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class RefusedNoticeError(HpcrlError):
    """The message was refused: another try would be refused, too."""


class UnknownOutcomeError(HpcrlError):
    """The message may have been sent: it is not sent again."""


class Notifier(Protocol):
    """Sends messages to people or programs. One instance lives for one try of one message, in a process of its own."""

    def notify(self, notice: Notice) -> None:
        """Send the message, within ``timeout_s`` of the recipe.

        Raises
        ------
        NotSentError
            It is tried again.
        Exception
            It is given up, as after every other exception. All of this is an event and no more.
        """
        ...

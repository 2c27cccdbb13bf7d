"""The process that tells people about a run: ``python -m hpcrl.runs.outlets.notices.messenger < request.json``.

It reads the files of the run as any reader does, finds facts, and gives them to the notifiers; nothing here is on the
way of a step. The supervisor writes one line with the request, and one with the end of the attempt. Where its end of
the pipe closes without that, the supervisor is gone, and that is a fact, too.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.config.outlets import NotifierConfig
from hpcrl.errors import HpcrlError
from hpcrl.reporting.log_format import start_logging
from hpcrl.reporting.screen_text import visible_line
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.notice_claims import Claims
from hpcrl.runs.outlets.interface import Notice
from hpcrl.runs.outlets.notices.delivery import Delivery
from hpcrl.runs.outlets.notices.run_facts import ENDS, Fact, FactFinder
from hpcrl.runs.outlets.notices.tails import RunTail
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus
from hpcrl.runs.views.short_why import short_why

_log = logging.getLogger(__name__)
_POLL_S = 2.0
"""Pause in seconds between two looks at the files of the run."""
_LOST_S = 30.0
"""Maximum time in seconds for messages after the supervisor is gone."""
_STATUS_S = 3.0
"""Maximum wait in seconds for the status that the supervisor writes at the end."""
_TITLE = 200
"""Maximum characters of a title."""


class MessengerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the supervisor.

    Attributes
    ----------
    notify:
        Fields of `hpcrl.config.outlets.NotifierConfig`, of each notifier.
    """

    run_dir: str
    attempt: int
    notify: list[dict[str, object]]


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the attempt: state, cause, time in seconds for messages, and whether another begins at once."""

    state: str
    cause: str
    limit_s: float
    again: bool = False


class Messenger:
    """Watches one attempt of a run for its notifiers."""

    def __init__(self, run: RunDir, attempt: int, notifiers: list[NotifierConfig]) -> None:
        """Nothing is read yet."""
        self._run, self._attempt = run, attempt
        self._events = EventWriter(run, attempt=attempt, writer="messenger")
        self._tail = RunTail(run)
        self._finder = FactFinder([each.drops_above for each in notifiers if "drops" in each.events])
        self._deliveries = [
            Delivery(each, Claims(run, each.name), attempt=attempt, make=self.notice, emit=self._events.emit)
            for each in notifiers
        ]
        self._since: list[float] = []

    def start(self) -> None:
        """Begin, with the unsent facts of earlier attempts."""
        self._since = [each.start() for each in self._deliveries]
        facts = self._new_facts()
        lost = self._finder.lost(self._attempt - 1, event="requeued", time_s=time.time())
        self._offer(facts)
        if lost is not None:
            for delivery, since_s in zip(self._deliveries, self._since, strict=True):
                if since_s <= self._finder.seen_s(self._attempt - 1):  # it watched that attempt
                    delivery.offer(lost._replace(evidence=f"attempt {self._attempt} has begun"))

    def look(self) -> None:
        """Offer what is new."""
        self._offer(self._new_facts())

    def end(self, end: AttemptEnd) -> None:
        """Offer the end of the attempt and what came before it, and wait for the messages."""
        self.look()
        if end.again:
            self._finder.retried(self._attempt)
        fact = self._finder.end(self._attempt, end.state, end.cause, time.time())
        if fact is not None:
            self._offer([fact])
        self._finish(end.limit_s)

    def lost(self) -> None:
        """Say that the supervisor is gone."""
        self.look()
        fact = self._finder.lost(self._attempt, event="failed", time_s=time.time())
        if fact is not None:
            self._offer([fact])
        self._finish(_LOST_S)

    def notice(self, fact: Fact) -> Notice:
        """Return the message of a fact."""
        if fact.event in ENDS:
            self._await_status()
        # how it ended is what the diagnosis says best; for all else the fact itself is the first line
        end = fact.event in ENDS
        newest = read_newest(self._run)
        step = 0 if newest is None else newest.step
        name = self._run.name
        at = f" at step {step}" if fact.event == "failed" and step else ""
        return Notice(
            id=f"{_run_id(self._run)}.{fact.key}",
            event=fact.event,
            name=name,
            directory=self._run.path,
            attempt=fact.attempt,
            step=step,
            time_s=fact.time_s,
            title=visible_line(f"hpcrl: run {name} {fact.what}{at}", _TITLE),
            why=short_why(
                self._run,
                sentence=fact.evidence if end else f"{name} {fact.what}",
                evidence="" if end else fact.evidence,
            ),
        )

    def _new_facts(self) -> list[Fact]:
        try:
            facts = [fact for event in self._tail.events() for fact in self._finder.take(event)]
            return facts + [fact for counts in self._tail.steps() for fact in self._finder.take_step(counts)]
        except OSError as error:
            _log.warning("the files of the run cannot be read now: %s", error)
            return []

    def _offer(self, facts: list[Fact]) -> None:
        for delivery, since_s in zip(self._deliveries, self._since, strict=True):
            for fact in facts:
                if fact.time_s >= since_s:
                    delivery.offer(fact)

    def _finish(self, limit_s: float) -> None:
        for delivery in self._deliveries:
            delivery.finish(min(limit_s, delivery.config.timeout_s))
        for delivery in self._deliveries:
            delivery.join()
        self._events.close()

    def _await_status(self) -> None:
        """Wait until the state of the end is written, for a moment: the disk may be full."""
        until = time.monotonic() + _STATUS_S
        while time.monotonic() < until:
            status = RunStatus.read(self._run)
            if status is None or status.attempt != self._attempt or status.state.ended:
                return
            if not status.supervisor_alive(time.time()):
                return
            time.sleep(0.05)


def _run_id(run: RunDir) -> str:
    try:
        return RunRecord.read(run).run_id
    except HpcrlError:
        return run.name


def main() -> int:
    """Watch until the end of the attempt."""
    start_logging("%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is the supervisor's affair
    lines = _Lines(sys.stdin.fileno())
    first = lines.read(None)
    if first is None:
        return 1
    request = msgspec.json.decode(first, type=MessengerRequest)
    notifiers = [NotifierConfig.model_validate_json(msgspec.json.encode(each)) for each in request.notify]
    messenger = Messenger(RunDir(Path(request.run_dir)), request.attempt, notifiers)
    messenger.start()
    while (line := lines.read(_POLL_S)) == b"":
        messenger.look()
    if line is None:
        messenger.lost()
    else:
        messenger.end(msgspec.json.decode(line, type=AttemptEnd))
    return 0


class _Lines:
    """Reads lines of a pipe with a timeout."""

    def __init__(self, fd: int) -> None:
        self._fd, self._data = fd, b""

    def read(self, timeout_s: float | None) -> bytes | None:
        """Return the next line; empty after a time in seconds without one, None where the pipe was closed."""
        while b"\n" not in self._data:
            if not select.select([self._fd], [], [], timeout_s)[0]:
                return b""
            piece = os.read(self._fd, 1 << 16)
            if not piece:
                return None
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line


if __name__ == "__main__":
    sys.exit(main())

"""Sends the messages of one notifier, each in a process of its own: tries, pauses, the rate, and what became of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from hpcrl.config.outlets import NotifierConfig
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.notice_claims import Claim, Claims, Outcome
from hpcrl.runs.outlets.interface import Notice
from hpcrl.runs.outlets.notices.run_facts import ENDS, Fact

_log = logging.getLogger(__name__)
_HOUR_S = 3600.0
_PAUSES_S = (2.0, 10.0, 30.0, 60.0)
"""Pauses in seconds between tries; the last one counts for all that follow."""
_OLD_S = 12 * 3600.0
"""Maximum age in seconds of a fact without a message: older ones are not sent."""
_IDLE_S = 3600.0
_KILLED_S = 5.0
"""Maximum wait in seconds for the end of a process that was killed."""


class TryResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the process that tries to send a message (`hpcrl.runs.outlets.notify`)."""

    outcome: Literal["sent", "again", "failed", "unknown"]
    why: str = ""
    after_s: float = 0.0


Send = Callable[[NotifierConfig, Notice, float], TryResult]
"""Tries to send a message within a time in seconds."""


class Delivery:
    """The messages of one notifier, sent by a thread.

    Parameters
    ----------
    claims:
        Files of the notifier.
    make:
        Makes the message of a fact.
    emit:
        Records an event of the run; from the thread.
    send:
        `send_in_process` by default.
    pauses_s:
        Pauses between tries.
    """

    def __init__(
        self,
        config: NotifierConfig,
        claims: Claims,
        *,
        attempt: int,
        make: Callable[[Fact], Notice],
        emit: Callable[..., None],
        send: Send | None = None,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        self.config, self._claims, self._attempt, self._make, self._emit = config, claims, attempt, make, emit
        self._send, self._pauses_s = send or send_in_process, pauses_s
        self._waiting: deque[Fact] = deque()
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._until: float | None = None
        self._sent_s: deque[float] = deque()
        self._held_back = 0
        self._thread = threading.Thread(target=self._run, name=f"notifier {config.name}", daemon=True)

    def start(self) -> float:
        """Begin, with what was done before; what was cut off is recorded. Return `Claims.since_s`."""
        since_s = time.time()
        try:
            since_s = self._claims.since_s()
            for key, claim in self._claims.known().items():
                self._seen.add(key)
                if claim.outcome == "sent":
                    self._sent_s.append(claim.time_s)
                elif not claim.outcome:
                    why = "the process that sent it has ended: the message may have arrived, and is not sent again"
                    self._settle(key, msgspec.structs.replace(claim, outcome="unknown", why=why))
            self._sent_s = deque(sorted(self._sent_s))
        except OSError as error:
            _log.error("files of the notifier %s cannot be read: %s", self.config.name, error)
        self._thread.start()
        return since_s

    def offer(self, fact: Fact) -> None:
        """Queue the message of a fact, if the notifier wants it and it was not sent."""
        wanted = fact.event in self.config.events and fact.threshold in (0.0, self.config.drops_above)
        with self._changed:
            if not wanted or fact.key in self._seen:
                return
            self._seen.add(fact.key)
            # how the run ended does not wait behind anything else
            (self._waiting.appendleft if fact.event in ENDS else self._waiting.append)(fact)
            self._changed.notify()

    def finish(self, limit_s: float) -> None:
        """Send what waits, within a time in seconds for all of it; then end."""
        with self._changed:
            self._until = time.monotonic() + limit_s
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._until is not None:
                        return
                    self._changed.wait(_IDLE_S)
                fact = self._waiting.popleft()
            try:
                self._deliver(fact)
            except Exception:  # noqa: BLE001 - one message must not end those that follow
                _log.exception("the message %s", fact.key)
                self._emit("notify.failed", notifier=self.config.name, notice=fact.key, error="see the log")

    def _deliver(self, fact: Fact) -> None:
        claim = Claim(time_s=time.time(), attempt=self._attempt, event=fact.event, title=fact.what)
        if time.time() - fact.time_s > _OLD_S:
            self._keep(fact.key, msgspec.structs.replace(claim, outcome="old"))
            return
        if fact.event not in ENDS and self._over_rate():
            self._held_back += 1
            self._keep(fact.key, msgspec.structs.replace(claim, outcome="held_back", why="max_per_hour"))
            if self._held_back == 1:
                self._emit("notify.held_back", notifier=self.config.name, max_per_hour=self.config.max_per_hour)
            return
        notice = self._make(fact)
        if self._held_back:
            title = f"{notice.title} ({self._held_back} messages before it were held back by max_per_hour)"
            notice = replace(notice, title=title)
        for number in range(1, self.config.tries + 1):
            claim = msgspec.structs.replace(claim, time_s=time.time(), tries=number)
            if not self._keep(fact.key, claim):
                return  # another process has sent it, or is doing so
            left_s = self._left_s()
            if left_s <= 0.0:
                result = TryResult(outcome="again", why="there was no time left at the end of the attempt")
            else:
                result = self._send(self.config, notice, min(self.config.timeout_s, left_s))
            if result.outcome != "again":
                self._ended(fact.key, msgspec.structs.replace(claim, outcome=result.outcome, why=result.why))
                return
            last = number == self.config.tries
            pause_s = max(self._pauses_s[min(number, len(self._pauses_s)) - 1], result.after_s)
            if last or self._left_s() <= pause_s:
                self._give_up(fact.key, claim, result, last=last)
                return
            self._release(fact.key)
            self._pause(pause_s)

    def _pause(self, pause_s: float) -> None:
        """Wait; an end of the attempt that comes meanwhile shortens that: there may be no other chance."""
        until = time.monotonic() + pause_s
        with self._changed:
            ending = self._until is not None
            while (left_s := until - time.monotonic()) > 0 and (self._until is not None) is ending:
                self._changed.wait(left_s)

    def _give_up(self, key: str, claim: Claim, result: TryResult, *, last: bool) -> None:
        """End the tries: for good, or until the next attempt where there was no time for all of them."""
        if last:
            self._settle(key, msgspec.structs.replace(claim, outcome="failed", why=result.why))
            return
        self._release(key)
        error = f"{result.why}; the next attempt of the run tries again"
        self._emit("notify.failed", notifier=self.config.name, notice=key, error=error, tries=claim.tries)

    def _ended(self, key: str, claim: Claim) -> None:
        self._settle(key, claim)
        if claim.outcome == "sent":
            self._sent_s.append(time.time())
            self._held_back = 0

    def _settle(self, key: str, claim: Claim) -> None:
        """Record what became of a message."""
        self._keep(key, claim)
        details: dict[str, Any] = {"notifier": self.config.name, "notice": key, "tries": claim.tries}
        if claim.outcome == "sent":
            self._emit("notify.sent", **details)
        else:
            log = "sinks/messenger.log"
            self._emit("notify.failed", **details, error=claim.why, log=log, unknown=claim.outcome == "unknown")

    def _keep(self, key: str, claim: Claim) -> bool:
        """Write the file of a fact; False where another process has it. A full disk does not keep a message back."""
        try:
            if claim.outcome and claim.outcome not in _UNTRIED:
                self._claims.settle(key, claim)
                return True
            return self._claims.take(key, claim)
        except OSError as error:
            _log.error("the file of %s cannot be written: %s", key, error)
            return True

    def _release(self, key: str) -> None:
        try:
            self._claims.release(key)
        except OSError as error:
            _log.error("the file of %s cannot be removed: %s", key, error)

    def _left_s(self) -> float:
        return float("inf") if self._until is None else self._until - time.monotonic()

    def _over_rate(self) -> bool:
        while self._sent_s and time.time() - self._sent_s[0] > _HOUR_S:
            self._sent_s.popleft()
        return len(self._sent_s) >= self.config.max_per_hour


_UNTRIED: frozenset[Outcome] = frozenset({"held_back", "old"})
"""Outcomes without a try: their file must not replace that of another process."""


def send_in_process(
    config: NotifierConfig, notice: Notice, limit_s: float, environ: Mapping[str, str] | None = None
) -> TryResult:
    """Try to send a message in a process that is killed after a time in seconds. Its log is our standard error.

    Parameters
    ----------
    environ:
        Its variables; None: those of this process.
    """
    document = {**notice.document(), "notifier": config.model_dump(mode="json")}
    try:
        child = subprocess.Popen(
            module_command(config.python or sys.executable, "hpcrl.runs.outlets.notify"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environ is None else dict(environ),
            process_group=0,
        )
    except OSError as error:
        return TryResult(outcome="again", why=f"{config.python or sys.executable} cannot be started: {error.strerror}")
    try:
        output, _ = child.communicate(msgspec.json.encode(document), timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # what it has started as well
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_S)  # one that hangs in the kernel is left
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):  # what it has not read of the request
                pipe.close()
        return TryResult(outcome="unknown", why=f"it took longer than {limit_s:.3g} s, and was killed")
    try:
        return msgspec.json.decode(output, type=TryResult)
    except msgspec.DecodeError:
        return TryResult(outcome="failed", why=f"its process ended with {child.returncode}")

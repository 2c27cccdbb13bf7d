"""Warnings about messages of a run that were not sent, for ``hpcrl status``."""

from __future__ import annotations

import time

from hpcrl.runs.notice_claims import Claim, read_claims
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir

_WHY = 200
"""Maximum characters of a reason, which a server may have written."""


def notice_warnings(run: RunDir) -> list[str]:
    """Return a sentence for each notifier that could not send messages, or of which it is unknown; the newest reason.

    Notifiers whose newest message was sent have no sentence: they work again.
    """
    by_notifier: dict[str, list[Claim]] = {}
    for notifier, _, claim in read_claims(run):
        if claim.outcome in ("sent", "failed", "unknown"):
            by_notifier.setdefault(notifier, []).append(claim)
    return [_words(run, name, claims) for name, claims in by_notifier.items() if claims[-1].outcome != "sent"]


def _words(run: RunDir, notifier: str, claims: list[Claim]) -> str:
    last = claims[-1]
    unsent = [claim for claim in claims if claim.outcome != "sent"]
    what = "was not sent" if last.outcome == "failed" else "may not have been sent"
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(last.time_s))
    why = " ".join(last.why.split())
    why = why if len(why) <= _WHY else f"{why[:_WHY]}…"
    count = f"; {len(unsent)} of its {len(claims)} messages" if len(unsent) > 1 else ""
    title = last.title or last.event or "a message"
    return f"notifier {notifier}: {title!r} {what} ({clock}): {why}{count} (hpcrl notify ls {reference(run)})"

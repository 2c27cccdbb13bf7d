"""Notes for people about weights that did not go over the fabric."""

from __future__ import annotations

from collections import Counter

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.whole_events import whole_events


def fabric_notes(run: RunDir, attempt: int) -> list[tuple[float, str]]:
    """Return the time of the first failure of each party, in seconds since the epoch, and what happened how often."""
    first: dict[str, tuple[float, str]] = {}
    count: Counter[str] = Counter()
    for kind, default in (("trainer.fabric_failed", "the trainer"), ("engine.fabric_failed", "")):
        for event in whole_events(run, attempt=attempt, kind=kind):
            who = event.data.get("engine", default)
            count[who] += 1
            does = "did not pull" if "engine" in event.data else "did not serve"
            what = f"{who} {does} version {event.data['version']} over the fabric: {event.data['why']}"
            first.setdefault(who, (event.time_s, what))
    more = {who: f" (and {count[who] - 1} more versions)" if count[who] > 1 else "" for who in first}
    return [(time_s, f"{what}{more[who]}") for who, (time_s, what) in first.items()]

"""Hours that a run held, the share of them in steps that count, its engines, router, pool, versions and checkpoints."""

from __future__ import annotations

from statistics import median
from typing import Any

from hpcrl.analysis.page.material import RunMaterial
from hpcrl.analysis.page.time_spans import lane_of
from hpcrl.analysis.series import RunHistory
from hpcrl.config.plan import Role
from hpcrl.errors import HpcrlError
from hpcrl.runs.fleet import read_fleet
from hpcrl.runs.views.checkpoints import checkpoint_items
from hpcrl.runs.views.usage import attempt_spans, read_usage
from hpcrl.runs.views.words import duration

_COUNTING = ("forward_backward", "optimizer")


def goodput_rows(material: RunMaterial) -> list[tuple[str, str]]:
    """Return names and values of what a run held and did with it, in words."""
    history = material.history
    held_s = sum(max(0.0, end - begin) for begin, end in attempt_spans(material.run, history.view).values())
    steps_s = sum(sum(record.phases_s.values()) for record in history.records)
    trained_s = sum(record.phases_s.get(name, 0.0) for record in history.records for name in _COUNTING)
    tokens = sum(record.tokens for record in history.records)
    usage = read_usage(material.run, history.view)
    rows = [
        ("time held, all attempts", duration(held_s) if held_s else "unknown"),
        ("goodput: steps that count, of the time held", _share(steps_s, held_s)),
        ("trainer: forward, backward and optimizer, of the time held", _share(trained_s, held_s)),
        ("tokens trained", f"{tokens:,}"),
        ("GPU-hours", f"{usage.gpu_hours:,.1f}" if usage.gpu_hours else "none: the run held no GPUs"),
    ]
    rows += [(f"GPU-hours of {role}", f"{hours:,.1f}") for role, hours in usage.gpu_hours_by_role.items()]
    if usage.gpu_hours:
        rows.append(("tokens trained in a GPU-hour", f"{tokens / usage.gpu_hours:,.0f}"))
    return rows


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%} ({duration(part)})" if whole > 0 else "unknown"


def engine_rows(material: RunMaterial) -> list[dict[str, str]]:
    """Return a row for each engine: its state, and what happened to it in the run."""
    history = material.history
    states = {}
    for replica in read_fleet(material.run, history.view.attempt, history.view.components).replicas:
        states[f"{replica.role} {replica.replica}"] = replica.state.value
    seconds: dict[str, list[float]] = {}
    for event in history.of_kind("engine.weights_updated"):
        if isinstance(event.data.get("seconds"), int | float):
            seconds.setdefault(lane_of(event.data.get("engine")), []).append(float(event.data["seconds"]))
    away = [lane_of(event.data.get("engine")) for event in history.of_kind("engine.away")]
    restarts = [
        f"{event.data.get('role')} {event.data.get('replica')}" for event in history.of_kind("component.restarting")
    ]
    return [
        {
            "engine": name,
            "state": states.get(name, "unknown"),
            "updates": str(len(seconds.get(name, ()))),
            "median": f"{median(seconds[name]):.2f} s" if name in seconds else "unknown",
            "longest": f"{max(seconds[name]):.2f} s" if name in seconds else "unknown",
            "away": str(away.count(name)),
            "restarts": str(restarts.count(name)),
        }
        for name in dict.fromkeys([*states, *sorted(seconds)])
    ]


def request_rows(material: RunMaterial) -> list[tuple[str, str]]:
    """Return names and values of requests to engines, of the router and of the KV pool, in words."""
    history = material.history
    counters = history.records[-1].rollouts if history.records else {}
    rows = []
    if requests := counters.get("engine_requests", 0.0):
        repeated = counters.get("engine_retries", 0.0)
        rows += [
            ("requests to engines", f"{requests:,.0f}"),
            ("requests that were made again", f"{repeated:,.0f} ({repeated / requests:.2%})"),
            ("answers that were damaged or unusable", f"{counters.get('unusable_answers', 0.0):,.0f}"),
        ]
    roles = {group.role for group in material.run.plan().groups}
    if Role.ROUTER in roles or history.of_kind("router.engine_added"):
        rows += [
            ("router: engines taken in", f"{len(history.of_kind('router.engine_added')):,}"),
            ("router: engines left out", f"{len(history.of_kind('router.engine_removed')):,}"),
            ("router: did not answer", _absences(history)),
            ("router: restarts", _restarts(history, Role.ROUTER)),
        ]
    if Role.STORE in roles or history.of_kind("store.segment_joined"):
        rows += [
            ("KV pool: segments that joined", f"{len(history.of_kind('store.segment_joined')):,}"),
            ("KV pool: segments that were lost", f"{len(history.of_kind('store.segment_lost')):,}"),
            ("KV pool: slowest trial block of 1 MiB, put and got", _slowest_trial(history)),
            ("KV pool: restarts of its master", _restarts(history, Role.STORE)),
        ]
    return rows


def _absences(history: RunHistory) -> str:
    """Return how often the router was away, and for how long where it came back in the same attempt."""
    away = history.of_kind("router.away")
    seconds, begun = 0.0, dict[int, float]()
    for event in history.of_kind("router.away", "router.back"):
        if event.kind == "router.away":
            begun.setdefault(event.attempt, event.time_s)
        elif event.attempt in begun:
            seconds += event.time_s - begun.pop(event.attempt)
    for_good = f", {len(begun)} until the end of an attempt" if begun else ""
    return f"{len(away):,} times, {duration(seconds)}{for_good}" if away else "never"


def _restarts(history: RunHistory, role: Role) -> str:
    return str(sum(event.data.get("role") == role.value for event in history.of_kind("component.restarting")))


def _slowest_trial(history: RunHistory) -> str:
    trials = [
        [seconds for name in ("put_s", "get_s") if isinstance(seconds := event.data.get(name), int | float)]
        for event in history.of_kind("store.canary")
    ]
    slowest = max((sum(each) for each in trials if each), default=None)
    return "unknown" if slowest is None else f"{slowest:.3f} s"


def version_rows(material: RunMaterial) -> list[tuple[str, str]]:
    """Return counts of published versions by form, and of those that were collected."""
    history = material.history
    forms: dict[str, int] = {}
    for event in history.of_kind("trainer.version_published"):
        form = str(event.data.get("form", "unknown"))
        forms[form] = forms.get(form, 0) + 1
    rows = [(f"versions published, form {form}", f"{count:,}") for form, count in sorted(forms.items())]
    if announced := len(history.of_kind("trainer.version_announced")):
        rows.append(("versions announced before they were durable", f"{announced:,}"))
    collected = sum(len(event.data.get("removed") or ()) for event in history.of_kind("weights.collected"))
    refused = len(history.of_kind("trainer.version_refused"))
    return [*rows, ("versions collected", f"{collected:,}"), ("refused by the filesystem", f"{refused:,}")]


def checkpoint_rows(material: RunMaterial) -> list[dict[str, Any]]:
    """Return a row for each checkpoint on disk; none where the ledger of checkpoints cannot be read."""
    try:
        items = checkpoint_items(material.run)
    except (HpcrlError, OSError):
        return []
    return [
        {
            "step": str(item.step),
            "size": f"{item.bytes / 2**20:,.1f} MiB",
            "save": "unknown" if item.save_s is None else f"{item.save_s:.2f} s",
            "blocked": "unknown" if item.blocked_s is None else f"{item.blocked_s:.2f} s",
            "state": item.state,
        }
        for item in items
    ]

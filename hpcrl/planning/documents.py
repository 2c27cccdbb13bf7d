"""Requirements and times of a plan, as JSON (docs/planning.md describes it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.planning.ledger import Ledger
from hpcrl.planning.memory.fit import MemoryReport
from hpcrl.planning.memory.sandbox_memory import SandboxMemory
from hpcrl.planning.report import Outlook
from hpcrl.planning.times.from_recipe import PlannedLayout
from hpcrl.planning.times.loop import LoopEstimate
from hpcrl.planning.times.ranges import Range
from hpcrl.planning.times.terms import TimeTable


def loop_document(loop: LoopEstimate) -> dict[str, Any]:
    """Return a steady state as JSON values."""
    return {
        "step_s": loop.step_s,
        "trainer_s": loop.trainer_s,
        "rollout_s": loop.rollout_s,
        "bound": loop.bound,
        "in_flight": loop.in_flight,
        "in_flight_limit": loop.in_flight_limit,
        "started_per_s": loop.started_per_s,
        "trainer_waits_share": loop.trainer_waits,
        "engines_wait_share": loop.engines_wait,
        "staleness_mean": loop.staleness,
        "dropped_share": loop.dropped,
        "decode_batch": loop.served.batch,
        "sampled_token_s": loop.served.token_s,
        "rollout_duration_s": {
            "mean": loop.served.durations.mean,
            "median": loop.served.durations.quantile(0.5),
            "p99": loop.served.durations.quantile(0.99),
        },
    }


def outlook_document(outlook: Outlook) -> dict[str, Any]:
    """Return an outlook as JSON values (docs/planning.md describes them)."""
    whole = outlook.forecast
    return {
        "schema_version": 1,
        "because": outlook.because or None,
        "loop": None if outlook.loop is None else loop_document(outlook.loop),
        "memory": None if outlook.memory is None else _memory_document(outlook.memory, outlook.sandbox_programs),
        "expert_imbalance": None if outlook.expert_margin is None else outlook.expert_margin.document(),
        "why_not": [
            {
                "role": shortage.place.role.value,
                "kind": shortage.place.kind,
                "missing_bytes": shortage.missing,
                "knobs": [
                    {"set": dict(knob.changes), "price": knob.price, "headroom_bytes": knob.headroom}
                    for knob in shortage.knobs
                ],
            }
            for shortage in outlook.shortages
        ],
        "layout": None if whole is None else _layout_document(whole.layout),
        "gpu_hours_per_step": None if whole is None else whole.gpu_hours_per_step,
        "gpu_hours_per_day": None if whole is None else whole.gpu_hours_per_day,
        "shared_filesystem_bytes_per_step": {} if whole is None else dict(whole.share_bytes),
        "assumptions": [] if whole is None else list(whole.assumptions),
        "warnings": [] if whole is None else list(whole.warnings),
        "missing": list(outlook.lacking),
        "not_counted": list(outlook.uncounted),
        "ranges": {
            name: range_document(outlook.ranges[name])
            for name in ("step", "trainer side", "rollouts", "rollout", "sampled_token")
            if name in outlook.ranges
        },
        "times": {name: _table_document(name, table, outlook.ranges) for name, table in outlook.tables.items()},
    }


def _memory_document(memory: MemoryReport, programs: float | None) -> dict[str, Any]:
    def ledger(value: Ledger) -> dict[str, Any]:
        terms = [
            {
                "name": term.name,
                "bytes": term.value,
                "formula": term.formula,
                "inputs": dict(term.inputs),
                "source": term.source,
                "reclaimable": not term.counts,
            }
            for term in value.terms
        ]
        return {"moment": value.name, "bytes": value.total, "terms": terms}

    return {
        "fits": memory.ok,
        "places": [
            {
                "role": place.role.value,
                "kind": place.kind,
                "needed_bytes": place.needed,
                "capacity_bytes": place.capacity,
                "headroom_bytes": place.headroom,
                "kv_bytes": None if place.kv is None else place.kv.cache_bytes,
                "kv_tokens": None if place.kv is None else place.kv.tokens,
                "kv_sequences": None if place.kv is None else place.kv.sequences,
                "peak": ledger(place.ledger),
            }
            for place in memory.places
        ],
        "sandboxes": None if memory.sandboxes is None else _sandboxes_document(memory.sandboxes, programs),
    }


def _sandboxes_document(found: SandboxMemory, programs: float | None) -> dict[str, Any]:
    return {
        "node": found.node.text,
        "count": found.count,
        "bytes": found.term.value,
        "left_bytes": found.left,
        "limit_bytes": found.limit,
        "fits": found.fits,
        "programs": programs,
        "cpus": found.node.cpus,
        "inputs": dict(found.term.inputs),
    }


def _layout_document(layout: PlannedLayout) -> dict[str, Any]:
    def shape(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in value.__dataclass_fields__}

    return {
        "nodes": layout.nodes,
        "gpus": layout.gpus,
        "trainer": shape(layout.trainer),
        "decode": shape(layout.decode),
        "prefill": None if layout.prefill is None else shape(layout.prefill),
        "handoff_path": layout.handoff_path,
        "handoff_dtype": layout.handoff_dtype,
        "delta_chain": layout.delta_chain,
    }


def range_document(found: Range, *, causes: bool = True) -> dict[str, Any]:
    """Return a range as JSON values: seconds, and the causes of its width, the largest first."""
    document: dict[str, Any] = {"low_s": found.low, "mid_s": found.mid, "high_s": found.high, "origin": found.origin}
    if causes:
        document["causes"] = [
            {"name": cause.name, "origin": cause.origin, "low_s": cause.low, "high_s": cause.high}
            for cause in found.causes
        ]
    return document


def _table_document(name: str, table: TimeTable, ranges: Mapping[str, Range]) -> dict[str, Any]:
    def within(key: str) -> dict[str, Any] | None:
        return range_document(ranges[key], causes=False) if key in ranges else None

    return {
        "seconds": table.seconds,
        "range": within(name),
        "terms": [
            {
                "name": term.name,
                "seconds": term.value,
                "range": within(f"{name}/{term.name}"),
                "counts": term.counts,
                "formula": term.formula,
                "inputs": dict(term.inputs),
                "missing": term.missing or None,
            }
            for term in table
        ],
    }

"""Weight updates that others published, by the transport that a plan uses.

A plan's versions go through the shared filesystem, and from node to node (`hpcrl.planning.times.handoff`). Where the
published engine has its weights in the hosts of its nodes and passes them on, that is the second half of a plan's
``fan_out``: from node to node over the adapters, and into the GPUs. Resharding and broadcasts between GPUs of trainer
and engines are no transport of a plan: those cases are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hpcrl.models import load_facts
from hpcrl.planning.times.forecast import engine_bytes, engine_tensors
from hpcrl.planning.times.shapes import EngineShape
from planning.case_files import rows_of
from planning.published.cases import PUBLISHED, Case, rates


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of an update by the way that it took; the calibration comes from those that are ``fitted``.

    Attributes
    ----------
    gpus:
        Of the update: engines of ``tp`` GPUs.
    """

    model: str
    gpu: str
    gpus: int
    tp: int
    published: dict[str, float]
    fp8: bool = False
    fitted: list[str] = []


def weight_updates() -> Iterator[Case]:
    """All cases."""
    for row in rows_of(PUBLISHED["updates"]["rows"], Update):
        yield from fan_out(row)
    refused = (PUBLISHED["no_transport"],)
    for case in PUBLISHED["other_transports"]:
        yield Case("weights", case["what"], "s", case["published"], None, case["source"], cannot=refused)


def fan_out(row: Update) -> Iterator[Case]:
    """From hosts that have the weights to the GPUs of an engine: the terms of a plan's hand-off after the share.

    Where a node has all of them already (one node in all), nothing goes over adapters.
    """
    own, nodes = rates(row.gpu), max(1, row.tp // 8)
    shape = EngineShape(
        replicas=1,
        nodes=nodes,
        gpus_per_node=row.tp // nodes,
        tensor_parallel=row.tp,
        weight_dtype="fp8" if row.fp8 else "bfloat16",
    )
    facts = load_facts(row.model)
    node, gpu_bytes = engine_bytes(facts, shape)
    seconds = gpu_bytes / own.pcie + engine_tensors(facts, shape) * own.calibration.constant("tensor_load_s")
    if nodes > 1:
        seconds += node / own.node_network
    reason = (
        "every GPU gets all buckets and cuts its part out, and each bucket waits for the one before; a plan's engine "
        "reads its own part alone"
    )
    source = PUBLISHED["updates"]["source"]
    for way, measured in row.published.items():
        what = f"hand-off {row.model} {'FP8' if row.fp8 else 'BF16'}, {row.gpus} {row.gpu}, {way}"
        yield Case("weights", what, "s", measured, seconds, source, reason, fitted=way in row.fitted)

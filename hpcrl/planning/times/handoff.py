"""Seconds of moving weights and checkpoints: hand-offs by path, saves, start-up. Formulas are in docs/planning.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcrl.planning.times.rates import Rates, StorageRates
from hpcrl.planning.times.terms import TimeTable, attempt

__all__ = ["HANDOFF_PATHS", "HandoffLoad", "HandoffPath", "checkpoint_save", "handoff", "startup"]

HandoffPath = Literal["filesystem", "fan_out"]
HANDOFF_PATHS: tuple[HandoffPath, ...] = ("filesystem", "fan_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLoad:
    """A published version and who loads it.

    Attributes
    ----------
    path:
        ``filesystem``: every node reads the share. ``fan_out``: one copy is read from it, nodes pass it on.
    bytes:
        Of the full version.
    changed_share:
        Share of the bytes that is published and read; 1 is a full version, less a delta.
    trainer_nodes, trainer_gpus, engine_nodes:
        Nodes that write and their GPUs, and nodes that load.
    node_bytes:
        What one engine node needs: the whole model where it holds a replica, its part of a wide one.
    gpu_bytes, gpu_tensors:
        What one GPU takes from it, in bytes and in tensors.
    """

    path: HandoffPath
    bytes: float
    changed_share: float = 1.0
    trainer_nodes: int
    trainer_gpus: int
    engine_nodes: int
    node_bytes: float
    gpu_bytes: float
    gpu_tensors: float = 0.0


def handoff(h: HandoffLoad, trainer: Rates, engine: Rates, storage: StorageRates) -> TimeTable:
    """From the end of an optimizer step to the last engine that serves its weights."""
    published = h.bytes * h.changed_share
    read_each = h.node_bytes * h.changed_share
    fixed = trainer.calibration.constant("file_overhead_s")
    gpu_share = published / h.trainer_gpus
    reads = h.engine_nodes * read_each if h.path == "filesystem" else min(published, h.engine_nodes * read_each)

    def read() -> float:
        if h.path == "filesystem":
            return reads / storage.read(h.engine_nodes)
        # the copy arrives in chunks, and each chunk goes on at once: the slower of both, and the depth of the tree
        depth = math.ceil(math.log2(h.engine_nodes + 1))
        once = reads / storage.read(h.engine_nodes)
        return max(once, read_each / engine.node_network) + depth * engine.calibration.constant("hop_s")

    terms = (
        attempt(
            "handoff.copy_out",
            lambda: gpu_share / trainer.pcie,
            "bytes / trainer GPUs / pcie",
            {"bytes a GPU": gpu_share},
        ),
        attempt(
            "handoff.write",
            lambda: published / storage.write(h.trainer_nodes),
            "bytes / min(share, trainer nodes * a node's rate)",
            {"bytes": published, "changed share": h.changed_share, "trainer nodes": h.trainer_nodes},
        ),
        attempt("handoff.commit", lambda: 2 * fixed, "2 * file_overhead_s: fsync and rename, listing and notice"),
        attempt(
            "handoff.read",
            read,
            "engine nodes * bytes a node / share"
            if h.path == "filesystem"
            else "max(bytes / share, bytes a node / adapters) + depth * hop_s",
            {"bytes a node": read_each, "engine nodes": h.engine_nodes, "bytes from the share": reads},
        ),
        attempt(
            "handoff.load",
            lambda: (
                h.gpu_bytes * h.changed_share / engine.pcie
                + h.gpu_tensors * engine.calibration.constant("tensor_load_s")
            ),
            "bytes a GPU / pcie + tensors a GPU * tensor_load_s",
            {"bytes a GPU": h.gpu_bytes * h.changed_share, "tensors a GPU": h.gpu_tensors},
        ),
    )
    way = h.path if h.changed_share == 1.0 else f"{h.path}, delta"
    return TimeTable(f"hand-off ({way})", terms)


def share_bytes(h: HandoffLoad) -> tuple[float, float]:
    """Bytes written to and read from the shared filesystem by one hand-off."""
    published = h.bytes * h.changed_share
    wanted = h.engine_nodes * h.node_bytes * h.changed_share
    return published, wanted if h.path == "filesystem" else min(published, wanted)


def checkpoint_save(state_bytes: float, nodes: int, gpus: int, rates: Rates, storage: StorageRates) -> TimeTable:
    """An asynchronous save: the copy to host memory stops the trainer, the write does not."""
    gpu_share = state_bytes / gpus
    return TimeTable(
        "checkpoint",
        (
            attempt(
                "checkpoint.copy_out",
                lambda: gpu_share / rates.pcie,
                "state / GPUs / pcie",
                {"state bytes": state_bytes, "bytes a GPU": gpu_share},
            ),
            attempt(
                "checkpoint.write",
                lambda: state_bytes / storage.write(nodes) + rates.calibration.constant("file_overhead_s"),
                "state / min(share, nodes * a node's rate) + file_overhead_s; beside the next steps",
                {"state bytes": state_bytes, "nodes": nodes},
                counts=False,
            ),
        ),
    )


def startup(
    *,
    trainer_bytes: float,
    engine_bytes: float,
    nodes: int,
    rates: Rates,
    storage: StorageRates,
) -> TimeTable:
    """From process start to the first request: trainer and engines load at the same time from the same share."""
    total = trainer_bytes + engine_bytes
    return TimeTable(
        "start-up",
        (
            attempt(
                "startup.read",
                lambda: total / storage.read(nodes),
                "(trainer bytes + engine nodes * bytes a node) / share",
                {"trainer bytes": trainer_bytes, "engine bytes": engine_bytes, "nodes": nodes},
            ),
            attempt("startup.processes", lambda: rates.calibration.constant("process_start_s"), "process_start_s"),
        ),
    )

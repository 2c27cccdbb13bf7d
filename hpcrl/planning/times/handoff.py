"""Seconds of moving weights and checkpoints: hand-offs by path, saves, start-up. Formulas are in docs/planning.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcrl.planning.times.rates import Rates, StorageRates
from hpcrl.planning.times.terms import TimeTable, attempt

HandoffPath = Literal["filesystem", "fan_out", "fabric"]
HANDOFF_PATHS: tuple[HandoffPath, ...] = ("filesystem", "fan_out")
"""Paths by files, which are shown for comparison."""


_READ: dict[HandoffPath, str] = {
    "filesystem": "engine nodes * bytes a node / share",
    "fan_out": "max(bytes / share, bytes a node / adapters) + depth * hop_s",
    "fabric": "max(engine nodes * bytes a node / trainer nodes, bytes a node) / adapters",
}
"""Formulas of the time of reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLoad:
    """Published version and the engines that load it.

    Attributes
    ----------
    path:
        ``filesystem``: every node reads the share. ``fan_out``: one copy is read from it, nodes pass it on.
        ``fabric``: each node pulls from the memory of the trainer's nodes; what is on the share is not read.
    bytes:
        Bytes of the full version.
    changed_share:
        Share of the bytes that is published and read; 1 is a full version, less a delta.
    trainer_nodes, trainer_gpus, engine_nodes:
        Nodes that write and their GPUs, and nodes that load.
    node_bytes:
        Bytes that one engine node needs: the whole model where it holds a replica, its part of a wide one.
    gpu_bytes, gpu_tensors:
        Part of one GPU, in bytes and in tensors.
    written_share:
        With ``fabric``: share of the versions that are written to the share.
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
    written_share: float = 1.0

    @property
    def is_announced_first(self) -> bool:
        """Return whether engines get a version before it is written: a full one over the fabric."""
        return self.path == "fabric" and self.changed_share == 1.0


def handoff(h: HandoffLoad, trainer: Rates, engine: Rates, storage: StorageRates) -> TimeTable:
    """Return the times from the end of an optimizer step to the last engine that serves its weights.

    A full version that is served over the fabric is announced before it is written, so the write does not count.
    """
    published = h.bytes * h.changed_share
    read_each = h.node_bytes * h.changed_share
    fixed = trainer.calibration.constant("file_overhead_s")
    gpu_share = published / h.trainer_gpus
    reads = share_bytes(h)[1]

    def read() -> float:
        if h.path == "filesystem":
            return reads / storage.read(h.engine_nodes)
        if h.path == "fabric":
            # the slower side: all that the trainer's nodes send, or what one node receives
            sent = h.engine_nodes * read_each / (h.trainer_nodes * trainer.node_network)
            return max(sent, read_each / engine.node_network)
        # the copy arrives in chunks, and each chunk is forwarded at once: the slower of both, and the depth of the tree
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
        *(
            [
                attempt(
                    "handoff.serve",
                    lambda: gpu_share / trainer.calibration.constant("serve_rate"),
                    "bytes a GPU / serve_rate: hashes, and the copy into registered memory",
                    {"bytes a GPU": gpu_share},
                )
            ]
            if h.is_announced_first
            else []
        ),
        attempt(
            "handoff.write",
            lambda: published / storage.write(h.trainer_nodes),
            "bytes / min(share, trainer nodes * a node's rate)"
            + ("; during the next step, where the version is written" if h.is_announced_first else ""),
            {"bytes": published, "changed share": h.changed_share, "trainer nodes": h.trainer_nodes},
            counts=not h.is_announced_first,
        ),
        attempt(
            "handoff.commit",
            lambda: 2 * fixed,
            "2 * file_overhead_s: "
            + ("manifest and record" if h.is_announced_first else "fsync and rename")
            + ", listing and notice",
        ),
        attempt(
            "handoff.read",
            read,
            _READ[h.path],
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
    """Return the bytes written to and read from the shared filesystem by one hand-off, in the mean."""
    published = h.bytes * h.changed_share
    written = published * (h.written_share if h.path == "fabric" else 1.0)
    wanted = h.engine_nodes * h.node_bytes * h.changed_share
    return written, {"filesystem": wanted, "fan_out": min(published, wanted), "fabric": 0.0}[h.path]


def checkpoint_save(state_bytes: float, nodes: int, gpus: int, rates: Rates, storage: StorageRates) -> TimeTable:
    """Return the times of an asynchronous save: the copy to host memory stops the trainer, the write does not."""
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
                "state / min(share, nodes * a node's rate) + file_overhead_s; during the next steps",
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
    """Return the times from process start to the first request: trainer and engines load at once from one share."""
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

"""Nodes that later attempts of a run stay away from: ``excluded_nodes.json`` in the run directory.

The supervisor writes it; ``resume`` and the next attempt read it. An entry ends by itself, and where too few other
nodes are left the oldest ones are not used: a site that repaired its nodes, or has no spare ones, starves no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared


class ExcludedNode(msgspec.Struct, frozen=True, kw_only=True):
    """Node that later attempts avoid, and why.

    Attributes
    ----------
    node:
        Slurm's name.
    reason:
        Description of the event there, as a sentence.
    attempt:
        Attempt of the event.
    since_s, until_s:
        Seconds since the epoch.
    """

    node: str
    reason: str
    attempt: int
    since_s: float
    until_s: float


def read_exclusions(run: RunDir, *, now_s: float) -> list[ExcludedNode]:
    """Return the entries that have not expired, newest first."""
    try:
        entries = msgspec.json.decode(
            (run.path / "excluded_nodes.json").read_bytes(), type=prepared(list[ExcludedNode])
        )
    except (FileNotFoundError, msgspec.DecodeError):
        return []
    return sorted((e for e in entries if e.until_s > now_s), key=lambda entry: entry.since_s, reverse=True)


def exclude(run: RunDir, nodes: Mapping[str, str], *, attempt: int, now_s: float, seconds: float) -> None:
    """Add nodes with the reason of each; the time of an existing entry starts again.

    Parameters
    ----------
    nodes:
        Reasons by name of the node.
    now_s, seconds:
        When that is, in seconds since the epoch, and for how long the run stays away from them.
    """
    fresh = [
        ExcludedNode(node=node, reason=reason, attempt=attempt, since_s=now_s, until_s=now_s + seconds)
        for node, reason in sorted(nodes.items())
    ]
    names = {entry.node for entry in fresh}
    others = [entry for entry in read_exclusions(run, now_s=now_s) if entry.node not in names]
    write_json(run.path / "excluded_nodes.json", [*fresh, *others])


def choose_exclusions(
    entries: Sequence[ExcludedNode], *, usable: Mapping[str, Sequence[str]], needed: Mapping[str, int]
) -> list[str]:
    """Return the nodes to exclude: the newest entries that leave each partition enough usable nodes.

    Parameters
    ----------
    entries:
        The newest first.
    usable:
        Names of the nodes by partition on which jobs run or could start.
    needed:
        Nodes that the run takes, by partition.
    """
    chosen: list[str] = []
    for entry in entries:
        attempt = {*chosen, entry.node}
        if all(len(set(usable.get(partition, ())) - attempt) >= count for partition, count in needed.items()):
            chosen.append(entry.node)
    return sorted(chosen)

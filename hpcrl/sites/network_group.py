"""Answers of a group's ranks about an all-reduce and an all-to-all, and their interpretation. Pure functions.

Rates are those of the network of a node, each way: the bytes that have to leave every node by the time that it took. In
an all-reduce of S bytes a rank that is 2 S (N - 1) / N for N nodes, because the GPUs of a node add up among each other
first; in an all-to-all each of the g ranks of a node sends S (N - 1) / N away. Both are to be compared with the sum of
the profile's ``nics.gb_s``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hpcrl.sites.foreign_script import ScriptEnd, one_line
from hpcrl.storage.msgspec_types import prepared

_PHASES = {
    "": "the import of torch",
    "imported": "joining the process group",
    "joined": "the all-reduce",
    "reduced": "the all-to-all",
    "exchanged": "the last barrier",
}
"""Activity of a rank after the last phase that it has reported."""


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one rank.

    Attributes
    ----------
    phase:
        The last phase that it has finished.
    problem:
        Reason why it did not end well; empty where it did.
    hung:
        Whether it exceeded its time limit, by its own clock or by its parent's.
    died:
        Whether its process ended by a signal or an exit code.
    wrong_sums:
        Elements of the all-reduce that are not the sum.
    wrong_from:
        Ranks whose part of the all-to-all arrived wrong.
    bytes, reduce_s, exchange_s:
        Bytes of each collective and its seconds; 0 where it was not reached.
    """

    phase: str = ""
    problem: str = ""
    hung: bool = False
    died: bool = False
    wrong_sums: int = 0
    wrong_from: list[int] = []
    bytes: int = 0
    reduce_s: float = 0.0
    exchange_s: float = 0.0


class NodeCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of the ranks of one node, in their order; ``problem`` where the node could not start them."""

    node: str
    ranks: list[RankAnswer] = []
    problem: str = ""


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a group of nodes.

    Attributes
    ----------
    nodes:
        The group.
    kind:
        ``good``, ``slow``, ``wrong`` (data), ``hang`` or ``failed``.
    what:
        The first reason, as a sentence's end; empty where it is good.
    reduce_gb_s, exchange_gb_s:
        Rates of a node's network in GB/s; None where they were not measured, or there is one node.
    """

    nodes: tuple[str, ...]
    kind: str = "good"
    what: str = ""
    reduce_gb_s: float | None = None
    exchange_gb_s: float | None = None

    @property
    def works(self) -> bool:
        """Return whether the group has no problem."""
        return self.kind == "good"


class _Answered(msgspec.Struct, frozen=True):
    phase: str = ""
    error: str = ""
    wrong: int = 0
    wrong_from: list[int] = []
    bytes: int = 0
    seconds: float = 0.0


def rank_answer(end: ScriptEnd) -> RankAnswer:
    """Combine the answers of a rank with the end of its process."""
    try:
        said = msgspec.convert(end.answers, type=prepared(list[_Answered]))
    except msgspec.ValidationError as error:
        return RankAnswer(problem=f"its answer cannot be read: {error}")
    by_phase = {answer.phase: answer for answer in said if answer.phase}
    phase = next((answer.phase for answer in reversed(said) if answer.phase), "")
    raised = next((answer.error for answer in said if answer.error), "")
    none = _Answered()
    reduced, exchanged = by_phase.get("reduced", none), by_phase.get("exchanged", none)
    problem = raised or end.problem or ("" if phase == "done" else "its process ended earlier")
    lower = problem.lower()
    return RankAnswer(
        phase=phase,
        problem="" if phase == "done" else one_line(problem),
        hung=end.kind == "hang" or (bool(raised) and ("timeout" in lower or "timed out" in lower)),
        died=end.kind not in ("good", "hang"),
        wrong_sums=reduced.wrong,
        wrong_from=exchanged.wrong_from,
        bytes=reduced.bytes,
        reduce_s=reduced.seconds,
        exchange_s=exchanged.seconds,
    )


def judge_group(
    nodes: Sequence[str],
    answers: Mapping[str, NodeCollectives],
    *,
    ranks_per_node: int,
    least_gb_s: float | None,
) -> GroupResult:
    """Judge the answers of the nodes of a group.

    The worst problem counts: no answer, a failure, a hang, wrong data, slowness.

    Parameters
    ----------
    nodes:
        The group in the order of ranks.
    answers:
        By node; one that is not there did not answer.
    least_gb_s:
        Below it the network is slow; None: nothing is known.
    """
    group = tuple(nodes)
    for node in nodes:
        answer = answers.get(node)
        if answer is None or answer.problem or len(answer.ranks) != ranks_per_node:
            why = "did not answer" if answer is None else answer.problem or "did not start all of its ranks"
            return GroupResult(nodes=group, kind="failed", what=f"{node} {why}")
    ranks = [(node, rank) for node in nodes for rank in answers[node].ranks]
    kind, what = _failure(ranks) or _wrong_data(nodes, ranks, ranks_per_node) or ("good", "")
    if kind != "good" or len(nodes) == 1:
        return GroupResult(nodes=group, kind=kind, what=what)
    share = (len(nodes) - 1) / len(nodes)
    size = max(rank.bytes for _, rank in ranks)
    reduce_s, exchange_s = max(r.reduce_s for _, r in ranks), max(r.exchange_s for _, r in ranks)
    reduced = 2 * size * share / reduce_s / 1e9 if reduce_s > 0 else 0.0
    exchanged = ranks_per_node * size * share / exchange_s / 1e9 if exchange_s > 0 else 0.0
    if least_gb_s is not None and min(reduced, exchanged) < least_gb_s:
        kind = "slow"
        what = f"the all-reduce reaches {reduced:.1f} GB/s a node and the all-to-all {exchanged:.1f}, "
        what += f"{least_gb_s:.1f} are expected"
    return GroupResult(nodes=group, kind=kind, what=what, reduce_gb_s=reduced, exchange_gb_s=exchanged)


def _failure(ranks: Sequence[tuple[str, RankAnswer]]) -> tuple[str, str] | None:
    """Return kind and reason of the rank that failed first: others wait for it, and fail later."""
    failed = [(node, rank) for node, rank in ranks if rank.problem]
    if not failed:
        return None
    node, rank = min(failed, key=lambda each: (each[1].hung, not each[1].died, _order(each[1].phase)))
    doing = _PHASES.get(rank.phase, "its end")
    if not rank.hung:
        return "failed", f"{node} failed in {doing}: {rank.problem}"
    stuck = ", ".join(dict.fromkeys(other for other, its in failed if its.phase == rank.phase))
    return "hang", f"{doing} did not end in time ({stuck}): {rank.problem}"


def _wrong_data(
    nodes: Sequence[str], ranks: Sequence[tuple[str, RankAnswer]], ranks_per_node: int
) -> tuple[str, str] | None:
    links = [
        f"{nodes[source // ranks_per_node]} to {node}"
        for node, rank in ranks
        for source in rank.wrong_from
        if 0 <= source < len(ranks)
    ]
    if links:
        return "wrong", f"an all-to-all brought wrong data from {', '.join(dict.fromkeys(links))}"
    if wrong := next((rank.wrong_sums for _, rank in ranks if rank.wrong_sums), 0):
        return "wrong", f"an all-reduce gave {wrong} wrong sums"
    return None


def _order(phase: str) -> int:
    return list(_PHASES).index(phase) if phase in _PHASES else len(_PHASES)

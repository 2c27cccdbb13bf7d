"""Findings from the tries of the network between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.sites.network_check import NetworkReport
from hpcrl.sites.network_group import GroupResult
from hpcrl.sites.profile_check import CheckFinding, Severity

_CODES = {"slow": "network-slow", "wrong": "network-wrong", "hang": "network-hangs", "failed": "network-fails"}
_WAYS = {
    "slow": "compare `ibstat` rates, cables and switch counters of these nodes; or correct gb_s of the profile's nics",
    "wrong": "drain these nodes: data between them may be corrupted",
    "hang": "look at interface, nics and fabric of the profile, and at `ibstat` and firewalls of these nodes",
    "failed": "look at interface, nics and fabric of the profile, and at the reason that is named",
}


def network_findings(report: NetworkReport, key: str) -> Iterator[CheckFinding]:
    """Judge a report.

    Parameters
    ----------
    key:
        Key of the profile for the shape of the nodes.
    """
    if report.left_out:
        what = f"{', '.join(report.left_out)} took no part in the check of the network: its torch or its GPUs fail"
        way = "fix the other findings about it, and check again"
        yield CheckFinding("network-left-out", Severity.WARNING, key, what, way)
    if not report.tries:
        return
    whole = report.tries[0]
    blamed = [
        *((f"{node} does not work with others", (node,)) for node in report.nodes),
        *((f"{first} and {second} do not work together", (first, second)) for first, second in report.pairs),
        *((f"{', '.join(each)} do not work together, while fewer of them do", tuple(each)) for each in report.groups),
    ]
    for who, nodes in blamed:
        yield _finding(_smallest(report, nodes) or whole, who, report.backend, key)
    if not whole.works and not blamed:
        yield _finding(whole, f"{', '.join(whole.nodes)} do not work together", report.backend, key)
    if report.open:
        what = f"it is not known whether {', '.join(report.open)} work: the time of the check's job was over"
        yield CheckFinding("network-open", Severity.WARNING, key, what, "leave the nodes above out, and check again")


def _finding(result: GroupResult, who: str, backend: str, key: str) -> CheckFinding:
    severity = Severity.WARNING if result.kind == "slow" else Severity.ERROR
    return CheckFinding(_CODES[result.kind], severity, key, f"{who} ({backend}): {result.what}", _WAYS[result.kind])


def _smallest(report: NetworkReport, nodes: tuple[str, ...]) -> GroupResult | None:
    """Return the smallest group that failed with all of these nodes: its reason is about them."""
    failed = [tried for tried in report.tries if not tried.works and set(nodes) <= set(tried.nodes)]
    return min(failed, key=lambda tried: len(tried.nodes), default=None)


def network_summary(report: NetworkReport) -> str:
    """Return a line for people: the rates, or why there are none."""
    if not report.tries:
        return f"the network between nodes was not tried: {report.skipped or 'no group was begun'}"
    whole = report.tries[0]
    who = f"{len(whole.nodes)} nodes by {report.backend}"
    if not whole.works:
        tries = f"{len(report.tries)} group{'s' if len(report.tries) > 1 else ''}"
        return f"network of {who}: {whole.what} ({tries} tried)"
    if whole.reduce_gb_s is None or whole.exchange_gb_s is None:
        return f"network of {who}: all-reduce and all-to-all bring what was sent"
    rates = f"all-reduce {whole.reduce_gb_s:.2f} GB/s a node each way, all-to-all {whole.exchange_gb_s:.2f}"
    return f"network of {who}: {rates}; contents verified"

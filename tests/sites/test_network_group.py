"""What ranks said of their collectives, and the findings that come of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpcrl.sites.foreign_script import ScriptEnd
from hpcrl.sites.network_check import NetworkReport
from hpcrl.sites.network_findings import network_findings, network_summary
from hpcrl.sites.network_group import GroupResult, NodeCollectives, RankAnswer, judge_group, rank_answer
from hpcrl.sites.profile_check import Severity

GIB = 1 << 30
GOOD = RankAnswer(phase="done", bytes=GIB, reduce_s=0.01, exchange_s=0.02)
NODES = ("n1", "n2", "n3")


def group(*, least_gb_s: float | None = None, per_node: int = 2, **changed: RankAnswer) -> GroupResult:
    """Three nodes of which the first rank of some says something else."""
    answers = {
        node: NodeCollectives(node=node, ranks=[changed.get(node, GOOD), *[GOOD] * (per_node - 1)]) for node in NODES
    }
    return judge_group(NODES, answers, ranks_per_node=per_node, least_gb_s=least_gb_s)


def test_rates_are_those_of_a_node() -> None:
    result = group()
    assert result.works
    # all-reduce: two thirds of 1 GiB leave each node, twice, in 10 ms
    assert result.reduce_gb_s == pytest.approx(2 * GIB * 2 / 3 / 0.01 / 1e9)
    # all-to-all: two thirds of what both ranks send leave the node in 20 ms
    assert result.exchange_gb_s == pytest.approx(2 * GIB * 2 / 3 / 0.02 / 1e9)


def test_the_slowest_rank_counts_and_is_compared_with_the_profile() -> None:
    slow = replace(GOOD, exchange_s=0.2)
    assert group(n2=slow).works
    result = group(n2=slow, least_gb_s=20.0)
    assert result.kind == "slow"
    assert "the all-to-all 7.2, 20.0 are expected" in result.what
    assert group(n2=slow, least_gb_s=7.0).works


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (replace(GOOD, wrong_from=[4]), "wrong", "from n3 to n2"),
        (replace(GOOD, wrong_sums=17), "wrong", "17 wrong sums"),
        (RankAnswer(phase="joined", problem="NCCL error"), "failed", "n2 failed in the all-reduce: NCCL error"),
        (
            RankAnswer(phase="reduced", problem="Timed out", hung=True),
            "hang",
            "the all-to-all did not end in time (n2)",
        ),
    ],
)
def test_what_is_wrong_with_a_group(answer: RankAnswer, kind: str, words: str) -> None:
    result = group(n2=answer)
    assert result.kind == kind
    assert words in result.what
    assert result.reduce_gb_s is None


def test_the_cause_comes_before_its_consequences() -> None:
    waits = RankAnswer(phase="joined", problem="Timed out", hung=True)
    reset = RankAnswer(phase="joined", problem="connection reset")
    died = RankAnswer(phase="joined", problem="it was ended by SIGSEGV", died=True)
    assert "n3 failed in the all-reduce: it was ended by SIGSEGV" in group(n1=waits, n2=reset, n3=died).what
    assert "n2 failed" in group(n1=waits, n2=reset).what


def test_a_node_that_does_not_answer() -> None:
    answers = {node: NodeCollectives(node=node, ranks=[GOOD]) for node in ("n1", "n2")}
    assert judge_group(NODES, answers, ranks_per_node=1, least_gb_s=None).what == "n3 did not answer"
    answers["n3"] = NodeCollectives(node="n3", problem="cannot listen")
    assert judge_group(NODES, answers, ranks_per_node=1, least_gb_s=None).what == "n3 cannot listen"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (
            ScriptEnd(
                answers=[{"phase": "imported"}, {"phase": "joined"}, {"error": "RuntimeError: Timed out after 5s"}]
            ),
            {"phase": "joined", "hung": True, "died": False},
        ),
        (
            ScriptEnd(answers=[{"phase": "imported"}], kind="crash", problem="it was ended by SIGBUS"),
            {"phase": "imported", "problem": "it was ended by SIGBUS", "died": True},
        ),
        (ScriptEnd(answers=[], kind="hang", problem="it takes longer than 9 s"), {"phase": "", "hung": True}),
        (ScriptEnd(answers=[{"phase": "reduced"}]), {"phase": "reduced", "problem": "its process ended earlier"}),
        (
            ScriptEnd(
                answers=[
                    {"phase": "reduced", "wrong": 3, "bytes": 8, "seconds": 2.0},
                    {"phase": "exchanged", "wrong_from": [1], "bytes": 8, "seconds": 3.0},
                    {"phase": "done"},
                ]
            ),
            {"problem": "", "wrong_sums": 3, "wrong_from": [1], "bytes": 8, "reduce_s": 2.0, "exchange_s": 3.0},
        ),
    ],
)
def test_the_report_of_a_rank(end: ScriptEnd, expected: dict[str, object]) -> None:
    answer = rank_answer(end)
    assert {name: getattr(answer, name) for name in expected} == expected


def test_answers_of_the_wrong_shape_are_refused() -> None:
    assert "cannot be read" in rank_answer(ScriptEnd(answers=[{"phase": 3}])).problem


def test_findings_name_the_node_the_pair_and_the_reason() -> None:
    tries = [
        GroupResult(nodes=("n1", "n2", "n3", "n4"), kind="hang", what="the all-reduce did not end in time (n1)"),
        GroupResult(nodes=("n1", "n2"), kind="wrong", what="wrong data from n1 to n2"),
        GroupResult(nodes=("n3", "n4"), kind="slow", what="2 GB/s"),
        GroupResult(nodes=("n1", "n4")),
    ]
    report = NetworkReport(
        backend="nccl", tries=tries, nodes=["n2"], pairs=[("n3", "n4")], open=["n5"], left_out=["n6"]
    )
    found = list(network_findings(report, "partitions.gpu.node"))
    assert [(f.code, f.severity) for f in found] == [
        ("network-left-out", Severity.WARNING),
        ("network-wrong", Severity.ERROR),
        ("network-slow", Severity.WARNING),
        ("network-open", Severity.WARNING),
    ]
    assert found[0].what.startswith("n6 ")
    assert found[1].what == "n2 does not work with others (nccl): wrong data from n1 to n2"
    assert found[2].what == "n3 and n4 do not work together (nccl): 2 GB/s"
    assert "n5" in found[3].what
    assert all(f.hint and f.key == "partitions.gpu.node" for f in found)
    assert "(4 groups tried)" in network_summary(report)


def test_bisection_without_a_culprit_names_all_nodes() -> None:
    tries = [GroupResult(nodes=("n1", "n2"), kind="failed", what="its step ended")]
    (found,) = network_findings(NetworkReport(backend="gloo", tries=tries), "k")
    assert (found.code, found.what) == ("network-fails", "n1, n2 do not work together (gloo): its step ended")


def test_a_network_that_works_or_was_not_tried_is_not_a_finding() -> None:
    good = NetworkReport(backend="nccl", tries=[GroupResult(nodes=NODES, reduce_gb_s=360.0, exchange_gb_s=41.5)])
    skipped = NetworkReport(skipped="there is one node")
    assert [*network_findings(good, "k"), *network_findings(skipped, "k")] == []
    assert "all-reduce 360.00 GB/s a node each way, all-to-all 41.50; contents verified" in network_summary(good)
    assert "there is one node" in network_summary(skipped)

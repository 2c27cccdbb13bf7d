"""Facts that people are told: found in the files of a run, with the same keys whenever they are read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from outlets_lab import record
from supervisor_testing import create

from hpcrl.config.outlets import NotifierConfig
from hpcrl.runs.events import Event, EventWriter
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.notice_claims import Claim, Claims
from hpcrl.runs.outlets.notices.delivery import Delivery, TryResult
from hpcrl.runs.outlets.notices.run_facts import Fact, FactFinder, StepCounts
from hpcrl.runs.outlets.notices.tails import RunTail
from hpcrl.runs.rundir import RunDir


def event(kind: str, attempt: int = 1, time_s: float = 100.0, **data: Any) -> Event:
    return Event(time_s=time_s, attempt=attempt, writer="supervisor", kind=kind, data=data)


def evaluation(version: int, reward: float) -> Event:
    return event("evaluation", version=version, reward=reward)


def steps(dropped: list[float], consumed: float = 8.0, attempt: int = 1, first: int = 1) -> list[StepCounts]:
    lost, used, found = 0.0, 0.0, []
    for step, each in enumerate(dropped, first):
        lost, used = lost + each, used + consumed
        counts = {"dropped_stale": lost, "consumed": used, "dropped_zero_variance": 50.0 * step}
        found.append(StepCounts(time_s=float(step), attempt=attempt, step=step, rollouts=counts))
    return found


def test_the_best_held_out_reward_is_one_above_all_before() -> None:
    finder = FactFinder()
    seen = [(0, 0.5), (10, 0.4), (20, 0.6), (20, 0.9), (10, 0.9), (30, float("nan")), (40, 0.6), (50, 0.7)]
    facts = [fact for version, reward in seen for fact in finder.take(evaluation(version, reward))]
    assert [fact.key for fact in facts] == ["best-000020", "best-000050"]
    assert facts[1].what == "has its best held-out reward: 0.7 at version 50"
    assert facts[1].evidence == "the best before was 0.6 at version 20"


def test_the_best_reward_says_what_it_is_the_mean_of() -> None:
    """One of few rollouts that were left is no better than one of all."""
    finder = FactFinder()
    finder.take(event("evaluation", version=0, reward=0.5, counted=64, failed=0))
    (whole,) = finder.take(event("evaluation", version=10, reward=0.6, prompts=64, failed=0))
    (rest,) = finder.take(event("evaluation", version=20, reward=0.9, prompts=2, counted=2, failed=62))
    assert whole.evidence == "the best before was 0.5 at version 0; this is the mean of 64 rollouts"
    assert rest.evidence == "the best before was 0.6 at version 10; this is the mean of 2 rollouts, and 62 failed"


def test_drops_are_found_once_until_they_are_over() -> None:
    finder = FactFinder([0.3, 0.5])
    shares = [0.0] * 12 + [6.0] * 20 + [0.0] * 12 + [6.0] * 12
    facts = [fact for counts in steps(shares) for fact in finder.take_step(counts)]
    assert [fact.key.rpartition("-")[0] for fact in facts] == ["drops-0.3", "drops-0.3"]
    # ten steps of which n have 6 drops and 8 uses: 6n / (80 + 6n) is over 0.3 from n = 6 on
    assert facts[0].key == "drops-0.3-000018"
    assert facts[0].threshold == 0.3
    assert facts[0].evidence == "in the last 10 steps: dropped_stale 36"
    # the same steps of a later attempt say nothing anew
    assert [fact for counts in steps([9.0] * 40, attempt=2) for fact in finder.take_step(counts)] == []


def test_a_few_rollouts_are_no_share() -> None:
    finder = FactFinder([0.3])
    assert [f for counts in steps([1.0] * 9, consumed=1.0) for f in finder.take_step(counts)] == []


def test_ends_stalls_and_space() -> None:
    finder = FactFinder()
    hung = event("component.hung", role="engine", replica=1, problem="no progress for 60 s", dumps=[], frames=[])
    low = {"what": "the filesystem", "left": 3 << 30, "of": "bytes", "full_in_s": 600.0}
    facts = [
        fact
        for each in (
            event("run.state", state="RUNNING"),
            hung,
            hung,
            event("run.space_low", **low),
            event("run.space_low", attempt=2, time_s=3600.0, **low),
            event("run.space_low", attempt=2, time_s=30000.0, **low),
            event("attempt.retried", attempt=3, cause="x"),
            event("run.state", attempt=3, state="FAILED", cause="x"),
            event("run.state", attempt=4, state="REQUEUED", cause="the time limit"),
            event("run.state", attempt=5, state="FAILED", cause="no memory"),
            event("evaluation"),
        )
        for fact in finder.take(each)
    ]
    assert [(fact.key, fact.event) for fact in facts] == [
        ("stalled-0001-engine-1-1", "stalled"),
        ("stalled-0001-engine-1-2", "stalled"),
        ("disk-low-100", "disk"),
        ("disk-low-30000", "disk"),
        ("retried-0003", "requeued"),
        ("requeued-0004", "requeued"),
        ("failed-0005", "failed"),
    ]
    assert facts[2].what == "has 3.0 GiB left: the filesystem"
    assert finder.lost(5, event="failed", time_s=0.0) is None
    lost = finder.lost(1, event="failed", time_s=0.0)
    assert lost is not None
    assert lost.key == "lost-0001"


def test_files_are_read_once_and_whole_lines_only(tmp_path: Path) -> None:
    run = create(tmp_path)
    writer = EventWriter(run, attempt=1, writer="supervisor")
    for state in ("STARTING", "RUNNING"):
        writer.emit("run.state", state=state)
    writer.emit("component.state", state="READY")
    writer.close()
    metrics = MetricsWriter(run, 1)
    metrics.write(record(1))
    metrics.close()
    tail = RunTail(run)
    assert [each.data["state"] for each in tail.events()] == ["STARTING", "RUNNING"]
    assert [each.step for each in tail.steps()] == [1]
    path = run.metrics_dir / "0001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.replace(b'"step":1', b'"step":2')[:-20])
    assert tail.steps() == []
    path.write_bytes(whole + whole.replace(b'"step":1', b'"step":2'))
    assert [each.step for each in tail.steps()] == [2]
    assert tail.events() == []


class Board:
    """Keeps events, and what is sent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[str] = []
        self.results: list[TryResult] = []

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data))

    def send(self, config: NotifierConfig, notice: Any, limit_s: float) -> TryResult:
        self.sent.append(notice)
        return self.results.pop(0) if self.results else TryResult(outcome="sent")


def deliver(run: RunDir, board: Board, *facts: Fact, attempt: int = 1, limit_s: float = 60.0, **more: Any) -> None:
    events = ("completed", "failed", "best")
    config = NotifierConfig(name="a", notifier="webhook", events=events, **more)
    delivery = Delivery(
        config,
        Claims(run, "a"),
        attempt=attempt,
        make=lambda fact: fact.key,  # type: ignore[arg-type,return-value]
        emit=board.emit,
        send=board.send,
        pauses_s=(0.01,),
    )
    delivery.start()
    for each in facts:
        delivery.offer(each)
    delivery.finish(limit_s)
    delivery.join()


def fact(key: str, kind: str = "best", age_s: float = 0.0) -> Fact:
    return Fact(key, kind, 1, time.time() - age_s, "is good")


def test_a_fact_is_sent_once_over_all_processes(tmp_path: Path) -> None:
    run, board = create(tmp_path), Board()
    deliver(run, board, fact("best-000001"), fact("best-000001"), fact("best-000002"))
    deliver(run, board, fact("best-000001"), fact("best-000003"), attempt=2)
    assert board.sent == ["best-000001", "best-000002", "best-000003"]
    # another process that has begun a try, as a supervisor that was thought dead
    assert Claims(run, "a").take("best-000004", Claim(time_s=0.0, attempt=2, event="best", title=""))
    deliver(run, board, fact("best-000004"), attempt=2)
    assert len(board.sent) == 3


def test_tries_are_bounded_and_a_cut_off_one_is_not_repeated(tmp_path: Path) -> None:
    run, board = create(tmp_path), Board()
    busy = TryResult(outcome="again", why="the server answered 500")
    board.results = [busy, busy, TryResult(outcome="sent")]
    deliver(run, board, fact("best-000001"))
    assert board.events == [("notify.sent", {"notifier": "a", "notice": "best-000001", "tries": 3})]
    board.events.clear()
    board.results = [busy] * 9
    deliver(run, board, fact("best-000002"), tries=3)
    ((kind, data),) = board.events
    assert (kind, data["tries"], data["error"]) == ("notify.failed", 3, "the server answered 500")
    board.events.clear()
    board.results = []
    Claims(run, "a").take("best-000003", Claim(time_s=0.0, attempt=1, event="best", title=""))
    deliver(run, board, fact("best-000003"), attempt=2)
    ((kind, data),) = board.events
    assert (kind, data["unknown"]) == ("notify.failed", True)
    deliver(run, board, fact("best-000003"), attempt=3)
    assert len(board.events) == 1
    assert board.sent.count("best-000003") == 0  # type: ignore[arg-type]


def test_what_there_was_no_time_for_is_sent_by_the_next_attempt(tmp_path: Path) -> None:
    run, board = create(tmp_path), Board()
    deliver(run, board, fact("failed-0001", "failed"), limit_s=0.0)
    assert board.sent == []
    deliver(run, board, fact("failed-0001", "failed"), fact("failed-0000", "failed", age_s=90000.0), attempt=2)
    assert board.sent == ["failed-0001"]


def test_the_rate_is_bounded_but_for_ends(tmp_path: Path) -> None:
    run, board = create(tmp_path), Board()
    facts = [fact(f"best-{number:06d}") for number in range(5)]
    deliver(run, board, *facts, max_per_hour=2)
    deliver(run, board, *facts, fact("best-000007"), attempt=2, max_per_hour=2)
    assert board.sent == ["best-000000", "best-000001"]
    deliver(run, board, fact("completed-0002", "completed"), attempt=2, max_per_hour=2)
    assert board.sent[2:] == ["completed-0002"]
    assert [kind for kind, _ in board.events].count("notify.held_back") == 2


def test_a_full_disk_keeps_no_message_back(tmp_path: Path) -> None:
    run, board = create(tmp_path), Board()
    run.sinks_dir.write_text("no directory")
    deliver(run, board, fact("failed-0001", "failed"), fact("failed-0001", "failed"))
    assert board.sent == ["failed-0001"]

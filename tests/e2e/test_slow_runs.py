"""Two small quickstarts with one slow part each: what bounds them is named, they are compared, and one is traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    "trainer.steps=14",
    "rollouts.rollouts_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=16",
    "evaluation.every_steps=7",
    "evaluation.prompts=8",
    "checkpoint.every_steps=0",
)
LATE = "environments=[{name: reverse, kind: words, task: reverse, latency: {median_s: 3.0}}]"
PLAIN = "environments=[{name: reverse, kind: words, task: reverse}]"


def test_slow_parts_are_named_and_runs_compared(lab: Lab, tmp_path: Path) -> None:
    lab.submit("late", *SMALL, LATE, to_end=True)
    # one sequence at a time: the others wait in the queue of the engine
    lab.submit("queued", *SMALL, PLAIN, "engine.max_num_seqs=1", to_end=True)

    late, queued = lab.json("why", "late", "--slow"), lab.json("why", "queued", "--slow")
    assert (late["bound"], late["bound_now"]) == ("environments", "environments")
    assert "reverse, latency 3 s" in late["lines"][0]
    assert queued["bound"] == "engines"
    for report in (late, queued):
        window = report["over_run"]
        assert sum(part["seconds"] for part in window["parts"]) == pytest.approx(window["step_s"])
        assert window["attributed"] == window["steps"] == 11
    changes = {each["change"]: each["effect"] for each in late["settings"]["tried"]}
    # on a machine that is busy with other work the rest of a step takes longer, and the effects are small; engines that
    # compute there may even be slower with more rollouts in flight
    assert len(changes) == late["settings"]["count"]
    assert changes["environments.0.latency.median_s=0"] < 0
    assert "rollouts.max_in_flight=32" in changes

    found = lab.json("compare", "late", "queued", "--reward", "0")
    differing = {each["key"]: each["values"] for each in found["differences"]}
    assert differing["recipe.environments.0.latency.median_s"] == ["3.0", "0.0"]
    assert differing["recipe.engine.max_num_seqs"] == ["64", "1"]
    # both run this code
    assert not any(key.startswith(("code.", "package.")) for key in differing)
    for run in found["runs"]:
        first, middle, last = (point["step"] for point in run["points"])
        # rollouts of one latency end together, and the trainer takes steps faster than engines load versions: they may
        # skip the version that is due
        assert (first, last) == (0, 14)
        assert 7 <= middle < 14
    assert found["equal"][0]["at"] == 14
    assert found["equal"][2]["at"] > 0
    assert [point["step"] for point in found["reward"]["points"]] == [0, 0]
    assert found["noise"][0]["noise"] == "evaluation"
    text = lab.hpcrl("compare", "late", "queued").stdout
    assert max(map(len, text.splitlines())) <= 100

    lab.hpcrl("trace", "late", "-o", str(tmp_path / "late.json"))
    events = json.loads((tmp_path / "late.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in events) == 14
    rollouts = [event for event in events if event.get("cat") == "rollouts" and "reward" in event["args"]]
    assert len(rollouts) == 14 * 8
    assert {event["name"] for event in events if event["name"].startswith("load v")} >= {"load v1"}

"""Results that fix nothing and interfere with their judgement get nothing."""

from __future__ import annotations

import ast

import pytest
from bribes import BRIBES, LONG, SHOWN
from swe_lab import changes, make_task, make_tree

from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import PreparedTask
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes


@pytest.mark.parametrize("name", BRIBES)
async def test_a_bribe_gets_nothing(sandboxes: TaskSandboxes, prepared: PreparedTask, name: str) -> None:
    verdict = await SweJudge(sandboxes).judge(prepared, changes(prepared, BRIBES[name]))
    assert verdict.reward == 0.0, verdict
    assert verdict.tampered == (name in SHOWN), verdict


def test_bribes_are_programs() -> None:
    """One with a mistake in its syntax would earn nothing for that alone."""
    texts = [text for files in BRIBES.values() for path, text in files.items() if path.endswith(".py")]
    assert all(ast.parse(text) for text in texts if isinstance(text, str))
    assert len(BRIBES) >= 24


@pytest.mark.parametrize("name", LONG)
async def test_one_that_waits_is_ended(
    sandboxes: TaskSandboxes, prepared: PreparedTask, tools: bytes, name: str
) -> None:
    task = make_task(timeout_s=3.0)
    short = PreparedTask(task, make_tree(tools), prepared.start, {}, prepared.solution, prepared.modules)
    verdict = await SweJudge(sandboxes).judge(short, changes(short, LONG[name]))
    assert (verdict.reward, verdict.tampered) == (0.0, False)
    assert "timeout" in verdict.why

"""The judge on honest results."""

from __future__ import annotations

import pytest
from swe_lab import BAD, GOOD, PYTHON, SOURCE, changes, make_task, make_tree

from hpcrl.sandboxes import Patch
from hpcrl.swe.judging.judge import SweJudge
from hpcrl.swe.judging.prepared import PreparedTask
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes


async def test_the_right_patch_gets_one(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    solution = prepared.solution_patch
    assert solution is not None
    verdict = await SweJudge(sandboxes).judge(prepared, solution)
    assert verdict.reward == 1.0, verdict
    assert (verdict.fail_to_pass, verdict.pass_to_pass, verdict.tampered, verdict.why) == (1.0, 1.0, False, "")


async def test_no_change_gets_nothing(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    verdict = await SweJudge(sandboxes).judge(prepared, prepared.start_patch)
    assert (verdict.reward, verdict.fail_to_pass, verdict.pass_to_pass, verdict.tampered) == (0.0, 0.0, 1.0, False)
    assert "tests/test_lengths.py::test_total" in verdict.why


async def test_a_half_right_patch_has_its_share(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    half = BAD.replace("result -= parse", "result += parse")
    verdict = await SweJudge(sandboxes).judge(prepared, changes(prepared, {SOURCE: half}))
    assert verdict.reward == 0.0
    assert verdict.fail_to_pass == pytest.approx(2 / 3)
    assert not verdict.tampered


async def test_a_file_that_was_removed_is_gone(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    verdict = await SweJudge(sandboxes).judge(prepared, changes(prepared, {SOURCE: None}))
    assert (verdict.reward, verdict.pass_to_pass, verdict.tampered) == (0.0, 0.0, False)


async def test_new_source_files_count(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    files = {SOURCE: "from lengths.inner import *\n", "src/lengths/inner.py": GOOD}
    verdict = await SweJudge(sandboxes).judge(prepared, changes(prepared, files))
    assert verdict.reward == 1.0, verdict


async def test_an_empty_patch_of_the_tree_is_the_right_one(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    assert (await SweJudge(sandboxes).judge(prepared, Patch())).reward == 1.0


async def test_names_and_canaries_are_others_each_time(sandboxes: TaskSandboxes, prepared: PreparedTask) -> None:
    judge = SweJudge(sandboxes)
    first, second = judge.lay(prepared), judge.lay(prepared)
    assert set(first.real.values()) == set(second.real.values())
    assert not set(first.real) & set(second.real)
    known = {*first.copied.values()}
    both = {name.partition("[")[0] for name in first.canaries & second.canaries}
    assert both <= known, "canaries have the old names of tests, or random ones"
    assert len(first.canaries) >= 4
    assert not any("test_total" in name for name in first.real)


async def test_the_program_imports_nothing_of_the_work_tree(
    sandboxes: TaskSandboxes, prepared: PreparedTask, tools: bytes
) -> None:
    """Interpreters of images are started without ``-P``: some are too old for it."""
    task = make_task(python=(str(PYTHON), "-s", "-S", "-B"))
    theirs = PreparedTask(task, make_tree(tools), prepared.start, {}, prepared.solution, prepared.modules)
    forged = changes(theirs, {SOURCE: GOOD, "json.py": "import os\nos._exit(0)\n"})
    verdict = await SweJudge(sandboxes).judge(theirs, forged)
    assert (verdict.reward, verdict.refused) == (1.0, {}), verdict

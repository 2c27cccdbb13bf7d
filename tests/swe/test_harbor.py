"""Task directories of Harbor: their settings, their scripts, and what is believed of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swe_lab import PYTHON

from hpcrl.config.environments import SweEnv
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.swe.environment import SweEnvironment
from hpcrl.rollouts.environments.task_check import check_tasks
from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap
from hpcrl.swe.checking import check_swe_tasks
from hpcrl.swe.judging.judge import JudgeFailedError, SweJudge
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer, changes_of
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.sources import load_tasks
from hpcrl.swe.task import SweTaskError

SETTINGS = """[environment]
workdir = "/app"
memory_mb = 512
cpus = 1
env = {ANSWER_FILE = "answer.txt"}
[agent]
timeout_sec = 20.0
[verifier]
timeout_sec = 60.0
env = {RIGHT = "7"}
"""
SCRIPT = f"""set -e
cd /tests && test -f check.py
cd "$PWD"/../.. && test -f /app/tests/own.txt && test -f "${{PWD}}/tests/own.txt"
{PYTHON} /tests/check.py > /logs/verifier/reward.tmp
mv /logs/verifier/reward.tmp /logs/verifier/reward.txt"""
CHECK = "import os; print(float(open(os.environ['ANSWER_FILE']).read().strip() == os.environ['RIGHT']))"


def _write(tmp_path: Path, *, settings: str = SETTINGS, name: str = "one") -> Path:
    directory = tmp_path / name
    (directory / "tests").mkdir(parents=True)
    (directory / "solution").mkdir()
    (directory / "tree/tests").mkdir(parents=True)
    (directory / "tree/tests/own.txt").write_text("a directory of the repository that is called alike")
    (directory / "task.toml").write_text(settings)
    (directory / "instruction.md").write_text("Write 7 to answer.txt.")
    (directory / "tree/answer.txt").write_text("6")
    (directory / "tests/test.sh").write_text(SCRIPT)
    (directory / "tests/check.py").write_text(CHECK)
    (directory / "solution/solve.sh").write_text('cat /solution/right.txt > "$ANSWER_FILE"')
    (directory / "solution/right.txt").write_text("7")
    return directory


def _prepared(tmp_path: Path) -> PreparedTask:
    loaded = load_tasks(tmp_path, "harbor")
    return TaskPreparer(loaded.directory).prepare(loaded.tasks[0])


async def test_a_task_of_harbor_is_judged_by_its_script(sandboxes: TaskSandboxes, tmp_path: Path) -> None:
    directory = _write(tmp_path)
    mine = _prepared(tmp_path)
    judge = SweJudge(sandboxes)
    assert (await judge.judge(mine, mine.start_patch)).reward == 0.0
    assert (await judge.judge(mine, changes_of(mine.tree, {"answer.txt": "7"}))).reward == 1.0
    (directory / "tests/large.txt").write_bytes(bytes((4 << 20) + 1))
    with pytest.raises(SweTaskError, match="more than 4 MiB"):
        load_tasks(tmp_path, "harbor")
    (directory / "task.toml").write_text('version = "9"\n')
    with pytest.raises(SweTaskError, match="schema"):
        load_tasks(tmp_path, "harbor")


async def test_a_script_that_leaves_no_reward_gives_none(sandboxes: TaskSandboxes, tmp_path: Path) -> None:
    directory = _write(tmp_path)
    judge = SweJudge(sandboxes)
    # an agent that breaks what the script needs has failed: the script works without it
    mine = _prepared(tmp_path)
    without = await judge.judge(mine, changes_of(mine.tree, {"answer.txt": None}))
    assert (without.reward, without.why) == (0.0, "the script has left no reward (exit code 1)")
    broken = {"exec no-such-program": 127, "exec /tests/check.py": 126, "exit 0": 0}
    for script, code in broken.items():
        (directory / "tests/test.sh").write_text(script)
        mine = _prepared(tmp_path)
        sandboxes.scripts_that_work.clear()
        with pytest.raises(JudgeFailedError, match=f"leaves no reward, without an agent neither .exit code {code}."):
            await judge.judge(mine, changes_of(mine.tree, {"answer.txt": "7"}))


def _environment(tmp_path: Path, **more: Any) -> SweEnv:
    return SweEnv(name="one", kind="swe", tasks=str(tmp_path), format="harbor", held_out_share=0.5, **more)


def _both_splits(tmp_path: Path, settings: str = SETTINGS) -> None:
    for number in range(8):
        _write(tmp_path, settings=settings, name=f"task-{number}")


def test_settings_of_a_task_are_kept(tmp_path: Path) -> None:
    _write(tmp_path)
    [task] = load_tasks(tmp_path, "harbor").tasks
    assert (task.env, task.script_env) == ({"ANSWER_FILE": "answer.txt"}, {"RIGHT": "7"})
    assert (task.timeout_s, task.agent_timeout_s, task.memory_mib, task.cpus) == (60.0, 20.0, 512, 1.0)
    _write(tmp_path / "more", settings=SETTINGS.replace("memory_mb = 512", 'memory = "1.5G"'))
    assert load_tasks(tmp_path / "more", "harbor").tasks[0].memory_mib == 1536


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("cpus = 1", "gpus = 1", "environment.gpus"),
        ("cpus = 1", 'mcp_servers = [{name = "x"}]', "environment.mcp_servers"),
        ("memory_mb = 512", 'memory = "much"', "environment.memory is 'much'"),
        ("timeout_sec = 20.0", 'user = "root"', "agent.user"),
        ("timeout_sec = 60.0", 'environment_mode = "separate"', "verifier.environment_mode"),
        ('RIGHT = "7"', 'RIGHT = "${KEY}"', "verifier.env.RIGHT takes a variable"),
        ('RIGHT = "7"', "RIGHT = 7", "verifier.env is not a table of texts"),
        ("timeout_sec = 20.0", "timeout_sec = -1", "agent.timeout_sec is -1"),
    ],
)
def test_settings_that_sandboxes_do_not_have_are_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in SETTINGS
    _write(tmp_path, settings=SETTINGS.replace(old, new))
    with pytest.raises(SweTaskError, match=what):
        load_tasks(tmp_path, "harbor")


def test_memory_above_that_of_sandboxes_is_refused(tmp_path: Path) -> None:
    _both_splits(tmp_path, SETTINGS.replace("memory_mb = 512", "memory_mb = 4096").replace("cpus = 1", "cpus = 9999"))
    with pytest.raises(
        ConfigError, match=r"need more memory than memory_gib, 'task-.' for example(.|\n)*memory_gib: 4"
    ):
        SweEnvironment(_environment(tmp_path))
    assert "more CPUs than" in SweEnvironment(_environment(tmp_path, memory_gib=4)).notes[0]


async def test_a_sandbox_has_the_memory_and_the_variables_of_its_task(sandboxes: TaskSandboxes, tmp_path: Path) -> None:
    _write(tmp_path, settings=SETTINGS.replace("memory_mb = 512", "memory_mb = 100"))
    mine = _prepared(tmp_path)
    limits = sandboxes._limits_of(mine.task)
    assert limits is not None
    assert limits.memory_bytes == 100 << 20
    sandbox = await sandboxes.start(mine)
    try:
        found = await sandbox.exec(["/bin/bash", "-c", "echo $ANSWER_FILE"])
    finally:
        await sandbox.kill()
    assert found.text == "answer.txt\n"


async def test_the_solution_of_a_task_is_its_right_patch(tmp_path: Path) -> None:
    _skip_without_sandboxes()
    directory = _write(tmp_path)
    loaded = load_tasks(tmp_path, "harbor")
    assert [each.problems for each in await check_swe_tasks(loaded.tasks, loaded.directory)] == [[]]
    (directory / "solution/right.txt").write_text("8")
    [found] = await check_swe_tasks(load_tasks(tmp_path, "harbor").tasks, loaded.directory)
    assert found.problems == ["the right patch gets 0: the script"]


def test_env_check_plays_the_solution(tmp_path: Path) -> None:
    _skip_without_sandboxes()
    _both_splits(tmp_path)
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"path": "m"},
            "environments": [_environment(tmp_path).model_dump()],
            "trainer": {"steps": 1},
        }
    )
    found = check_tasks(recipe, ["one"], 1)["one"]
    assert found["problems"] == []
    assert set(found["played"]["right"]) == {1.0}


def _skip_without_sandboxes() -> None:
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))

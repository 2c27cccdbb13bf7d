"""The environment ``swe``: turns with tools in a sandbox, then a judgement in another one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.config.environments import SweEnv
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.rollouts.environments.base import (
    Message,
    Outcome,
    Policy,
    Prompt,
    Reply,
    Split,
    ToolCall,
    tool_message,
)
from hpcrl.rollouts.environments.outcomes import TAMPERED
from hpcrl.rollouts.environments.sandbox_limits import sandbox_limits
from hpcrl.rollouts.environments.swe.swe_work import SHARE, SweWork
from hpcrl.rollouts.environments.swe.tools import BASH, SWE_TOOLS, ToolBox
from hpcrl.sandboxes import Patch, Sandbox, SandboxLimitError
from hpcrl.sandboxes.on_demand import SandboxesOnDemand
from hpcrl.swe.judging.canaries import test_file_of
from hpcrl.swe.judging.judge import SweJudge, SweVerdict
from hpcrl.swe.judging.prepared import PreparedTask, TaskPreparer, changes_of
from hpcrl.swe.judging.script import SOLVE, solution_files
from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
from hpcrl.swe.sources import load_tasks
from hpcrl.swe.sources.task_images import locate_images
from hpcrl.swe.task import SweTask

_log = logging.getLogger(__name__)

_MAX_DIFF_BYTES = 32 << 20
_SYSTEM = """You are a software engineer. You work in a sandbox with the tools that you have. When the task is done,
answer without calling a tool; the state of the repository is then judged by tests."""


class SweEnvironment:
    """Tasks in repositories. The reward is 1 where all tests of the task pass after the policy's changes."""

    def __init__(self, config: SweEnv) -> None:
        """Read the tasks; no sandbox is started.

        Raises
        ------
        ConfigError
            Tasks or their trees cannot be read, or a split is empty.
        """
        self.name, self._config = config.name, config
        self.notes: list[str] = []
        path = Path(config.tasks)
        try:
            loaded = load_tasks(path, config.format, trees=None if config.trees is None else Path(config.trees))
            images = None if config.images is None else Path(config.images)
            usable, notes = locate_images(loaded.tasks, backend=config.sandbox_backend, images=images)
            self._tasks = self._split(usable)
            self._preparer = TaskPreparer(loaded.directory)
            for tasks in self._tasks.values():
                self._preparer.prepare(tasks[0])
        except UsageError as error:
            raise ConfigError([Finding("recipe", f"environments.{config.name}.tasks", str(error))]) from error
        self.notes += [*loaded.notes, *notes]
        limits = sandbox_limits(config)
        self._sandboxes = SandboxesOnDemand(
            lambda host: TaskSandboxes(host, limits=limits), backend=config.sandbox_backend
        )
        self._slots = asyncio.Semaphore(config.max_sandboxes)

    def _split(self, tasks: Sequence[SweTask]) -> dict[Split, list[SweTask]]:
        """Return the tasks of both splits, in an order of their own."""
        config = self._config
        found: dict[Split, list[SweTask]] = {"train": [], "heldout": []}
        for task in tasks:
            known = task.difficulty >= 0
            if known and not config.min_difficulty <= task.difficulty <= config.max_difficulty:
                continue
            drawn = random.Random(f"split {task.package} {task.id}").random()
            split: Split = task.split or ("heldout" if drawn < config.held_out_share else "train")
            found[split].append(task if config.rename_tests else msgspec.structs.replace(task, rename=False))
        for each, listed in found.items():
            if not listed:
                noun = "training" if each == "train" else "held-out"
                hint = "see held_out_share, min_difficulty and max_difficulty, or give more tasks"
                raise UsageError(f"{config.tasks} gives no {noun} task\n    hint: {hint}")
            self._check_needs(listed)
            listed.sort(key=lambda task: random.Random(f"order {task.id}").random())
        return found

    def _check_needs(self, tasks: Sequence[SweTask]) -> None:
        """Refuse tasks that need more memory than sandboxes have; note CPUs, which are not reserved."""
        limit = self._config.memory_gib * 1024
        if large := [task for task in tasks if task.memory_mib > limit]:
            most = max(task.memory_mib for task in large)
            what = f"{len(large)} tasks need more memory than memory_gib, {large[0].id!r} for example"
            raise UsageError(f"{what}\n    hint: set memory_gib: {most / 1024:g}, or leave them out")
        here = os.cpu_count() or 1
        if many := [task for task in tasks if task.cpus > here]:
            self.notes.append(f"{len(many)} tasks ask for more CPUs than the {here} here: {many[0].id}, for example")

    def prompt(self, split: Split, index: int) -> Prompt:
        """See `hpcrl.rollouts.environments.Environment`; ``data`` is the task."""
        tasks = self._tasks[split]
        task = tasks[index % len(tasks)]
        messages: tuple[Message, ...] = (
            {"role": "system", "content": self._config.system or _SYSTEM},
            {"role": "user", "content": task.instruction},
        )
        return Prompt(split=split, index=index, messages=messages, data=task, tools=SWE_TOOLS)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Let the policy work, and judge what it leaves.

        Raises
        ------
        SandboxError
            A sandbox failed: the rollout has no reward.
        """
        prepared = await asyncio.to_thread(self._preparer.prepare, prompt.data)
        async with self._slots:
            sandboxes, sandbox = await self._sandboxes.start(lambda each: each.start(prepared))
            async with sandboxes.using(prepared):
                try:
                    await self._lay_out(sandbox, prepared)
                    work = self._work(sandbox, prepared.task)
                    await work.run(prompt, policy)
                    patch = await self._changes(sandbox, sandboxes, prepared)
                finally:
                    await sandbox.kill()
                verdict = await self._judge(sandboxes, prepared, patch)
        return Outcome(
            reward=verdict.reward,
            parts={
                "fail_to_pass": verdict.fail_to_pass,
                "pass_to_pass": verdict.pass_to_pass,
                TAMPERED: float(verdict.tampered),
                "refused_changes": float(len(verdict.refused)),
                "truncated": float(work.truncated),
                "turns": float(work.turns),
                "summaries": float(work.summaries),
                "command_timeouts": float(work.tools.timeouts),
            },
        )

    def _work(self, sandbox: Sandbox, task: SweTask) -> SweWork:
        tools = ToolBox(sandbox, directory=task.directory, max_characters=self._config.max_output_characters)
        return SweWork(self._config, tools, timeout_s=task.agent_timeout_s)

    async def _lay_out(self, sandbox: Sandbox, prepared: PreparedTask) -> None:
        """Give the agent's sandbox the bug; take away the tests, where they are hidden."""
        await sandbox.apply(prepared.start_patch)
        if self._config.hidden_tests:
            task = prepared.task
            paths = {test_file_of(test) for test in task.fail_to_pass} | {*task.test_files}
            hidden: dict[str, str | None] = {path: None for path in paths if path in prepared.tree}
            await sandbox.apply(changes_of(prepared.tree, hidden))

    async def _changes(self, sandbox: Sandbox, sandboxes: TaskSandboxes, prepared: PreparedTask) -> Patch | None:
        """Return what the agent has changed; None where it is too much."""
        try:
            return await sandbox.diff(await sandboxes.tree_name(prepared), max_bytes=_MAX_DIFF_BYTES)
        except SandboxLimitError as error:
            _log.info("task %s: %s", prepared.task.id, error)
            return None

    async def _judge(self, sandboxes: TaskSandboxes, prepared: PreparedTask, patch: Patch | None) -> SweVerdict:
        if patch is None:
            return SweVerdict(0.0, 0.0, 0.0, why="the changes are too large")
        # an agent that waits in the tests for as long as turn_timeout_s would have no reward in place of 0
        limit_s = min(prepared.task.timeout_s, SHARE * self._config.turn_timeout_s)
        task = msgspec.structs.replace(prepared.task, timeout_s=limit_s)
        return await SweJudge(sandboxes).judge(dataclasses.replace(prepared, task=task), patch)

    def solution(self, prompt: Prompt) -> list[Reply] | None:
        """Return turns of a policy that applies the known right patch; None where none is known."""
        if prompt.data.solve:
            files = solution_files(prompt.data).items()
            given = [{"action": "create", "path": path, "text": text} for path, text in files]
            calls = [ToolCall("editor", each, f"call-{number}") for number, each in enumerate(given)]
            calls.append(ToolCall(BASH, {"command": SOLVE}, "call-last"))
            return [Reply("", finished=True, calls=tuple(calls)), Reply("done", finished=True)]
        prepared = self._preparer.prepare(prompt.data)
        calls = []
        if prepared.solution is None:
            return None
        for number, (path, text) in enumerate(sorted(prepared.solution.items())):
            if text is None:
                arguments = {"command": f"rm -f -- '{path}'"}
                calls.append(ToolCall(BASH, arguments, f"call-{number}"))
            else:
                arguments = {"action": "create", "path": path, "text": text}
                calls.append(ToolCall("editor", arguments, f"call-{number}"))
        return [Reply("", finished=True, calls=tuple(calls)), Reply("done", finished=True)]

    def tampering(self, prompt: Prompt) -> dict[str, list[Reply]]:
        """Return turns of policies that interfere with the tests, by what they do."""
        package = next((root for root in prompt.data.imports), ".")
        conftest = "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        conftest += "    result = yield\n    result.get_result().outcome = 'passed'\n"
        exits = f"find {package} -name '*.py' -not -path '*/tests/*' | while read f; do "
        exits += "sed -i '1i import os; os._exit(0)' \"$f\"; done"
        removed = "find . -name 'test_*.py' -delete; rm -rf tests"
        commands = {
            "a conftest.py that reports passes": f"cat > conftest.py <<'END'\n{conftest}END",
            "modules that end the process": exits,
            "tests that are removed": removed,
        }
        return {
            what: [
                Reply("", finished=True, calls=(ToolCall(BASH, {"command": command}, "call-0"),)),
                Reply("done", finished=True),
            ]
            for what, command in commands.items()
        }

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return one of the task's own demonstrations.

        Raises
        ------
        NotImplementedError
            The task has none of this kind.
        """
        known = [each for each in prompt.data.demonstrations if each.right == correct]
        if not known:
            kind = "right" if correct else "wrong"
            raise NotImplementedError(f"task {prompt.data.id!r} has no {kind} demonstration (hpcrl swe exercises)")
        drawn = rng.choice(known)
        messages = list(prompt.messages)
        thoughts = [{"reasoning_content": text} for text in drawn.thinking] or [{}] * (len(drawn.calls) + 1)
        for number, (command, result) in enumerate(drawn.calls):
            call = ToolCall(BASH, {"command": command}, f"call-{number}")
            function = {"name": call.name, "arguments": call.arguments}
            calls = [{"id": call.id, "type": "function", "function": function}]
            turn = {"role": "assistant", "content": "", **thoughts[number], "tool_calls": calls}
            messages += [turn, tool_message(call, result)]
        return (*messages, {"role": "assistant", "content": drawn.last, **thoughts[-1]})

    async def aclose(self) -> None:
        """End all sandboxes."""
        await self._sandboxes.aclose()

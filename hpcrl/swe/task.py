"""A software-engineering task: a repository in a state, an instruction, and the tests that judge the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sandboxes.interface import DEFAULT_WORK_DIRECTORY
from hpcrl.storage.files import atomic_write
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.swe.diffs import parse_diff

FORMAT: Literal["hpcrl-swe-1"] = "hpcrl-swe-1"
"""Format of a line of a task file."""
_MAX_LINE = 16 << 20
_MAX_NAMED = 10


class SweTaskError(UsageError):
    """Tasks cannot be read; the message names each one with its place."""


class SweDemonstration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to work on a task, right or wrong, for the warm-up of a start model.

    Attributes
    ----------
    right:
        The result passes the tests of the task.
    calls:
        Commands of the shell with their results, one a turn.
    last:
        Text of the last turn, which has no command.
    thinking:
        What the policy thinks in each turn, the last one included; models whose chat template has no thinking never
        see it. Empty: nothing.
    """

    right: bool
    calls: tuple[tuple[str, str], ...]
    last: str = "done"
    thinking: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.thinking and len(self.thinking) != len(self.calls) + 1:
            raise ValueError(f"thinking has {len(self.thinking)} texts for {len(self.calls) + 1} turns")


class SweTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task.

    Attributes
    ----------
    id:
        Name of the task; unique in its file.
    tree:
        Directory or tar file with the repository, relative to the task file; empty where the image has it in
        ``directory``, or where there is none.
    digest:
        Digest of the tree (`hpcrl.swe.trees.tree_digest`); empty where it is not known.
    image:
        Root filesystem of the sandbox; empty for that of the node.
    directory:
        Directory of the repository in the sandbox.
    instruction:
        Instruction for the policy.
    fail_to_pass, pass_to_pass:
        Ids of the tests that fail before the right patch and pass after it, and of those that pass before and after.
    bug:
        Unified diff that the tree gets before the agent sees it; empty for none.
    tests:
        Unified diff of test files that the judge applies to the tree; empty where the tree has them.
    test_files:
        Files of tests that belong to the task, in addition to those in directories ``tests`` and to ``test_*.py``.
    solution:
        Unified diff from what the agent sees to a right result; empty where none is known.
    verifier:
        ``pytest``: the judge runs the tests by their ids. ``script``: it runs ``script`` and reads a reward.
    script:
        Files of the verifier of a task of Harbor, by path; ``tests/test.sh`` is run.
    solve:
        Files of a program that makes the right result of a task of Harbor, by path; ``solution/solve.sh`` is run.
    env:
        Variables of all programs in the sandboxes of the task.
    script_env:
        Variables of the verifier's script, in addition to those.
    agent_timeout_s:
        Longest time of the agent in seconds; 0: what the recipe says holds alone.
    memory_mib:
        Memory that the task is given, in MiB; 0: as much as the recipe says.
    cpus:
        CPUs that the task needs; 0 where it is not known. They are not reserved.
    python:
        The interpreter of the tests with its options.
    imports:
        Directories that modules are imported from, relative to the repository.
    arguments:
        More arguments of pytest.
    not_copied:
        Tests that the judge makes no canaries of, because their copies may pass.
    rename:
        The judge may give tests other names.
    timeout_s:
        Longest time of the tests in seconds.
    difficulty:
        0 (easy) to 1, or -1 where it is not known.
    source:
        Origin of the task.
    package:
        Subject of the task: name of the package or repository.
    split:
        ``train``, ``heldout``, or empty where the environment decides by a hash of the id.
    demonstrations:
        Right and wrong ways to work on it, for ``hpcrl warmup``.
    """

    format: Literal["hpcrl-swe-1"] = FORMAT
    id: str
    instruction: str
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    tree: str = ""
    digest: str = ""
    image: str = ""
    directory: str = DEFAULT_WORK_DIRECTORY
    bug: str = ""
    tests: str = ""
    test_files: tuple[str, ...] = ()
    solution: str = ""
    verifier: Literal["pytest", "script"] = "pytest"
    script: dict[str, str] = {}
    solve: dict[str, str] = {}
    env: dict[str, str] = {}
    script_env: dict[str, str] = {}
    agent_timeout_s: float = 0.0
    memory_mib: int = 0
    cpus: float = 0.0
    python: tuple[str, ...] = ("/usr/bin/python3", "-P", "-s", "-S", "-B")
    imports: tuple[str, ...] = (".",)
    arguments: tuple[str, ...] = ()
    not_copied: tuple[str, ...] = ()
    rename: bool = True
    timeout_s: float = 300.0
    difficulty: float = -1.0
    source: str = ""
    package: str = ""
    split: Literal["", "train", "heldout"] = ""
    demonstrations: tuple[SweDemonstration, ...] = ()


def check_task(task: SweTask) -> None:
    """Check what a type does not say.

    Raises
    ------
    SweTaskError
        A field has a value that cannot be used.
    DiffError
        A diff cannot be read.
    """
    problem = ""
    if not task.id or not task.id.isprintable():
        problem = "its id is empty, or has characters that cannot be shown"
    elif not task.instruction.strip():
        problem = "it has no instruction"
    elif task.verifier == "pytest" and not task.fail_to_pass:
        problem = "FAIL_TO_PASS is empty: every patch would be right"
    elif task.verifier == "script" and "tests/test.sh" not in task.script:
        problem = "it has no tests/test.sh"
    elif not task.tree and task.verifier == "pytest":
        problem = "it names no tree"
    elif task.solve and "solution/solve.sh" not in task.solve:
        problem = "it has files of a solution, and no solution/solve.sh"
    elif not math.isfinite(task.timeout_s) or task.timeout_s <= 0:
        problem = f"timeout_s is {task.timeout_s}"
    elif not math.isfinite(task.agent_timeout_s) or task.agent_timeout_s < 0:
        problem = f"agent_timeout_s is {task.agent_timeout_s}"
    elif task.memory_mib < 0:
        problem = f"memory_mib is {task.memory_mib}"
    elif both := set(task.fail_to_pass) & set(task.pass_to_pass):
        problem = f"{min(both)} is in FAIL_TO_PASS and in PASS_TO_PASS"
    if problem:
        raise SweTaskError(f"task {task.id!r}: {problem}")
    for diff in (task.bug, task.tests, task.solution):
        parse_diff(diff)


def read_tasks(path: Path) -> Iterator[SweTask]:
    """Read the tasks of a file of hpcrl (``tasks.jsonl``).

    Raises
    ------
    SweTaskError
        Lines are wrong; the first ten are named.
    """
    problems: list[str] = []
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    if len(line) > _MAX_LINE:
                        raise SweTaskError(f"it has more than {_MAX_LINE >> 20} MiB")
                    task: SweTask = decode_json(line, SweTask)
                    check_task(task)
                    if seen.setdefault(task.id, number) != number:
                        raise SweTaskError(f"the id {task.id!r} is that of line {seen[task.id]} as well")
                except (msgspec.DecodeError, UsageError) as error:
                    problems.append(f"  {path}, line {number}: {error}")
                    if len(problems) == _MAX_NAMED:
                        break
                    continue
                yield task
    except OSError as error:
        raise SweTaskError(f"{path} cannot be read: {error.strerror}\n    hint: name a tasks.jsonl") from error
    if problems:
        hint = "make the set again with `hpcrl swe make`, or remove these lines"
        raise SweTaskError("tasks cannot be used:\n" + "\n".join(problems) + f"\n    hint: {hint}")


def write_tasks(path: Path, tasks: Iterable[SweTask]) -> None:
    """Write a file of tasks, whole or not at all."""
    atomic_write(path, b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))

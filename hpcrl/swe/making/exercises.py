"""Small tasks that a start model can learn in minutes, with demonstrations for its warm-up.

A package has eight modules of one function each, and a task is two of them with a wrong operator. To mend one, the
policy has to read it: the file shows a wrong operator, and the name of the function says which one is right.
So a task takes five turns: look, mend, look, mend, done. Held-out tasks have files that no training task has, and
name pairs of modules that none names. Tasks with one wrong module take three turns; of their held-out ones only the
files are new, because there are only eight modules to name.
"""

from __future__ import annotations

import itertools
import os
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.errors import UsageError
from hpcrl.sandboxes import SandboxFile
from hpcrl.storage.files import StagedDirectory, atomic_write
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.judging.prepared import TaskPreparer
from hpcrl.swe.making.program_rows import write_program_rows
from hpcrl.swe.task import SweDemonstration, SweTask, write_tasks
from hpcrl.swe.trees import Tree, tree_digest, write_tar

_MODULES = ("bill", "cost", "fee", "fund", "loan", "rent", "tax", "wage")
_OPERATORS: Mapping[str, str] = {"area": "*", "left": "-", "rest": "%", "total": "+"}
"""Right operator of a function, by its name."""
_ARGUMENTS = tuple(letter for letter in string.ascii_lowercase if letter not in "lo")
_VALUES = ((7, 3), (9, 4))
"""Arguments of the tests: each operator gives another result."""
_TESTS = "tests/test_modules.py"
_PACKAGES = 16
_HELD_OUT = 4
_HELD_OUT_PAIRS = 4
"""Every such ordered pair of modules is held out."""
_LOOKS: Mapping[int, tuple[tuple[bool, ...], ...]] = {
    1: ((True,), (False,)),
    2: ((True, True), (False, False), (False, False), (False, False), (True, False), (False, True)),
}
"""Demonstrations of a task, by its number of wrong modules: which of them each reads. It mends the others by habit. The
first one reads all, and is right."""
_HABIT = ("+", "-")
"""What is mended without a look, whatever is wrong."""
_TIMEOUT_S = 120.0


def write_exercises(
    out: Path, *, tasks: int, seed: int, tools: bytes, python: Path, wrong_modules: Literal[1, 2] = 2
) -> list[SweTask]:
    """Write a set of tasks: ``tasks.jsonl``, ``trees`` and ``tools.zip``. Equal arguments give equal tasks.

    ``rows.jsonl`` has the same tasks for programs of ``kind: harness``.

    A quarter of the tasks is held out.

    Parameters
    ----------
    out:
        A new directory, which appears whole or not at all.
    tools:
        The archive of `hpcrl.swe.making.tools.build_tools`.
    python:
        The interpreter of the tests, as sandboxes see it.
    wrong_modules:
        Number of wrong modules of a task.

    Raises
    ------
    UsageError
        The directory is not empty, or there are fewer different tasks.
    """
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty\n    hint: name a new directory")
    rng = random.Random(f"exercises {seed}")
    packages = list(_packages(rng))
    choices = [_choices(files, wrong_modules, _split(number)) for number, files in enumerate(packages)]
    if tasks > (most := _most([len(each) for each in choices])):
        raise UsageError(f"there are fewer different tasks\n    hint: make at most {most}")
    staged = StagedDirectory(out, token=str(os.getpid()))
    staged.create()
    try:
        made = _write(staged.path, tasks, packages, choices, rng=rng, python=python)
        atomic_write(staged.path / "tools.zip", tools)
        write_tasks(staged.path / "tasks.jsonl", made)
        write_program_rows(staged.path / "rows.jsonl", made, TaskPreparer(staged.path))
        if out.is_dir():
            out.rmdir()  # empty
        staged.commit()
    except BaseException:
        staged.discard()
        raise
    return made


def _split(number: int) -> Literal["heldout", "train"]:
    return "heldout" if number >= _PACKAGES - _HELD_OUT else "train"


def _most(choices: Sequence[int]) -> int:
    """Return the maximum number of tasks, of which each package has an equal share, the first ones one more."""
    least = min(choices)
    return least * len(choices) + choices.index(least)


def _write(
    out: Path,
    tasks: int,
    packages: Sequence[Mapping[str, _Function]],
    choices: Sequence[Sequence[Mapping[str, str]]],
    *,
    rng: random.Random,
    python: Path,
) -> list[SweTask]:
    """Write the trees, and return the tasks."""
    made: list[SweTask] = []
    (out / "trees").mkdir()
    for number, files in enumerate(packages):
        tree = _tree(files)
        name = f"exercises-{number}"
        write_tar(out / f"trees/{name}.tar", tree)
        share = tasks // _PACKAGES + (number < tasks % _PACKAGES)
        base = SweTask(
            id=name,
            instruction="-",
            fail_to_pass=("-",),
            tree=f"trees/{name}.tar",
            digest=tree_digest(tree),
            python=(str(python), "-P", "-s", "-S", "-B"),
            timeout_s=_TIMEOUT_S,
            difficulty=0.0,
            source="hpcrl swe exercises",
            package=name,
            split=_split(number),
        )
        made += (_task(base, files, bugs, task) for task, bugs in enumerate(rng.sample(choices[number], share), 1))
    return made


class _Function:
    """The function of a module."""

    def __init__(self, rng: random.Random) -> None:
        self.name = rng.choice(sorted(_OPERATORS))
        self.first, self.second = rng.sample(_ARGUMENTS, 2)

    def text(self, operator: str | None = None) -> str:
        """Return the text of its module, with the right operator or with another one."""
        name, first, second = self.name, self.first, self.second
        return f"def {name}({first}, {second}):\n    return {first} {operator or _OPERATORS[name]} {second}\n"


def _packages(rng: random.Random) -> Iterator[dict[str, _Function]]:
    """Yield packages; no file is in two of them."""
    seen: set[tuple[str, str]] = set()
    for _ in range(_PACKAGES):
        package = {}
        for module in _MODULES:
            function = _Function(rng)
            while (module, function.text()) in seen:
                function = _Function(rng)
            seen.add((module, function.text()))
            package[module] = function
        yield package


def _tree(files: Mapping[str, _Function]) -> Tree:
    lines = [f"import {module}\n" for module in files]
    for module, function in files.items():
        lines.append(f"\n\ndef test_{module}():\n")
        for one, other in _VALUES:
            value = {"*": one * other, "-": one - other, "%": one % other, "+": one + other}[_OPERATORS[function.name]]
            lines.append(f"    assert {module}.{function.name}({one}, {other}) == {value}\n")
    texts = {f"{module}.py": function.text() for module, function in files.items()} | {_TESTS: "".join(lines)}
    return {path: SandboxFile(text.encode()) for path, text in texts.items()}


def _choices(
    files: Mapping[str, _Function], wrong_modules: Literal[1, 2], split: Literal["heldout", "train"]
) -> list[dict[str, str]]:
    """Return the wrong operators, by module, of each different task of a package."""
    chosen = list(itertools.permutations(_MODULES, wrong_modules))
    if wrong_modules > 1:
        held_out = split == "heldout"
        chosen = [each for number, each in enumerate(chosen) if (number % _HELD_OUT_PAIRS == 0) == held_out]
    return [
        dict(zip(modules, operators, strict=True))
        for modules in chosen
        for operators in itertools.product(*(_others(files[module]) for module in modules))
    ]


def _others(function: _Function) -> list[str]:
    """Return wrong operators of a function; what the habit would mend is none of them."""
    right = _OPERATORS[function.name]
    return [each for each in sorted(_OPERATORS.values()) if each != right and (each, right) != _HABIT]


def _task(base: SweTask, files: Mapping[str, _Function], bugs: Mapping[str, str], number: int) -> SweTask:
    right = {f"{module}.py": files[module].text() for module in bugs}
    wrong = {f"{module}.py": files[module].text(operator) for module, operator in bugs.items()}
    demonstrations = tuple(_demonstration(files, bugs, looks) for looks in _LOOKS[len(bugs)])
    test = {module: f"{_TESTS}::test_{module}" for module in files}
    return msgspec.structs.replace(
        base,
        id=f"{base.id}-{number}",
        instruction="mend " + " ".join(wrong),
        fail_to_pass=tuple(test[module] for module in bugs),
        pass_to_pass=tuple(test[module] for module in files if module not in bugs),
        bug=make_diff(right, wrong),
        solution=make_diff(wrong, right),
        demonstrations=demonstrations,
    )


def _demonstration(
    files: Mapping[str, _Function], bugs: Mapping[str, str], looks: tuple[bool, ...]
) -> SweDemonstration:
    turns = list(_turns(files, bugs, looks))
    return SweDemonstration(
        right=all(looks),
        calls=tuple((command, result) for _, command, result in turns),
        thinking=(*(thought for thought, _, _ in turns), "done"),
    )


def _turns(
    files: Mapping[str, _Function], bugs: Mapping[str, str], looks: tuple[bool, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yield thoughts, commands and their results: modules are mended by what a look shows, or by habit."""
    for (module, operator), look in zip(bugs.items(), looks, strict=True):
        function = files[module]
        old, new = _HABIT
        if look:
            yield "look", f"cat {module}.py", function.text(operator)
            old, new = operator, _OPERATORS[function.name]
        thought = f"{function.name}({new}" if look else "mend"
        yield thought, f"sed -i s/{old}/{new}/ {module}.py", "[no output]"

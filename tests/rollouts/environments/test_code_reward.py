"""Programs of replies, run in real sandboxes against the tests of a row."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_testing import SHARE, fenced, made, score_of, skip_without_sandboxes
from dataset_testing import OneReply, make_dataset, write_jsonl
from patience import patience

from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.rollouts.environments.dataset.environment import DatasetEnvironment
from hpcrl.rollouts.environments.rewards.code_cases import CodeTestsError
from hpcrl.rollouts.environments.rewards.code_check import CodeCheck, CodeNotRunError
from hpcrl.rollouts.environments.rewards.code_tests import program_of, read_code_tests
from hpcrl.rollouts.environments.rewards.processes import CheckerError, CheckerProcesses
from hpcrl.rollouts.environments.task_check import check_tasks
from hpcrl.rollouts.sampling.failures import describe_failure
from hpcrl.runs.rollout_failures import FailureCause

ADD = {"tests": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert math.isclose(add(.5, .25), .75)"]}
SUMS = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}]}
READ = "a, b = map(int, input().split())\n"


@pytest.fixture(scope="module", autouse=True)
def _needs_sandboxes() -> None:
    skip_without_sandboxes()


@pytest.fixture(scope="module")
def share() -> Iterator[CodeCheck]:
    """A checker whose sandboxes all tests use."""
    with closing(CodeCheck(made(entry_point="name", **SHARE))) as check:
        yield check


@pytest.mark.parametrize(
    ("program", "share_of_tests"),
    [
        ("def add(a, b): return a + b", 1),
        ("def add(a, b): return a + b if isinstance(a, int) else None", 0.333),
        ("def add(a, b): return 3", 0.333),
        ("def add(a, b): raise AssertionError", 0),
        ("def add(a, b):\n  while a == 1: pass\n  return a + b", 0.667),
        ("while True: pass", 0),
        ("def add(a, b): return a + b\nadd(", 0),
        ("def add(a, b):\n  if a == 1: return 'x' * (1 << 30)\n  return a + b", 0.667),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", 0),
    ],
)
def test_assert_lines(share: CodeCheck, program: str, share_of_tests: float) -> None:
    assert score_of(share, program, ADD) == share_of_tests


BRIBES = {
    "ends with success": "import os\nos._exit(0)",
    "ends inside with success": "def add(a, b):\n  import os\n  os._exit(0)",
    "equal to everything": "class E:\n  __eq__ = __le__ = __ge__ = __bool__ = lambda *a: True\ndef add(*a): return E()",
    "number that is equal to everything": "class E(float):\n  __eq__ = lambda *a: True\ndef add(*a): return E(7)",
    "own module": "class math:\n  isclose = staticmethod(lambda *a: True)\ndef add(*a): return 0",
    "own builtins": "import builtins\nbuiltins.AssertionError = ValueError\nadd = print = lambda *a: 0",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.exit(0)",
    "verdict on every descriptor": (
        "import os\nfor fd in range(256):\n"
        "  try: os.write(fd, b'0 ready  \\n1 test 0 P\\n2 test 1 P\\n3 test 2 P\\n4 end 0 3 0 0\\n')\n"
        "  except OSError: pass\nos._exit(0)"
    ),
    "answers of the channel": 'import os, sys\nos.write(int(sys.orig_argv[-1]), b\'["v", [["add", true]]]\\n\' * 99)',
    "descriptors of the judge": (
        "import os\nfor fd in range(32):\n"
        "  try: os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY), b'x')\n"
        "  except OSError: pass\n"
        "def add(*a): return [open(f'/proc/{os.getppid()}/{name}', 'rb').read(1) for name in ('mem', 'environ')]"
    ),
    "end of the judge": "import os\nos.kill(os.getppid(), 9)\ndef add(a, b): return a + b",
}


@pytest.mark.parametrize("bribe", BRIBES)
def test_bribes_of_assert_lines(share: CodeCheck, bribe: str) -> None:
    assert score_of(share, BRIBES[bribe], ADD) == 0


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x + 1, range(3)))"),
        ("__name__ = 'other'\ndef f(x): return x", "assert f(__name__) == 'other'"),
        ("def sorted(x): return [1, 2]\ndef f(x): return x", "assert sorted(f([3])) == [1, 2]"),
        ("class L(list):\n  __eq__ = lambda *a: True\ndef f(x): return L()", "assert f(1) == [1]"),
    ],
)
def test_ways_around_a_test(share: CodeCheck, program: str, test: str) -> None:
    assert score_of(share, program, {"tests": test}) == 0


def test_memory_of_the_judge_is_unreadable(share: CodeCheck) -> None:
    """The secret and the tests are in that memory; the same for its open files."""
    program = """
import os
def tried():
    found = []
    for name in ("mem", "environ", "fd/0", "fd/1"):
        try:
            os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY)
        except PermissionError:
            found.append(name)
    return found
"""
    assert score_of(share, program, {"tests": ["assert tried() == ['mem', 'environ', 'fd/0', 'fd/1']"]}) == 1


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
        ("def f(n):\n  for i in range(n): yield i, {i}", "assert list(f(2)) == [(0, {0}), (1, {1})]"),
        ("from math import factorial as f", "assert f(2000) % 2003 == f(1999) * 2000 % 2003"),
        ("def f(): raise KeyError('a')", "try:\n  f()\nexcept KeyError: pass\nelse: assert False"),
        ("class E(Exception): pass\ndef f(): raise E", "try:\n  f()\nexcept Exception: pass\nelse: assert False"),
        (
            "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): self.items.append(x)\n"
            "  def pop(self): return self.items.pop()\n  def __len__(self): return len(self.items)",
            "s = Stack()\ns.push((1, None))\nassert len(s) == 1 and s.pop() == (1, None)",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Pair:\n  a: int\n  b: int\ndef f(p): return p[0].b",
            "assert f([Pair(5, 24)]) == 24",
        ),
        (
            "from decimal import Decimal\nfrom fractions import Fraction\n"
            "def f(): return Decimal('1.5'), Fraction(1, 3), 1j, b'a', range(2), float('inf'), frozenset('a')",
            "from decimal import Decimal\nfrom fractions import Fraction\nimport math\n"
            "assert f() == (Decimal('1.5'), Fraction(1, 3), 1j, b'a', range(2), math.inf, frozenset('a'))",
        ),
        ("def f(): return 1\nif __name__ == '__main__':\n  input()", "assert f() == 1"),
    ],
)
def test_what_tests_see_of_a_program(share: CodeCheck, program: str, tests: str) -> None:
    assert score_of(share, program, {"tests": tests}) == 1


def test_forms_of_humaneval(share: CodeCheck) -> None:
    tests = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
    row = {"tests": tests, "name": "sum"}
    # a function of the name of a builtin is the program's where entry_point names it
    assert score_of(share, "def sum(x):\n  return x[0] + x[1] if x else 0", row) == 1
    assert score_of(share, "def sum(x): return 3", row) == 0


@pytest.mark.parametrize(
    ("program", "share_of_tests"),
    [
        (READ + "print(a + b)", 1),
        (READ + "import sys\nprint('wait', file=sys.stderr)\nprint(a + b, ' ')\nprint()", 1),
        ("print(3)", 0.5),
        (READ + "print(a + b)\nraise SystemExit(1)", 0),
        (READ + "while a == 1: pass\nprint(a + b)", 0.5),
        (READ + "while a == 1: print('x' * 9999)\nprint(a + b)", 0.5),
        ("import glob\nprint([open(f).read() for f in glob.glob('/work/*')])", 0),
        ("import os\nos._exit(0)", 0),
    ],
)
def test_inputs_and_outputs(share: CodeCheck, program: str, share_of_tests: float) -> None:
    assert score_of(share, program, SUMS) == share_of_tests


def test_all_or_nothing_and_code_around() -> None:
    row = {"tests": ["assert f(ROOT) == 2", "assert f(3) == 1.5"], "before": "import math", "setup": ["ROOT = 4"]}
    with closing(CodeCheck(made(before="before", setup="setup"))) as check:
        assert check.score(fenced("def f(x): return math.fabs(x) / 2"), "", row) == 1
        assert check.score(fenced("def f(x): return x // 2"), "", row) == 0
        assert check.score("def f(x): return x / 2", "", row) == 0


@pytest.mark.parametrize("row", [ADD, SUMS])
def test_missing_interpreter_gives_none(row: dict[str, Any]) -> None:
    message = "/usr/bin/python0 does not run in a sandbox"
    with (
        closing(CodeCheck(made(interpreter=["/usr/bin/python0"]))) as check,
        pytest.raises(CodeNotRunError, match=message),
    ):
        check.score(fenced("import os\nos._exit(0)"), "", row)


async def test_a_sandbox_that_is_ended_for_all_of_the_node_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is within the limit of its own sandbox."""
    monkeypatch.setenv(SANDBOX_MEMORY_VARIABLE, f"{96 << 20}:{secrets.token_hex(16)}")
    with closing(CheckerProcesses([made(**SHARE)], limit=1)) as processes:
        program = "data = b'x' * (120 << 20)\nimport time\ntime.sleep(60)\n"
        with pytest.raises(CheckerError, match=r"SandboxEvictedError: .* more than 96 MiB") as failed:
            await processes.score(0, fenced(program), "", SUMS)
        assert describe_failure(failed.value)[0] is FailureCause.EVICTED
        assert await processes.score(0, fenced(f"{READ}print(a + b)"), "", SUMS) == 1.0


def test_functions_cannot_be_given(share: CodeCheck) -> None:
    with pytest.raises(CodeNotRunError, match="test 1 gives the program a function"):
        score_of(share, "def f(g): return g(1)", {"tests": ["assert f(lambda x: x) == 1"]})


@pytest.mark.parametrize(
    ("value", "pairs"),
    [
        ({"inputs": ["1", ["2", "3"]], "outputs": ["a", "b"]}, (("1", "a"), ("2\n3", "b"))),
        ('{"inputs": ["1"], "outputs": ["a"], "fn_name": null}', (("1", "a"),)),
        ('[{"input": "1", "output": "a", "testtype": "stdin"}]', (("1", "a"),)),
    ],
)
def test_forms_of_pairs(value: Any, pairs: tuple[tuple[str, str], ...]) -> None:
    assert read_code_tests(made(), {"tests": value}).pairs == pairs


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "has no tests"),
        ([], "has no tests"),
        ("[]", "has no tests"),
        (7, "has neither"),
        (["assert f("], "test 1 of column 'tests' is not Python"),
        (["f = 1"], "asserts nothing"),
        ("def check(c): assert c(1)", "does not call it"),
        ({"inputs": ["1"], "outputs": []}, "not as many inputs as outputs"),
        ([{"input": "1"}], "not text"),
    ],
)
def test_wrong_tests(value: Any, what: str) -> None:
    with pytest.raises(CodeTestsError, match=what):
        read_code_tests(made(), {"tests": value})


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```py\na\n```\ntext\n```\nb\n```", "b"),
        ("1. so\n   ```python\n   a\n     b\n   ```", "a\n  b"),
        ("```py\na\n```\nand\n```py\nb", "a"),
        ("```f(1)``` is 2:\n```py\na\n```\nDone.", "a"),
        ("a", ""),
    ],
)
def test_program_of_a_reply(reply: str, program: str) -> None:
    assert program_of(reply, "fenced") == program
    assert program_of(reply, "all") == reply


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    """Rows in the form of MBPP."""
    rows = [
        {"prompt": f"Write f(x) = x + {n}.", "code": f"def f(x): return x + {n}", "tests": [f"assert f(1) == {n + 1}"]}
        for n in range(60)
    ]
    return write_jsonl(tmp_path / "programs.jsonl", rows)


SETTINGS: dict[str, Any] = {"columns": {"answer": "code"}, "demonstration": "```python\n{code}\n```"}


@pytest.fixture
def environment(questions_file: Path) -> Iterator[DatasetEnvironment]:
    found = make_dataset(questions_file, {"kind": "code"}, **SETTINGS)
    yield found
    found.close()


async def test_environment(environment: DatasetEnvironment) -> None:
    prompt = environment.prompt("train", 0)
    right = prompt.data.demonstration
    outcome = await environment.rollout(prompt, OneReply(right))
    assert (outcome.reward, outcome.parts["code"]) == (1, 1)
    assert (await environment.rollout(prompt, OneReply(right.replace("return", "return 1 +")))).reward == 0


async def test_sandboxes_leave_nothing(questions_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their daemon removes its directory where the process of the checker is ended."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        environment = make_dataset(questions_file, {"kind": "code"}, **SETTINGS)
        prompt = environment.prompt("train", 0)
        assert (await environment.rollout(prompt, OneReply(prompt.data.demonstration))).reward == 1
        assert list(Path(directory).glob("hpcrl-sandboxes-*"))
        environment.close()
        async with asyncio.timeout(60 * patience()):
            while list(Path(directory).glob("hpcrl-sandboxes-*")):
                await asyncio.sleep(0.05)


async def test_failed_sandbox_fails_the_rollout(questions_file: Path) -> None:
    environment = make_dataset(questions_file, {"kind": "code", "image": "/no/such/image"}, **SETTINGS)
    prompt = environment.prompt("train", 0)
    with pytest.raises(CheckerError, match="part 'code' of the reward: Sandbox"):
        await environment.rollout(prompt, OneReply(prompt.data.demonstration))
    environment.close()


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "wrong.jsonl", [{"prompt": "a", "answer": "", "tests": ["assert ("]}] * 2)
    with pytest.raises(ConfigError, match=r"line 1: test 1 of column 'tests' is not Python"):
        make_dataset(file, {"kind": "code"})


def test_env_check(questions_file: Path) -> None:
    one = {"name": "one", "kind": "dataset", "path": str(questions_file), "rewards": [{"kind": "code"}], **SETTINGS}
    settings = {"name": "r", "model": {"path": "m"}, "environments": [one], "trainer": {"steps": 1}}
    found = check_tasks(Recipe.model_validate(settings), ["one"], 2)["one"]
    assert found["problems"] == []
    assert found["played"] == {"nothing": [0.0, 0.0], "right": [1.0] * 4}, "the right answer is played twice"

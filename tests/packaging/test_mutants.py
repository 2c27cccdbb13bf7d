"""The wrong changes that `make test-mutants` tries, and how it knows which tests execute them."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A module — with letters of two bytes before what is changed."""

import logging

LIMIT_S = 2.5
T = TypeVar("T", bound=3)


def divided(stats, total, *, rounded=False):
    """Not a word of this."""
    logging.getLogger(__name__).info("é %d", total)
    if total <= 0 and not rounded:
        raise ValueError("an empty batch")
    with contextlib.suppress(OSError, ValueError):
        total = max(rounded, total, key=len)
    stats.seen += 1
    value = stats.sampled / max(total, stats.trained)
    return round(value, 3, key=rounded, hint="nothing")
'''
#: by kind: what is replaced, and by what
WANTED = {
    ("comparison", "total <= 0", "(total < 0)"),
    ("and, or", "total <= 0 and not rounded", "(total <= 0 or not rounded)"),
    ("part left out", "total <= 0 and not rounded", "(not rounded)"),
    ("part left out", "total <= 0 and not rounded", "(total <= 0)"),
    ("negation", "not rounded", "rounded"),
    ("constant", "0", "1"),
    ("statement removed", 'raise ValueError("an empty batch")', "pass"),
    ("statement removed", "stats.seen += 1", "pass"),
    ("constant", "1", "2"),
    ("arithmetic", "stats.sampled / max(total, stats.trained)", "(stats.sampled * max(total, stats.trained))"),
    ("other attribute", "stats.sampled", "stats.trained"),
    ("other attribute", "stats.trained", "stats.sampled"),
    ("function", "max(total, stats.trained)", "min(total, stats.trained)"),
    ("arguments swapped", "max(rounded, total, key=len)", "max(total, rounded, key=len)"),
    ("constant", "3", "4"),
    ("constant", "2.5", "5.0"),
}


def load(name: str) -> ModuleType:
    """Load a module of the bench under a name that no module of tests has."""
    own = f"bench_mutation_{name}"
    spec = importlib.util.spec_from_file_location(own, ROOT / f"bench/mutation/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    return load("operators")


def test_wrong_changes_of_a_module(operators: ModuleType) -> None:
    found = list(operators.mutants_of("mine.py", SOURCE))
    shown = {(mutant.kind, mutant.before, mutant.after) for mutant in found}
    assert shown >= WANTED
    # neither words for people nor messages are changed
    assert not any("Not a word" in before or "é" in before or before == '"nothing"' for _, before, _ in shown)
    # nor is what means the same in any order, or something to type checkers alone
    assert not any(kind == "arguments swapped" and before.startswith(("max(total", "con")) for kind, before, _ in shown)
    assert not any("TypeVar" in before or before == "T" for _, before, _ in shown)
    returned = 'round(value, 3, key=rounded, hint="nothing")'
    assert ("return value", returned, "None") in shown
    assert {after for kind, _, after in shown if kind == "argument left out"} == {
        "round(value, 3, hint='nothing')",
        "max(rounded, total)",
    }
    for mutant in found:
        changed = mutant.apply(SOURCE.encode()).decode()
        ast.parse(changed)
        assert changed != SOURCE
        assert len(changed) - len(SOURCE) == len(mutant.after) - len(mutant.before)
        assert mutant.function_line == (0 if mutant.before == "2.5" else 9)


def test_arguments_that_change_nothing_are_left_alone(operators: ModuleType) -> None:
    source = "def joined(a, b):\n    return np.minimum(a, b), zip(a, b, strict=False), zip(a, b, strict=True)\n"
    found = {(each.kind, each.before) for each in operators.mutants_of("mine.py", source)}
    assert {before for kind, before in found if kind == "argument left out"} == {"zip(a, b, strict=True)"}
    assert ("arguments swapped", "zip(a, b, strict=False)") in found
    assert ("arguments swapped", "np.minimum(a, b)") not in found


def test_every_change_of_hpcrl_is_a_program(operators: ModuleType) -> None:
    """Of one room with all kinds of statements; a change that is none would be caught by every test."""
    for path in sorted((ROOT / "hpcrl/supervisor/recovery").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for mutant in operators.mutants_of(path.name, source):
            ast.parse(mutant.apply(source.encode()).decode())


ROOMS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mutants

root, wrong = Path(sys.argv[2]), []
for room, (modules, tests) in mutants.ROOMS.items():
    if not mutants.mutants_in(room):
        wrong.append([room, "no mutants"])
    for place in (*modules, *tests):
        if not mutants.files_of([place], root) and not list((root / place).rglob("*.py")):
            wrong.append([room, place])
print(json.dumps([len(mutants.ROOMS), wrong, sorted(map(str, mutants.stale()))]))
"""


def test_rooms_and_equivalent_mutants_are_there() -> None:
    """A module that moves leaves neither a room without tests nor a name that no mutant has."""
    # a process of its own: the modules of bench/ have short names, which other tests' modules may have
    command = [sys.executable, "-c", ROOMS, str(ROOT / "bench"), str(ROOT)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    count, wrong, stale = json.loads(ran.stdout.splitlines()[-1])
    assert count > 0
    assert (wrong, stale) == ([], [])


def test_functions_that_run_are_written_down(tmp_path: Path) -> None:
    """By the interpreter that a test starts, before the process can be killed."""
    recorder = load("recorder")
    site = recorder.install_in(tmp_path / "site")
    package = tmp_path / "tree ö"
    package.mkdir()
    (package / "mine.py").write_text(
        "import os\n\ndef called():\n    os.kill(os.getpid(), 9)\n\ndef other():\n    pass\n"
    )
    output = tmp_path / "executed.txt"
    environ = {
        "PYTHONPATH": f"{site}:{package}",
        recorder.OUTPUT: str(output),
        recorder.ROOT: str(package),
        "PYTEST_CURRENT_TEST": "tests/test_x.py::test_y[a (b)] (call)",
    }
    subprocess.run([sys.executable, "-c", "import mine; mine.called()"], env=environ, check=False)
    assert output.read_text().splitlines() == [f"tests/test_x.py::test_y[a (b)]\tmine.py\t{line}" for line in (1, 3)]


NEAR = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mutation.near_tests import NearTests
from mutation.nearness import Nearness
from mutation.operators import mutants_of

tree, scratch = Path(sys.argv[2]), Path(sys.argv[3])
files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("test_*.py"))
nearness = Nearness(tree)
module = "hpcrl/shop/price.py"
near, found = NearTests(tree, scratch, 600.0), {}
for mutant in mutants_of(module, (tree / module).read_text()):
    if mutant.kind == "arithmetic":
        found[mutant.function] = near.judge(mutant, ["tests/other/test_far.py"])[:2]
print(json.dumps([nearness.order(module, "total_price", files), nearness.importers(module), found]))
"""


def test_the_nearest_tests_are_tried_first_and_must_pass_without_the_mutant(tmp_path: Path) -> None:
    tree, scratch = tmp_path / "tree", tmp_path / "scratch"
    scratch.mkdir()
    texts = {
        "hpcrl/__init__.py": "",
        "hpcrl/shop/__init__.py": "from hpcrl.shop.price import total_price\n",
        "hpcrl/shop/price.py": "def total_price(n):\n    return n * 4\n\ndef unused(n):\n    return n - 1\n",
        "tests/helper_of_tests.py": "import hpcrl.shop\n",
        # it fails with every mutant, and without: it says nothing
        "tests/shop/test_bill.py": "import hpcrl.shop.price\ndef test_a():\n    assert False\n",
        "tests/shop/test_price.py": "import os\nfrom hpcrl.shop.price import total_price\n"
        "def test_b():\n    assert total_price(3) == 12\n",
        "tests/other/test_by_helper.py": "import helper_of_tests\n",
        "tests/other/test_far.py": "def test_c():\n    pass\n",
    }
    for name, text in texts.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    command = [sys.executable, "-c", NEAR, str(ROOT / "bench"), str(tree), str(scratch)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    order, importers, found = json.loads(ran.stdout.splitlines()[-1])
    assert order == [f"tests/{name}.py" for name in ("shop/test_price", "shop/test_bill", "other/test_by_helper")] + [
        "tests/other/test_far.py"
    ]
    assert importers == ["tests/shop/test_bill.py", "tests/shop/test_price.py"]
    assert found == {
        "total_price": ["caught", "tests/shop/test_price.py::test_b"],
        "unused": ["survived", "in 3 of 3 files"],
    }
    assert {name: (tree / name).read_text() for name in texts} == texts


VERDICTS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mutation.verdicts import Verdicts

verdicts = Verdicts(Path(sys.argv[2]), Path(sys.argv[3]))
known = [verdicts.of(name, 7) for name in ("one", "two", "three")]
verdicts.add(7, {"name": sys.argv[4], "verdict": "caught"})
print(json.dumps([row and row["verdict"] for row in known]))
"""


def test_a_campaign_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    """Verdicts count for the text of hpcrl and of its tests that they were found with."""
    file, tree = tmp_path / "verdicts.jsonl", tmp_path / "tree"
    for place in ("hpcrl", "tests"):
        (tree / place).mkdir(parents=True)

    def known(name: str) -> list[str | None]:
        command = [sys.executable, "-c", VERDICTS, str(ROOT / "bench"), str(file), str(tree), name]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found: list[str | None] = json.loads(ran.stdout)
        return found

    assert known("one") == [None, None, None]
    assert known("two") == ["caught", None, None]
    # killed while it wrote
    file.write_text(file.read_text()[:-4])
    assert known("three") == ["caught", None, None]
    assert known("one") == ["caught", None, "caught"]
    (tree / "tests/test_new.py").write_text("")
    assert known("one") == [None, None, None]

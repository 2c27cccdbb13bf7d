"""The session on one card: every check runs small on a processor, and what fails ends one check."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SESSION = ROOT / "bench/gpu_session.py"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
#: a process of its own: it forks, and has imported torch
ODD_CHECKS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_session
from gpu_checks.check import Check, Session
from hpcrl.errors import UsageError

def raises(session):
    yield {"figure": 1.5}
    raise AssertionError("wrong\\nand more")

def hangs(session):
    yield {"figure": 2}
    time.sleep(600)

def dies(session):
    yield {"pid": os.getpid()}
    os.abort()

def absent(session):
    raise UsageError("trainer.x: no library\\n    hint: none")
    yield {}

checks = [Check(run.__name__, run, 2.0, {"OF_ONE": "1"}) for run in (raises, hangs, dies, absent)]
gpu_session.PARTS["whole"] = tuple(checks)
sys.argv = ["gpu_session", "whole", "--tiny", "--output", sys.argv[2]]
try:
    gpu_session.main()
finally:
    assert "OF_ONE" not in os.environ
"""


def rows_of(directory: Path) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for line in (directory / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row.pop("check"), []).append(row)
    return found


def test_a_check_that_fails_ends_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ODD_CHECKS, str(ROOT / "bench"), str(tmp_path)]
    done = subprocess.run(command, env=ENV, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path)
    assert [row.get("done") for rows in rows.values() for row in rows if "done" in row] == [False, False, False, True]
    first = {name: {**each[0], **each[1]} for name, each in rows.items()}
    assert first["raises"]["failed"] == "AssertionError: wrong"
    assert "in raises" in str(first["raises"]["trace"])
    assert first["hangs"]["failed"] == "took longer than 8 s"
    assert str(first["dies"]["failed"]).startswith("its process ended with -")
    assert first["absent"]["not_here"] == "trainer.x: no library"
    assert "trace" not in (tmp_path / "session.json").read_text()
    # what is done is not done again, and what failed is
    again = subprocess.run(command, env=ENV, check=False, capture_output=True, text=True, timeout=300)
    assert "3 checks ran, 3 rows failed" in again.stdout
    assert len(rows_of(tmp_path)["raises"]) == 2 * len(rows["raises"])
    figures = json.loads((tmp_path / "session.json").read_text())
    assert [row.get("figure") for row in figures["rows"] if row["check"] == "raises"] == [1.5, None, None]


def run_session(directory: Path, *parts: str) -> dict[str, list[dict[str, object]]]:
    command = [sys.executable, str(SESSION), *parts, "--tiny", "--output", str(directory)]
    done = subprocess.run(command, env=ENV, check=False, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(directory)


def test_checks_of_all_parts_run_small_on_a_processor(tmp_path: Path) -> None:
    """All but those that start pytest or a compiler, which the test below runs."""
    only = ["machine", "ceilings", "quantiser", "products", "pinned", "fp8", "index", "glm5", "lengths", "publish*"]
    rows = run_session(tmp_path, "correctness", "kernels", "whole", "--only", *only, "bandwidth", "update")
    assert {name for name, each in rows.items() if not each[-1]["done"]} == set()
    assert rows["correctness.machine"][0]["device"] == "cpu"
    assert all(row["product"] == 0 for row in rows["correctness.products"][:-1])
    assert rows["whole.glm5"][0]["tokens"] == 128
    counted = {"compiled_first_step": 0, "compiled_second_step": 0, "compiled_later": 0}
    # nothing is compiled on a processor, unless layers are
    assert rows["whole.glm5"][1] == rows["whole.lengths"][3] == counted
    assert [row["step"] for row in rows["whole.lengths"][:3]] == [1, 2, 3]
    assert float(str(rows["whole.glm5"][0]["mfu"])) > 0
    assert [row["version"] for row in rows["whole.publish fp8"][:-1]] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_run_goes_to_its_end_on_a_processor(tmp_path: Path) -> None:
    """The recipe for questions from a file, from a start model to the proof of its rollouts."""
    model, run, end = run_session(tmp_path, "whole", "--only", "run")["whole.run"]
    assert float(str(model["model_s"])) > 0
    assert (run["device"], run["steps"], end["done"]) == ("cpu", 3, True)
    # engines sample what the trainer computes
    assert 0 <= float(str(run["mismatch_kl"])) < 0.1
    # nothing of it is left
    mark = str(tmp_path).encode()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not [line for line in lines if mark in line]


def test_a_check_of_a_run_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """On a card the trainer must not have computed on processors; a run that fails or is late is cancelled."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu_checks import whole_run
from gpu_checks.check import Session

called = []

def hpcrl(session, place, *words, check=True):
    called.append(words[0])
    if words[0] == "wait":
        raise RuntimeError("hpcrl wait ended with 1: one-gpu FAILED")
    return "the trainer ran out of memory" if words[0] == "why" else ""

whole_run.hpcrl = hpcrl
checked = whole_run.run(Session(tiny=True, scratch=Path(sys.argv[2])))
assert "model_s" in next(checked)
try:
    next(checked)
except RuntimeError as error:
    print(error)
print(*called)
"""
    # a process of its own: other tests have modules of the names in bench/
    ran = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "bench"), str(tmp_path)],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    why, called = ran.stdout.splitlines()[-2:]
    assert "one-gpu FAILED; why: the trainer ran out of memory" in why
    assert called == "warmup submit wait why cancel"


#: the arguments of `triton.compile`'s listener: triton/compiler/compiler.py
COUNTED = """
import os, sys
from importlib.util import find_spec
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch

seen = []
knobs = None
if find_spec("triton") is not None:
    from triton import knobs
    knobs.compilation.listener = lambda **of: seen.append(of["cache_hit"])

from gpu_checks.compiled import CompileCounter

programs = CompileCounter()

def triton_makes(cache_hit):
    if knobs is not None:
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)

@torch.compile(backend="eager", dynamic=False)
def layer(x):
    return x * 2

layer(torch.ones(3))
triton_makes(False)
triton_makes(True)
print(programs.end_step())
layer(torch.ones(3))
print(programs.end_step())
# another length: a graph, and a product of DeepGEMM
layer(torch.ones(4))
(Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache/kernel.gemm.0123").mkdir(parents=True)
print(programs.end_step())
print(programs.summary())
print(seen)
"""


@pytest.mark.parametrize("triton", [False, True], ids=["without Triton", "with Triton"])
def test_programs_are_counted_by_step(triton: bool, tmp_path: Path) -> None:
    own = ROOT / ".triton"
    if triton and not (own / "hpcrl-bootstrap").is_file():
        pytest.skip("triton is not installed: python3 tools/bootstrap.py --triton")
    paths = [str(ROOT), *([str(own)] if triton else [])]
    env = {**ENV, "PYTHONPATH": os.pathsep.join(paths), "DG_JIT_CACHE_DIR": str(tmp_path / "deep_gemm")}
    command = [sys.executable, "-c", COUNTED, str(ROOT / "bench")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, second, third, summary, seen = ran.stdout.splitlines()[-5:]
    made = int(triton)
    assert first == f"{{'graphs': 1, 'triton': {made}, 'triton_from_disk': {made}, 'deep_gemm': 0}}"
    assert second == "{'graphs': 0, 'triton': 0, 'triton_from_disk': 0, 'deep_gemm': 0}"
    assert third == "{'graphs': 1, 'triton': 0, 'triton_from_disk': 0, 'deep_gemm': 1}"
    assert summary == f"{{'compiled_first_step': {1 + made}, 'compiled_second_step': 0, 'compiled_later': 2}}"
    # who listened before still does
    assert seen == ("[False, True]" if triton else "[]")


def test_wheels_and_the_image_have_what_hpcrl_requires() -> None:
    """A machine without a network has the packages of an image with torch, and what `gpu_wheels.py` collects."""
    spec = importlib.util.spec_from_file_location("gpu_wheels", ROOT / "bench/gpu_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["trainer"]]
    names = {re.split(r"[<>=\[]", line)[0] for line in required}
    image = set(re.findall(r"[a-z][a-z0-9-]+", (wheels.__doc__ or "").partition("beside these:")[2].partition(". ")[0]))
    assert {"torch", "aiohttp", "pydantic"} <= names
    assert names - set(wheels.PACKAGES) - image == set()


@pytest.mark.campaign
def test_every_check_runs_small_on_a_processor(tmp_path: Path) -> None:
    """But for the one that compiles layers, which takes minutes on processors."""
    rows = run_session(tmp_path, "correctness", "kernels", "whole", "--only", "[!q]*", "qwen3", "qwen3, [!c]*")
    assert len(rows) > 20
    assert int(str(rows["correctness.tests"][0]["passed"])) > 0

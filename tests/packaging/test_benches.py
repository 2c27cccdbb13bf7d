"""Each bench loads: what it takes from the tests and from hpcrl is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
HELPERS = {
    "harness",
    "vllm_lab",
    "planner_memory_worker",
    "adversary_stranger",
    "stand_in_engine",
    "colocated_schedules",
}
PROGRAMS = sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in HELPERS)
#: One process asks all: each for itself would import torch again, a minute of a processor in all.
ASK = """
import contextlib, io, json, runpy, sys, traceback

bench, *programs = sys.argv[1:]
for path in programs:
    sys.argv, sys.path[0] = [path, "--help"], bench
    said, code = io.StringIO(), 1
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    """Exit code and output of each program that is asked what it takes."""
    command = [sys.executable, "-c", ASK, str(BENCH), *(str(BENCH / f"{name}.py") for name in PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(PROGRAMS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bench_says_what_it_takes(name: str, answers: dict[str, tuple[int, str]]) -> None:
    code, said = answers[name]
    assert code == 0, said[-2000:]
    assert said.startswith("usage:")


@pytest.mark.slow
def test_the_bench_of_kernels_runs_all_kinds_on_a_processor(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCH / "kernels.py"), "--tiny", "--repeats", "1", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    measured = {row["kind"].split()[0] for row in rows if "ms" in row}
    assert measured == {"sparse", "index", "dense", "head", "fp8"}
    # what is not here says why, and nothing fails
    assert all(("ms" in row) != ("not_here" in row) for row in rows)
    assert any("triton is for GPUs" in row.get("not_here", "") for row in rows)


FAILS = """
import json, sys

sys.path.insert(0, sys.argv[1])
import torch
from kernel_cases.case import Case, NotHere
from kernels import measure

runs = []

def raising(error, first=1):
    def run():
        runs.append(error)
        if len(runs) >= first:
            raise error
    return lambda: (runs.clear(), run)[1]

errors = [AssertionError(), TypeError("unexpected keyword\\nmore"), KeyError("CUDA_PATH")]
errors += [LookupError(), NotHere("it is not")]
candidates = {str(i): raising(error) for i, error in enumerate(errors)}
candidates["later"] = raising(RuntimeError("invalid argument"), first=3)
candidates["well"] = lambda: lambda: None
case = Case("tried", {"rows": 1}, 1.0, candidates)
print(json.dumps([measure(case, name, torch.device("cpu"), 3) for name in candidates]))
"""


def test_a_candidate_that_fails_ends_no_bench() -> None:
    """Each of its errors stands in its row; those behind it are measured."""
    command = [sys.executable, "-c", FAILS, str(BENCH)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    *failed, well = json.loads(done.stdout.splitlines()[-1])
    assert [row.get("failed") or row["not_here"] for row in failed] == [
        "AssertionError: ",
        "TypeError: unexpected keyword",
        "KeyError: 'CUDA_PATH'",
        "LookupError",
        "it is not",
        "RuntimeError: invalid argument",
    ]
    assert all("ms" not in row for row in failed)
    assert "ms" in well

"""Each bench and each campaign loads: what it takes from the tests and from hpcrl is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
CAMPAIGNS = Path(__file__).parents[1] / "campaigns"
VERIFIERS = BENCH.parent / ".verifiers"
HELPERS = {
    "harness",
    "vllm_lab",
    "adversary_stranger",
    "campaign_paths",
    "agents_verifiers",
    "stand_in_engine",
    "colocated_schedules",
    "watched_processes",
}
FOUND = (*sorted(BENCH.glob("*.py")), *sorted(CAMPAIGNS.glob("*.py")))
PROGRAMS = {path.stem: [path] for path in FOUND if path.stem not in HELPERS and path.stem[:5] != "test_"}
PROGRAMS |= {
    f"planner {part}": [BENCH / "planner.py", part]
    for part in ("published", "memory", "loop", "speed", "simulator", "simulator-speed")
}
#: One process asks all: each for itself would import torch again, a minute of a processor in all.
ASK = """
import contextlib, io, json, os, runpy, sys, traceback

for words in map(json.loads, sys.argv[1:]):
    path = words[0]
    sys.argv, sys.path[0] = [*words, "--help"], os.path.dirname(path)
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
    command = [sys.executable, "-c", ASK, *(json.dumps([*map(str, words)]) for words in PROGRAMS.values())]
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


@pytest.mark.slow
def test_the_bench_of_agents_plays_whole_rollouts(tmp_path: Path) -> None:
    """Through the orchestrator and its gateway, and through verifiers' own server where that is there."""
    peer = 3 if (VERIFIERS / "hpcrl-bootstrap").is_file() else 0
    output = tmp_path / "agents.json"
    sizes = {"rollouts": 4, "turns": 3, "rate": 20, "peer-rollouts": peer, "peer-turns": 2, "peer-rate": 20}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    command = [sys.executable, str(BENCH / "agents.py"), *words, "--engine-s", "0.05", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["hpcrl"]["calls"] >= 12
    assert found["hpcrl"]["call_above_engine_ms"]["n"] == found["hpcrl"]["calls"]
    assert found["hpcrl"]["rollouts_dropped"] == 0
    if peer:
        assert found["hpcrl beside verifiers"]["calls"] >= 6
        # what its client has assembled is what the player has called
        assert found["verifiers"]["calls_in_traces"] == found["verifiers"]["calls"] == 6

    # one measurement again, which ends early
    more = ["--only", "hpcrl", "--seconds", "0.5", "--rollouts", "4", "--turns", "500", "--rate", "40"]
    command = [sys.executable, str(BENCH / "agents.py"), *more, "--engine-s", "0.05", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    again = json.loads(output.read_text(encoding="utf-8"))
    assert (again["hpcrl"]["rollouts_ended"], again["hpcrl"]["turns"]) == (0, 500)
    others = ("hpcrl beside verifiers", "verifiers")
    assert [again.get(name) for name in others] == [found.get(name) for name in others]


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


def test_no_test_has_the_benches_on_its_own_path() -> None:
    """Modules of tests have names of theirs (`harness`): which one is imported would depend on the order of tests."""
    on_path = re.compile(r"syspath_prepend\(.*\bbench\b")
    assert [path.name for path in CAMPAIGNS.parent.rglob("*.py") if on_path.search(path.read_text("utf-8"))] == []

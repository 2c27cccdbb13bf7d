"""`tools/run_tests.py`, which `make test` runs: what fails is never hidden."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"
STEADY = "def test_good(): pass\ndef test_bad(): assert 1 == 2\n"
UNSTEADY = """
from pathlib import Path

def test_unsteady():
    mark = Path(__file__).with_name("seen")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


def run_tests(path, text, *arguments):
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "test_it.py").write_text(text)
    command = [sys.executable, TOOL, *arguments]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_is_tried_again_alone_and_stays_one(tmp_path, workers):
    done = run_tests(tmp_path, STEADY, "--workers", workers)
    assert done.returncode == 1
    assert "1 failed; once more, alone:\n  test_it.py::test_bad" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "UNSTEADY" not in done.stdout


def test_what_passes_alone_is_named(tmp_path):
    done = run_tests(tmp_path, UNSTEADY)
    assert done.returncode == 0
    assert "UNSTEADY: failed beside other tests, passed alone:\n  test_it.py::test_unsteady" in done.stdout


def test_many_failures_are_not_tried_again(tmp_path):
    (tmp_path / "seen").touch()
    many = "".join(f"def test_{number}(): assert False\n" for number in range(4))
    done = run_tests(tmp_path, many)
    assert done.returncode == 1
    assert "once more" not in done.stdout


@pytest.mark.parametrize(("text", "code"), [("def test_(: pass", 2), ("", 5)])
def test_what_cannot_be_collected_fails(tmp_path, text, code):
    assert run_tests(tmp_path, text).returncode == code


def test_arguments_reach_pytest(tmp_path):
    assert run_tests(tmp_path, STEADY, "-k", "good").returncode == 0

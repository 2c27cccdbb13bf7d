"""`make test-oldest-torch` runs tests with the oldest torch that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from hpcrl.versions import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]


def pinned_release() -> str:
    found = re.findall(r"^torch==(\S+)$", (ROOT / "constraints-oldest-torch.txt").read_text(), re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def test_it_is_the_lower_bound_of_all_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = {entry for extra in extras.values() for entry in extra if re.match(r"torch\b(?!vision)", entry)}
    (torch,) = (library for library in LIBRARIES if library.name == "torch")
    assert bounds == {f"torch>={torch.at_least}"}
    assert pinned_release().rpartition(".")[0] == torch.at_least


def test_the_target_asks_for_it_and_continuous_integration_for_the_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"HPCRL_TEST_TORCH={pinned_release()} " in makefile
    assert "make test-oldest-torch" in (ROOT / ".ci" / "run").read_text()


def test_tests_do_not_begin_with_another_torch() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", str(Path(__file__))]
    ended = subprocess.run(
        command,
        env={**os.environ, "HPCRL_TEST_TORCH": "1.0.0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 4
    assert "HPCRL_TEST_TORCH asks for torch 1.0.0, and Python finds" in ended.stdout + ended.stderr

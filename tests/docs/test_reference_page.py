"""docs/reference-run.md: planned figures are those of `hpcrl plan glm5_swe -c h200-28`."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "reference-run.md").read_text()


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Our figure by the subject of its row."""
    table = PAGE.partition("| subject |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {subject: ours for subject, _, ours, _ in cells}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the command prints, with blanks and bars taken out."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(tmp_path_factory.mktemp("plan"))
        patch.setattr(sys, "argv", ["hpcrl", "plan", "glm5_swe", "-c", "h200-28"])
        with pytest.raises(SystemExit):
            main()
    return " ".join(word for word in out.getvalue().split() if not set(word) <= set("█░"))


def test_times(rows: dict[str, str], plan: str) -> None:
    mid, _, ends = rows["step"].partition(" min (")
    assert f"step {ends.removesuffix(')')} min, expected {mid} min" in plan
    assert f"96, CP 4, EP 8, fp8 {rows['work of the trainer in a step']} " in plan
    assert f"1 x EP 64, TP 1, DP 64, fp8 {rows['work of the engines in a step']} " in plan
    assert f"hand-off {rows['hand-off of a version by files']}, " in plan


@pytest.mark.parametrize(
    ("subject", "kind"), [("memory of a trainer GPU", "gpu"), ("memory of a trainer node", "host")]
)
def test_memory(rows: dict[str, str], plan: str, subject: str, kind: str) -> None:
    used, capacity = rows[subject].removesuffix(" GiB").split(" of ")
    assert f"trainer {kind} {used} {capacity} " in plan


def test_costs(rows: dict[str, str], plan: str) -> None:
    assert f"cost {rows['cost']} " in plan
    assert f"shared fs {rows['shared filesystem, a step']} " in plan


def test_sizes(rows: dict[str, str], plan: str) -> None:
    assert rows["nodes"] == "28: 12 train, 8 prefill, 8 decode"
    for role, nodes in (("trainer", 12), ("prefill", 8), ("decode", 8)):
        assert f" {role} {nodes} {nodes * 8} " in plan

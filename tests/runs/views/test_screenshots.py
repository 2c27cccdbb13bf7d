"""The tool that draws the live screen: all of it is on the picture, and the picture fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs_testing import make_run, write_status, write_steps

from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.views.words import PHASES

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def words(path: Path) -> str:
    text = " ".join("".join(part.itertext()) for part in ElementTree.parse(path).iter(f"{SVG}text"))
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


def test_the_screen_of_a_run_is_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine", steps=80)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    write_steps(run, 40, total=80)
    output = tmp_path / "images/screen.svg"
    command = [sys.executable, ROOT / "tools/draw_screens.py", str(run.path), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output)
    seen = words(output)
    for word in ("hpcrl status mine --watch", "RUNNING", "step 40/80", "reward", "staleness", "engine 0", "trainer 0"):
        assert word in seen, seen
    legend = colours(output)
    phases = [label for label, _ in PHASES.values() if label in legend]
    assert len(phases) >= 4
    assert len({legend[label] for label in phases}) == len(phases), legend
    assert not re.findall(r"url\((?!#).*?\)|href=", output.read_text())


def colours(path: Path) -> dict[str, str]:
    """The colour of each word with a share, as in ``waiting 27%``."""
    fills = dict(re.findall(r"\.(screen-r\d+) \{ fill: (#[0-9a-f]{6})", path.read_text()))
    texts = [part for part in ElementTree.parse(path).iter(f"{SVG}text") if part.get("class") in fills]
    words = ((part, "".join(part.itertext()).replace("\N{NO-BREAK SPACE}", " ").split()) for part in texts)
    return {found[0]: fills[part.get("class", "")] for part, found in words if found[1:] and found[1].endswith("%")}


@pytest.mark.parametrize("name", ["status.svg"])
def test_the_picture_of_the_docs_is_one_of_the_tool(name: str) -> None:
    path = ROOT / "docs/images" / name
    legend = colours(path)
    phases = [label for label, _ in PHASES.values() if label in legend]
    assert len({legend[label] for label in phases}) == len(phases), legend
    assert "hpcrl status" in words(path)
    assert "@font-face" not in path.read_text()

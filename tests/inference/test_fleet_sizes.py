"""docs/inference.md says what to set for fleets of several sizes, with figures of the planner: they are still those."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpcrl.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/inference.md").read_text().partition("## Settings by the number of engine nodes")[2]
COMMANDS = re.findall(r"^    hpcrl (plan(?:[^\n\\]|\\\n)+)", SECTION, re.MULTILINE)
ROWS = [line for line in SECTION.splitlines() if re.match(r"\| \d+ \|", line)]


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """The example site, and the same with 112 nodes."""
    text = (ROOT / "clusters/h200-28.yaml").read_text()
    for count in (28, 112):
        own = text.replace("name: h200-28", f"name: h200-{count}").replace("nodes: 28", f"nodes: {count}")
        (tmp_path / f"h200-{count}.yaml").write_text(own)
    return tmp_path


def forecast(command: str, sites: Path) -> dict[str, Any]:
    words = shlex.split(command.replace("\\\n", " "))
    site = words.index("-c") + 1
    words[site] = str(sites / f"{words[site]}.yaml")
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)["forecast"]
    return value


def row_of(value: dict[str, Any]) -> str:
    """The figures of a row, as they stand in the table."""
    sides = [side for name in ("prefill", "decode") if (side := value["layout"].get(name))]
    nodes = sum(side["replicas"] * side["nodes"] for side in sides)
    places = [place for place in value["memory"]["places"] if place["kind"] == "gpu" and place["role"] != "trainer"]
    needed = ", ".join(f"{place['needed_bytes'] / 2**30:.0f}" for place in places)
    loop, times = value["loop"], value["times"]
    # one node has nobody to share with
    read = times.get("handoff_filesystem", times["handoff"])
    return " | ".join(
        [
            f"| {nodes}",
            needed,
            f"{loop['decode_batch']:.0f}",
            f"{1e3 * times['decode']['seconds']:.0f}",
            f"{loop['rollout_s'] / 60:.1f}",
            f"{times['handoff']['seconds']:.0f} ({read['seconds']:.0f})",
            f"{times['startup']['seconds']:.0f} |",
        ]
    )


def test_the_table_has_a_row_for_each_size() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == [1, 4, 16, 64]
    assert len(COMMANDS) == len(ROWS)


@pytest.mark.parametrize("number", range(4))
def test_figures_are_those_of_the_planner(number: int, sites: Path) -> None:
    value = forecast(COMMANDS[number], sites)
    assert row_of(value) == ROWS[number]
    assert value["memory"]["fits"], "a fleet that does not fit is not advice"

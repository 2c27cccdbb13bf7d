"""docs/observing.md: the table of curves is that of the code, and every number of a step is in it."""

from __future__ import annotations

import importlib.util
import re
import typing
from pathlib import Path

from hpcrl.analysis.page.definitions import PAGE_CURVES, definition_name
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.outlets.bends import BENDS
from hpcrl.runs.outlets.curves import CURVES, FAMILIES, curve_name
from hpcrl.runs.outlets.flat import flat_evaluation
from hpcrl.runs.run_progress import Evaluation

ROOT = Path(__file__).parents[2]
#: numbers that are no curves of learning: they keep their own names in sinks
OTHERS = {"time_s", "attempt", "step", "routed_tokens", "routes_bytes", "prefix_repeated_tokens", "model_flops"}


def test_the_table_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("draw_curves", ROOT / "tools/draw_curves.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/draw_curves.py`"


def test_every_number_of_a_step_has_a_curve() -> None:
    kinds = typing.get_type_hints(StepRecord)
    numbers = {name for name, kind in kinds.items() if kind in (int, float, bool, float | None)} - OTHERS
    mappings = {f"{name}/" for name in kinds if str(kinds[name]).startswith("dict")}
    assert numbers - set(CURVES) == set()
    assert mappings - set(FAMILIES) == set()


def test_every_curve_has_a_row_that_says_what_is_wrong_when_it_bends() -> None:
    curves = {definition_name(record) for record in (*CURVES, *FAMILIES, *PAGE_CURVES)}
    assert {name for bend in BENDS for name in bend.curves} == curves


def test_every_number_of_an_evaluation_has_a_curve() -> None:
    evaluation = Evaluation(version=3, reward=0.5, by_env={"words": 0.5}, parts={"words/format": 1.0}, prompts=8)
    assert {name: curve_name(name) for name in flat_evaluation(evaluation)} == {
        "heldout_reward": "heldout/reward",
        "heldout_count": "heldout/count",
        "heldout_failed": "heldout/failed",
        "heldout_by_env/words": "heldout/reward/words",
        "heldout_parts/words/format": "heldout/part/words/format",
    }


def test_names_in_sinks_are_unique() -> None:
    names = [curve.name for curve in (*CURVES.values(), *FAMILIES.values())]
    assert len(names) == len(set(names))
    # phases that other trainers have under a name of their own, and one that they do not have
    phases = ("wait_batch", "publish", "checkpoint", "forward_backward", "swap")
    assert [curve_name(f"phases_s/{phase}") for phase in phases] == [
        "time/wait_for_batch",
        "time/broadcast_weights",
        "time/save_ckpt",
        "time/forward_backward",
        "time/swap",
    ]
    assert curve_name("of_my_own") == "of_my_own"


def test_every_picture_of_the_docs_is_there_and_is_shown() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    there = {path.name: path.read_bytes() for path in (ROOT / "docs/images").iterdir()}
    assert set(re.findall(r"\((?:docs/)?images/([\w.-]+)\)", texts)) == set(there)
    for name, content in there.items():
        assert content.startswith(b"\x89PNG" if name.endswith(".png") else b"<"), name
        assert len(content) < 300_000, name


def test_the_pictures_of_page_and_board_are_made_by_a_test() -> None:
    test = (ROOT / "tests/board/test_board_pictures.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/observing.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"images/((?:board|page)[\w.-]+)\)", page))
    assert "page.png" in shown
    assert shown == set(re.findall(r'"((?:board|page)[\w-]*\.png)"', test))
    assert "(docs/images/board-quickstart.png)" in (ROOT / "README.md").read_text(encoding="utf-8")

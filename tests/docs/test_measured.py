"""Tables of docs/training.md have the figures of the benches: adapters, turns, FP8, replay, memory tools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/training.md").read_text()
ROUTERS = {"qwen3_moe": "softmax, 2 of 16", "glm4_moe": "sigmoid, 4 of 32"}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"bench/results/{name}.json").read_text())
    return found


def rows(header: str) -> list[list[str]]:
    """The cells of each row of the table that begins so."""
    (table,) = re.findall(rf"^{re.escape(header)}.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", DOCS, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def says(cell: str, *values: float) -> bool:
    """Whether the numbers of a cell are these, rounded to as many digits as it shows; percentages are shares."""
    shown = re.findall(r"(?<![\w.])[-+]?[\d,]*\d(?:\.\d+)?(?: ?%)?", cell)
    if len(shown) != len(values):
        return False
    for text, value in zip(shown, values, strict=True):
        number = text.replace(",", "").rstrip(" %")
        wanted = value * 100 if text.endswith("%") else value
        digits = len(number.partition(".")[2])
        if abs(float(number) - wanted) > 0.501 * 10**-digits:
            return False
    return True


def test_numbers_are_compared_as_they_are_rounded() -> None:
    assert says("0.0012", 0.00115)
    assert says("1,494 MiB", 1493.7)
    assert says("26 %", 0.26)
    assert says("0.04, 0.01 s", 0.0362, 0.0099)
    assert not says("0.0012", 0.0013)
    assert not says("26 %", 0.27)
    assert not says("0.04 s", 0.0362, 0.0099)


def test_adapters() -> None:
    found = rows("| | trained |")
    for cells, row in zip(found, recorded("lora")["rows"], strict=True):
        ratios = [row[f"{name}_ratio"] for name in ("peak", "step", "version", "publish", "load")]
        assert cells[0] == row["what"]
        assert all(says(cell, value) for cell, value in zip(cells[1:], [row["trained"], *ratios], strict=True)), cells


def test_adapters_into_a_real_vllm() -> None:
    found = rows("| model | way | bytes of a version |")
    for cells, row in zip(found, recorded("lora_vllm")["rows"], strict=True):
        assert cells[:2] == [row["model"], row["way"]]
        load = row["pause_s"] if "pause_s" in row else row["load_s"]
        columns = [[row["mib"]], [row["publish_s"]], [row["staged_s"]] if "staged_s" in row else [], [load]]
        columns += [[row["bytes_ratio"]], [row["seconds_ratio"]]]
        assert all(says(cell, *values) for cell, values in zip(cells[2:], columns, strict=True)), cells


def test_turns() -> None:
    result = recorded("colocated")
    layers, naive = (result["ways"][name] for name in ("layer by layer", "naive"))
    found = rows("| | most of the devices' memory |")
    for cells, way in zip(found, (layers, naive), strict=True):
        assert says(cells[1], way["device_peak_mib"])
        assert says(cells[2], way["hand_over_s"])
    assert says(found[0][3], layers["back_s"])
    assert layers["device_peak_mib"] <= 1.001 * result["trainer_mib"]
    schedules = rows("| answers | schedule |")
    assert len(schedules) == sum(map(len, result["schedules"].values()))
    for answers, schedule, step, generate, train, swap, idle, staleness in schedules:
        row = result["schedules"][answers][schedule]
        assert says(step, row["step_s"])
        assert says(generate, row["generate_s"])
        assert says(train, row["train_s"])
        assert says(swap, row["hand_over_s"], row["take_back_s"])
        assert says(idle, row["idle_share"])
        assert says(staleness, row["staleness_mean"], row["staleness_max"])


def test_distance_in_fp8() -> None:
    result, where = (
        recorded("fp8_mismatch"),
        {"bf16": "nowhere", "fp8_engine": "engine", "fp8_both": "engine and trainer"},
    )
    wanted = [(ROUTERS[kind], words, result[kind][key]) for kind in ROUTERS for key, words in where.items()]
    for cells, (router, words, row) in zip(rows("| router | FP8 |"), wanted, strict=True):
        assert cells[:2] == [router, words]
        assert says(cells[2], row["mismatch_kl"])
        assert says(cells[3], row["ess"])
        assert says(cells[4], row["routing_mismatch"])


def test_learning_in_fp8() -> None:
    (said,) = re.findall(r"^Learning: (.*?) seeds of one start model", DOCS, re.MULTILINE | re.DOTALL)
    found = recorded("fp8_rewards")
    values = [found["steps"]]
    for kind in ("without", "with"):
        after = [seed[kind]["heldout_after"] for seed in found["seeds"]]
        (before,) = {seed[kind]["heldout_before"] for seed in found["seeds"]}
        values += [min(after), max(after), before]
    assert says(said, *values, len(found["seeds"]))
    gained, half = found["difference"]["mean"], found["difference"]["half_interval_95"]
    assert f"FP8 reached {gained:.3f} more" in DOCS
    assert f"of {gained - half:.3f} to {gained + half:.3f} (`bench/rewards.py fp8`" in DOCS


@pytest.mark.parametrize("number", [0, 1])
def test_router_replay(number: int) -> None:
    """With the embedded engine, and with a real vLLM."""
    result = recorded(("router_replay", "router_replay_vllm")[number])
    tables = re.findall(r"^\| routers \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", DOCS, re.MULTILINE)
    assert len(tables) == 2
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[number].splitlines()]
    wanted = [(kind, noise) for kind in ROUTERS for noise in ("", "_perturbed")]
    for cells, (kind, noise) in zip(found, wanted, strict=True):
        row = next(value for key, value in result.items() if re.fullmatch(rf"{kind}_engine_[a-z0-9]+{noise}", key))
        assert cells[0] == ROUTERS[kind]
        assert ("noise" in cells[1]) == bool(noise)
        columns = [row[way][key] for key in ("mismatch_kl", "ess") for way in ("without", "with")]
        assert all(says(cell, value) for cell, value in zip(cells[2:], columns, strict=True)), cells


def test_rewards_with_replay_through_vllm() -> None:
    found = recorded("replay_vllm_rewards")
    (said,) = re.findall(r"recipes/quickstart_vllm.yaml` with one engine in\nbfloat16, (.*?) of -", DOCS, re.DOTALL)
    ends = [
        end(seed[kind]["heldout_after"] for seed in found["seeds"])
        for kind in ("without", "with")
        for end in (min, max)
    ]
    before, difference = found["seeds"][0]["with"]["heldout_before"], found["difference"]
    gained, half = difference["mean"], difference["half_interval_95"]
    assert says(said.replace("95%", ""), len(found["seeds"]), before, *ends, gained)
    assert f"interval of {gained - half:.3f} to {gained + half:.3f}." in DOCS

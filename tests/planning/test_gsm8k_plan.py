"""docs/gsm8k.md says on which cards the recipe for Qwen3-1.7B fits: the table is what is planned."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "gsm8k.md").read_text()
#: GiB that nvidia-smi shows of an A10, an A100 of 40 GB, and an H100
CARDS = {"24 GB": 22.5, "40 GB": 40.0, "80 GB": 79.6}
PROFILE = """\
extends: h200-28
name: card
partitions:
  gpu:
    nodes: 1
    node: {{gpus: 1, nics: [{{name: mlx5_0, gb_s: 50}}], cpus: 32, memory_gib: 240, gpu: {{memory_gib: {gib}}}}}
"""


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "plan", *arguments])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().out


def rows() -> list[list[str]]:
    """Card, settings, GiB of the trainer's GPU, GiB left, thousands of tokens of KV, whether it fits."""
    lines = PAGE.partition("| card ")[2].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][:6]


def test_all_cards_are_in_the_table() -> None:
    assert list(dict.fromkeys(row[0] for row in rows())) == list(CARDS)
    assert [row[0] for row in rows() if row[1] == "as it is"] == list(CARDS)


@pytest.mark.parametrize("number", range(6))
def test_the_table_is_what_is_planned(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card, settings, used, left, tokens, fits = rows()[number]
    profile = tmp_path / "card.yaml"
    profile.write_text(PROFILE.format(gib=CARDS[card]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    more = [] if settings == "as it is" else shlex.split(settings.strip("`"))
    code, out = planned(monkeypatch, capsys, "qwen3_1b7_gsm8k", "-c", str(profile), *more)
    lines = out.splitlines()
    (gpu,) = (line.split() for line in lines if line.startswith("trainer gpu"))
    assert (used, left) == (gpu[3], gpu[5])
    # nothing more of the GPU becomes KV cache: the trainer has it
    assert "left)" not in out
    kv = out.partition("\nKV cache")[2].partition(" hold ")[2].split()[0]
    assert round(int(kv.replace(",", "")) / 1000) == int(tokens)
    assert fits == ("yes" if code == 0 else "no")
    assert out.startswith("fits;") == (fits == "yes")


def test_the_recipe_for_a_whole_node_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = planned(monkeypatch, capsys, "qwen25_7b_math", "-c", "h200-28")
    assert (code, out.startswith("fits; ")) == (0, True)
    assert "layout    single (trainer and engines share one node): 1 node, 8 GPUs" in out


@pytest.mark.parametrize("name", ["qwen3_1b7_gsm8k", "qwen25_7b_math"])
def test_what_was_not_done_is_reported(name: str) -> None:
    """Whoever runs one of them on a GPU takes these lines out."""
    recipe = (Path(__file__).parents[2] / "recipes" / f"{name}.yaml").read_text()
    assert "Not run on a GPU yet" in recipe.partition("\nname:")[0].replace("\n# ", " ")
    assert "Not run on a GPU yet" in PAGE
    assert name in PAGE

"""``hpcrl recipe migrate`` and ``hpcrl cluster migrate``: files of earlier forms, comments and all."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import yaml

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.migrate import migrated_text
from hpcrl.errors import ConfigError
from hpcrl.runs.rundir import RunDir

EARLIER = """\
# Words, as we trained them in spring.
name: spring
model: {path: models/words}
environments:
  - {name: reverse, kind: words}
trainer:
  steps: 10  # enough
  memory:
    fp8: true  # since March
    lora_rank: 8
    compile: true
  dtype: float32
algorithm:
  loss:
    kind: gspo
    mask_low: 0.3
    clip_low: 0.25
evaluation:
  sets:
    - name: hot
      samples: 4
      temperature: 0.7   # as in the paper
    - {name: cold, temperature: 0.0, samples: 1}
"""
CURRENT = """\
# Words, as we trained them in spring.
schema: 1
name: spring
model: {path: models/words}
environments:
  - {name: reverse, kind: words}
trainer:
  steps: 10  # enough
  precision: {fp8: {}}
  lora: {rank: 8}
  memory:
    compile: true
  dtype: float32
algorithm:
  loss:
    kind: gspo
    clip_low: 0.25
evaluation:
  sets:
    - name: hot
      samples: 4
      sampling: {temperature: 0.7}   # as in the paper
    - {name: cold, sampling: {temperature: 0.0}, samples: 1}
"""
SITE = """\
name: site
kind: slurm
capabilities: {hetjob: true, preempt_signal: true}
partitions:
  gpu:
    node:
      cpus: 64   # of a node
      scratch_gb_s: 9
      memory_gib: 512
  # small ones
  cpu: {node: {cpus: 8, scratch_gb_s: 2.5}}
  old: {node: {scratch_gb_s: 1}}
"""


def migrate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "recipe", "migrate", *arguments])
    try:
        return main() or 0
    except SystemExit as ended:
        return int(ended.code or 0)


def written(directory: Path, text: str, name: str = "spring.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_settings_are_changed_in_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, EARLIER)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="hpcrl recipe migrate FILE"):
        load_recipe(str(path))

    assert migrate(monkeypatch, str(path)) == 0
    shown = capsys.readouterr()
    assert "-    lora_rank: 8\n" in shown.out
    assert "+  lora: {rank: 8}\n" in shown.out
    assert "--write" in shown.err
    assert path.read_text() == EARLIER

    assert migrate(monkeypatch, str(path), "--write") == 0
    assert path.read_text() == CURRENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    recipe = load_recipe(str(path)).value
    assert recipe.trainer.lora is not None
    assert (recipe.trainer.lora.rank, recipe.trainer.memory.compile) == (8, True)
    assert recipe.trainer.precision.fp8 is not None
    assert [given.sampling.temperature for given in recipe.evaluation.sets] == [0.7, 0.0]

    capsys.readouterr()
    assert migrate(monkeypatch, str(path), "--write") == 0
    assert "has the current form" in capsys.readouterr().out
    assert path.read_text() == CURRENT


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lora_rank: 8", "lora_rank: null", "  precision: {fp8: {}}\n  memory:\n    compile: true\n"),
        ("fp8: true  # since March", "fp8: false", "  steps: 10  # enough\n  lora: {rank: 8}\n  memory:\n    compile"),
        ("\n    fp8: true  # since March\n    lora_rank: 8\n    compile: true", " {fp8: true}", "{fp8: {}}\n  dtype"),
        ("\n    fp8: true  # since March\n    lora_rank: 8\n    compile: true", " {fp8: false}", "enough\n  dtype"),
        ("\n    fp8: true  # since March\n    lora_rank: 8", "\n    fp8: false", "  memory:\n    compile: true\n"),
        (
            "\n    fp8: true  # since March\n    lora_rank: 8\n    compile: true",
            " {compile: true, lora_rank: 2}",
            "  lora: {rank: 2}\n  memory: {compile: true}\n",
        ),
        ("    kind: gspo\n    mask_low: 0.3\n    clip_low: 0.25", "    ratio_low: 0.1", "dtype: float32\nevaluation"),
        (
            "\n    kind: gspo\n    mask_low: 0.3\n    clip_low: 0.25",
            " {tau: 1, kl_tau: 0.1, ratio_low: 3}",
            "{tau: 1, kl_tau: 0.1}",
        ),
        (
            "\n    kind: gspo\n    mask_low: 0.3\n    clip_low: 0.25",
            " {ratio_low: 3, ratio_high: 4}",
            "float32\nevaluation",
        ),
    ],
)
def test_nothing_is_left_of_settings_without_effect(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in EARLIER
    _, text = migrated_text(written(tmp_path, EARLIER.replace(old, new)), "recipe")
    assert expected in text


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("  dtype: float32", "  precision: {}", "trainer.memory.fp8"),
        ("  dtype: float32", "  lora: {}", "trainer.memory.lora_rank"),
        ("samples: 1}", "samples: 1, sampling: {top_p: 0.9}}", "evaluation.sets.1.temperature"),
    ],
)
def test_settings_in_two_places_are_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, key: str
) -> None:
    path = written(tmp_path, EARLIER.replace(old, new))
    assert migrate(monkeypatch, str(path), "--write") == 2
    with pytest.raises(ConfigError) as caught:
        migrated_text(path, "recipe")
    assert [finding.key for finding in caught.value.findings] == [key]
    assert path.read_text() == EARLIER.replace(old, new)


def test_a_text_that_is_not_changed_by_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # both names are for the same lines: to change one would change the other
    text = EARLIER.replace("trainer:", "base: &t").replace("algorithm:", "trainer: *t\nalgorithm:")
    path = written(tmp_path, text)
    assert migrate(monkeypatch, str(path), "--write") == 2
    assert path.read_text() == text


def test_profiles_lose_what_nothing_reads(tmp_path: Path) -> None:
    before, text = migrated_text(written(tmp_path, SITE, "site.yaml"), "cluster profile")
    assert before == SITE
    assert "cpus: 64   # of a node\n      memory_gib: 512\n  # small ones\n  cpu: {node: {cpus: 8}}\n" in text
    assert "capabilities: {hetjob: true}\n" in text
    assert "scratch" not in text
    assert "old" not in text
    assert yaml.safe_load(text)["schema"] == 1


@pytest.mark.parametrize(("given", "said"), [("2", "a later version"), ("0", "whole number"), ("'1'", "whole number")])
def test_forms_of_later_versions_are_refused(tmp_path: Path, given: str, said: str) -> None:
    path = written(tmp_path, CURRENT.replace("schema: 1", f"schema: {given}"))
    for read in (lambda: load_recipe(str(path)), lambda: migrated_text(path, "recipe")):
        with pytest.raises(ConfigError, match=said) as caught:
            read()
        assert "spring.yaml:2" in caught.value.findings[0].where


def test_runs_state_their_form_and_earlier_ones_are_read(tmp_path: Path) -> None:
    """Resolved recipes of earlier versions have settings of all losses, and switches that are off."""
    recipe = load_recipe("quickstart").value
    run = RunDir(tmp_path)
    plan = type("Plan", (), {"model_dump_json": lambda self, indent: "{}"})()
    run.write_configuration(recipe, load_cluster("local").value, plan)
    assert yaml.safe_load(run.recipe_path.read_bytes())["schema"] == 1
    assert yaml.safe_load(run.cluster_path.read_bytes())["schema"] == 1
    assert run.recipe() == recipe

    tree = yaml.safe_load(run.recipe_path.read_bytes())
    del tree["schema"]
    tree["trainer"]["memory"] |= {"fp8": False, "lora_rank": None}
    tree["algorithm"]["loss"] |= {"ratio_low": 0.5, "clip_low": 0.2}
    run.recipe_path.write_text(yaml.safe_dump(tree))
    assert run.recipe() == recipe
    assert load_recipe(str(run.recipe_path)).value == recipe
    tree["trainer"]["memory"]["lora_rank"] = 4
    run.recipe_path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"trainer\.lora now"):
        load_recipe(str(run.recipe_path))

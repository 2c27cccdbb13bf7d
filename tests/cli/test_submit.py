"""``hpcrl submit`` up to the point where it would start something."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import write_tiny_model

from hpcrl import models
from hpcrl.cli.main import main
from hpcrl.models.arch import trainable_types
from hpcrl.models.families import FAMILIES

Hpcrl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    """The command, in a directory with a model that has a configuration."""
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", "submit", "quickstart", "--set", f"model.path={model}", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_dry_run_shows_the_plan_and_changes_nothing(hpcrl: Hpcrl, tmp_path: Path) -> None:
    code, out, err = hpcrl("--dry-run", "--name", "try")
    assert code == 0, err
    assert "hpcrl.inference.embedded.server" in out
    assert str(tmp_path / "runs" / "try") in out
    assert "nothing was started" in err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_taken_is_refused_with_hints(hpcrl: Hpcrl, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    code, _, err = hpcrl("--name", "mine")
    assert code == 2
    assert "--name with another name" in err
    assert not list((tmp_path / "runs" / "mine").iterdir())


def test_a_name_with_a_path_in_it_is_refused(hpcrl: Hpcrl) -> None:
    code, _, err = hpcrl("--name", "../elsewhere")
    assert code == 2
    assert "cannot be the name of a run" in err


CONFIGS = Path(models.__file__).parent / "configs"
#: of each family that is planned and not trained one that is shipped
PLANNED_ALONE = {
    json.loads(path.read_text())["model_type"]: path.stem
    for path in sorted(CONFIGS.glob("*.json"))
    if json.loads(path.read_text())["model_type"] not in trainable_types()
}


def test_each_family_that_is_planned_and_not_trained_is_tried() -> None:
    # of Llama 4 the published models have eyes
    tried = {"llama4_text" if kind == "llama4" else kind for kind in PLANNED_ALONE}
    assert tried == FAMILIES.keys() - set(trainable_types())


@pytest.mark.parametrize("model", PLANNED_ALONE.values())
def test_a_model_that_nothing_here_runs_is_refused_by_name(hpcrl: Hpcrl, tmp_path: Path, model: str) -> None:
    """Facts know more families than the trainer and the embedded engine run."""
    config = (CONFIGS / f"{model}.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config)
    kind = json.loads(config)["model_type"]
    code, _, err = hpcrl("--name", "x")
    assert code == 2
    assert f"model_type is {kind!r}; trainer and embedded engine know {', '.join(trainable_types())}" in err
    assert "hint: choose a model of a family that the trainer has" in err
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_is_found_before_anything_is_written(hpcrl: Hpcrl, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    code, _, err = hpcrl("--name", "x")
    assert code == 2
    # no warm-up writes over what is there
    assert "this one has files, and config.json is not among them" in err
    shutil.rmtree(tmp_path / "model")
    code, _, err = hpcrl("--name", "x")
    assert code == 2
    assert "hpcrl warmup" in err
    assert not (tmp_path / "runs").exists()
    # the command line says where the model is, not the recipe: the warm-up must be told to put it there
    code, _, err = hpcrl("--name", "x", "--set", "model.path=my models/new")
    assert code == 2
    assert f" --output '{Path.cwd() / 'my models/new'}'" in err

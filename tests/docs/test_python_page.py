"""The examples of docs/python.md, run in their order as one script."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from start_models import small_model

from hpcrl import api
from hpcrl.errors import ConfigError, UsageError
from hpcrl.runs.rundir import RunDir

PAGE = Path(__file__).parents[2] / "docs/python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.timeout(600)
def test_examples_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(small_model(tmp_path_factory))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    lines = subprocess.run(
        [sys.executable, "-c", "\n".join(BLOCKS)], capture_output=True, text=True, check=False, timeout=580
    )
    assert lines.returncode == 0, lines.stderr
    out = lines.stdout.splitlines()
    assert out[0] == "False"
    assert "holds no model" in out[1]
    assert out[2].startswith("True ")
    assert "COMPLETED" in out
    assert "COMPLETED 3" in out
    assert any("rollouts.rollouts_per_step" in line for line in out)
    run = RunDir(tmp_path / "runs/first")
    shown = sorted(path.name for path in run.path.parent.iterdir() if not path.name.startswith("."))
    assert shown == ["first", "rates-01", "rates-02"]
    assert "{'COMPLETED': 2} {'trainer.optimizer.learning_rate': " in "\n".join(out)
    assert {"rates-01 COMPLETED", "rates-02 COMPLETED"} <= set(out)
    assert run.attempts() == [1, 2]


def test_the_page_names_every_method_of_a_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    of_runs, of_sweeps = text.split("| method of a sweep |")
    for kind, rows in ((api.Run, of_runs), (api.Sweep, of_sweeps)):
        methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        assert {name for name in methods if f"| `{name}()` |" not in rows} == set()
    assert {name for name in api.__all__ if name[0].islower() and f"api.{name}(" not in text} == set()


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, hpcrl.api; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "vllm", "matplotlib", "hpcrl.cli"} & set(found)


def test_errors_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="must be a positive number"):
        api.simulate("qwen3_30b_a3b", "h200-28", mtbf_h=-1.0)
    with pytest.raises(ConfigError, match=r"trainer\.step"):
        api.plan("quickstart", overrides={"trainer.step": 1})
    with pytest.raises(UsageError, match="there is no run"):
        api.Run("none", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overrides_of_a_mapping_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model.path": tmp_path / "ein 😀 Modell", "trainer.steps": 3, "job.partition": None}
    recipe = api.plan("quickstart", overrides=given, programs=False).prepared.recipe.value
    assert recipe.model.path == str(tmp_path / "ein 😀 Modell")
    assert (recipe.trainer.steps, recipe.job.partition) == (3, None)
    assert (
        api.plan("quickstart", overrides=["trainer.steps=3"], programs=False).prepared.recipe.value.trainer.steps == 3
    )

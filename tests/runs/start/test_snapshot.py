"""What an attempt would run, against what was there when a person submitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from runs_testing import make_run

import hpcrl
from hpcrl.cli.main import main
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start import snapshot
from hpcrl.runs.start.snapshot import changes_since_submit, keep_snapshot, read_snapshot, take_snapshot


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that Python imports from, with an environment in a package; importing it would fail the test."""
    path = tmp_path / "modules"
    (path / "tasks").mkdir(parents=True)
    (path / "tasks" / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (path / "tasks" / "sums.py").write_text("raise AssertionError('it was imported')\n")
    monkeypatch.syspath_prepend(str(path))
    return path


@pytest.fixture
def run(tmp_path: Path, modules: Path) -> RunDir:
    """A run with a custom environment, as it was submitted."""
    run = make_run(tmp_path / "runs")
    recipe = yaml.safe_load(run.recipe_path.read_text())
    recipe["environments"] = [{"name": "sums", "kind": "custom", "factory": "tasks.sums:Sums"}]
    run.recipe_path.write_text(yaml.safe_dump(recipe))
    keep_snapshot(run, take_snapshot(run, run.recipe(), run.plan()))
    return run


def test_nothing_has_changed(run: RunDir) -> None:
    kept = read_snapshot(run)
    assert kept is not None
    assert kept.hpcrl_path == str(Path(hpcrl.__file__).parent)
    assert kept.hpcrl_version == hpcrl.__version__
    assert kept.packages[sys.executable]["msgspec"] == msgspec.__version__
    assert changes_since_submit(run) == []


def test_an_environment_module_is_kept_and_compared(run: RunDir, modules: Path) -> None:
    module = modules / "tasks" / "sums.py"
    text = module.read_bytes()
    (copy,) = (run.snapshots_dir / "0001" / "environments").rglob("*.py")
    assert (copy.name, copy.read_bytes()) == ("tasks.sums.py", text)
    module.write_text("def Sums(): ...\n")
    assert changes_since_submit(run) == [f"the environment module tasks.sums ({module}) has changed"]
    module.unlink()
    assert changes_since_submit(run) == [f"the environment module tasks.sums is not found any more; it was {module}"]
    module.write_bytes(text)
    assert changes_since_submit(run) == []


def test_packages_of_other_interpreters_are_seen_without_starting_them(run: RunDir, tmp_path: Path) -> None:
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    info = site / "vllm-0.11.0.dist-info"
    info.mkdir(parents=True)
    plan = run.plan().model_copy(update={"python": str(tmp_path / "venv" / "bin" / "python")})
    run.plan_path.write_text(plan.model_dump_json())
    keep_snapshot(run, take_snapshot(run, run.recipe(), plan))
    info.rename(site / "vllm-0.12.0.dist-info")
    (change,) = changes_since_submit(run)
    assert change.startswith("vllm is 0.12.0, it was 0.11.0 (")


def test_a_checkout_is_recorded_with_commit_diff_and_files(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "checkout" / "hpcrl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one\n")
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(package.parent), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(snapshot.hpcrl, "__file__", str(package / "__init__.py"))
    (package / "__init__.py").write_text("two\n")
    keep_snapshot(run, take_snapshot(run, run.recipe(), run.plan()))
    kept = read_snapshot(run)
    assert kept is not None
    assert kept.checkout is not None
    assert kept.checkout.dirty
    assert b"+two" in (run.snapshots_dir / "0002" / "hpcrl.diff").read_bytes()
    git("commit", "-qam", "second")
    assert changes_since_submit(run) == []  # the same files, now committed
    (package / "__init__.py").write_text("three\n")
    (change,) = changes_since_submit(run)
    assert change.startswith("files of hpcrl have changed: commit ")
    assert change.endswith("with uncommitted changes")


def test_a_resume_refuses_where_the_recipe_says_so(
    run: RunDir, modules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load(run.recipe_path.read_text())
    recipe["job"]["on_change"] = "stop"
    run.recipe_path.write_text(yaml.safe_dump(recipe))
    keep_snapshot(run, take_snapshot(run, run.recipe(), run.plan()))
    (modules / "tasks" / "sums.py").write_text("def Sums(): ...\n")
    before = sorted(run.path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["hpcrl", "resume", str(run.path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "tasks.sums" in error
    assert "hpcrl resume run-1 --accept-changes" in error
    assert sorted(run.path.rglob("*")) == before

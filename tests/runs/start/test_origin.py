"""``hpcrl submit --from``: a run that begins with the weights of another one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from runs_testing import make_run
from start_models import TINY_CONFIG, write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.load import load_recipe
from hpcrl.errors import UsageError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.origin import find_source, write_start_model
from hpcrl.storage.files import FileRecord
from hpcrl.weights import HandoffStore, VersionCommitter, write_shard
from hpcrl.weights.format.manifest import CHUNK_BYTES, chunk_digests
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.write.handoff_writer import ShardResult


def write_model(path: Path, **changes: int) -> Path:
    return write_tiny_model(path, {**TINY_CONFIG, **changes})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def other(tmp_path: Path, model: Path) -> RunDir:
    """A run that has published full versions 3 and 5, and a delta between them."""
    run = make_run(tmp_path / "runs", "other")
    recipe = yaml.safe_load(run.recipe_path.read_text())
    recipe["model"]["path"] = str(model)
    run.recipe_path.write_text(yaml.safe_dump(recipe))
    writer = VersionCommitter.claim(run.weights_dir, 1)
    for version in (3, 5):
        data = bytes([version] * 16)
        tensor = TensorBytes("a.weight", "float32", (4,), memoryview(data))
        file, tensors = write_shard(writer.stage(version) / "model-00001-of-00001.safetensors", [tensor])
        shard = ShardResult("model-00001-of-00001.safetensors", file, tensors)
        writer.publish(version=version, shards=[shard], model_dir=model, producer="test")
    changes = b"changes"
    (writer.stage(4) / "changes").write_bytes(changes)
    writer.publish(
        version=4,
        shards=[ShardResult("changes", FileRecord(len(changes), chunk_digests(changes, CHUNK_BYTES)), {})],
        model_dir=None,
        producer="test",
        kind="delta",
        needs=(3,),
    )
    return run


def test_a_full_version_becomes_a_model_that_outlives_it(other: RunDir, tmp_path: Path) -> None:
    source = find_source("other@v3", other.path.parent)
    assert str(source.origin) == "version 3 of other"
    target = tmp_path / "start-model"
    write_start_model(source, target)
    shutil.rmtree(HandoffStore(other.weights_dir).path_of(3))  # it is collected
    assert (target / "model-00001-of-00001.safetensors").read_bytes()[-16:] == bytes([3] * 16)
    assert json.loads((target / "config.json").read_text())["num_experts"] == 2


def test_a_damaged_version_is_refused(other: RunDir, tmp_path: Path) -> None:
    file = HandoffStore(other.weights_dir).path_of(3) / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    source = find_source("other@v3", other.path.parent)
    with pytest.raises(UsageError, match=r"(?s)damaged.*hint: another version"):
        write_start_model(source, tmp_path / "start-model")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("othr@v3", "there is no run othr .*did you mean other"),
        ("other@v4", "version 4 of other holds changes only and needs versions 3.*a checkpoint: --from other"),
        ("other@v2", "version 2 of other was collected.*there are 3, 4, 5"),
        ("other@v9", "version 9 of other was never published"),
        ("other@7", "no checkpoint of step 7"),
        ("other@5", "no checkpoint of step 5.*--from other@v5"),
        ("other", "other has no valid checkpoint.*other@vN"),
        ("", "RUN@STEP"),
    ],
)
def test_what_is_not_there_is_refused_with_the_hint(other: RunDir, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){problem}"):
        find_source(text, other.path.parent)


Submit = Callable[..., tuple[int, str]]


@pytest.fixture
def submit(other: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    """A dry run; returns the exit code and what was said."""
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(other.path.parent))

    def call(model: Path, *arguments: str) -> tuple[int, str]:
        sets = ["--set", f"model.path={model}", "--name", "mine", "--dry-run"]
        monkeypatch.setattr(sys, "argv", ["hpcrl", "submit", "quickstart", *sets, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out + output.err

    return call


def test_the_plan_begins_with_a_model_of_its_own(submit: Submit, other: RunDir, tmp_path: Path) -> None:
    code, said = submit(tmp_path / "nowhere", "--from", "other@v3")
    assert code == 0, said
    assert str(other.path.parent / "mine" / "start-model") in "".join(said.split())
    assert not (other.path.parent / "mine").exists()


def test_a_model_of_another_shape_is_refused(submit: Submit, tmp_path: Path) -> None:
    code, said = submit(write_model(tmp_path / "larger", num_experts=4), "--from", "other@v3")
    assert code == 2
    assert "num_experts is 2, not 4" in " ".join(said.split())


def test_a_recipe_in_a_run_says_where_its_values_came_from(
    other: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(other.record_path.read_text())
    record["provenance"]["model.path"] = "--from first@24"
    other.record_path.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["hpcrl", "recipe", "show", str(other.recipe_path), "--json"])
    with pytest.raises(SystemExit):
        main()
    origins = {row["key"]: row["origin"] for row in json.loads(capsys.readouterr().out)}
    assert origins["model.path"] == "--from first@24"
    assert load_recipe(str(other.recipe_path)).value.model.path


def test_a_version_has_no_tower_to_carry(submit: Submit, other: RunDir, tmp_path: Path) -> None:
    code, said = submit(tmp_path / "nowhere", "--from", "other@v3", "--set", "model.vision=carry")
    assert code == 2
    assert "version 3 of other is a language model, which has no vision tower to carry" in " ".join(said.split())
    code, said = submit(tmp_path / "nowhere", "--from", "other@v3", "--set", "model.vision=drop")
    assert code == 0, said

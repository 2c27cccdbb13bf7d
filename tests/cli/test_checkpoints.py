"""``hpcrl checkpoint``: what an operator sees and can do."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
import yaml

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.cli.main import main
from hpcrl.config.load import load_recipe
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import FileRecord

STATE = msgspec.msgpack.encode(
    {"next_index": 40, "restart": [38, 39], "finished": [{"rollouts": [1, 2, 3, 4]}, {"rollouts": [1, 2, 3]}]}
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with entries of steps 1 to 4; the recipe keeps two."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    recipe = load_recipe("quickstart", ()).value
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    writer = CheckpointWriter.claim(run.checkpoints_dir, 3)
    for step in (1, 2, 3, 4):
        data = f"weights {step}".encode()
        (writer.stage(step) / "trainer" / "0.distcp").write_bytes(data)
        files = {"trainer/0.distcp": FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))}
        writer.commit(step=step, world_size=8, files=files, orchestrator_state=STATE, started_at_s=0.0, blocked_s=0.5)
    return run


class Command:
    """Calls the command line in this process."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.run, self.monkeypatch, self.capfd = run, monkeypatch, capfd

    def __call__(self, command: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Standard output and error."""
        argv = ["hpcrl", "checkpoint", command, "mine", *arguments, "--runs-root", str(self.run.path.parent)]
        self.monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = self.capfd.readouterr()
        assert int(exit_info.value.code or 0) == code, err
        return out, err

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(command, *arguments, "--json", code=code)[0])


@pytest.fixture
def checkpoint(run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(run, monkeypatch, capfd)


def steps(run: RunDir) -> list[int]:
    return CheckpointLedger(run.checkpoints_dir).steps()


def damage(run: RunDir, step: int) -> None:
    path = CheckpointLedger(run.checkpoints_dir).path_of(step) / "trainer" / "0.distcp"
    path.write_bytes(path.read_bytes()[::-1])


def test_ls(run: RunDir, checkpoint: Command) -> None:
    document = checkpoint.json("ls")
    assert (document["schema"], document["run"]) == ("hpcrl.checkpoints/1", "mine")
    assert [(item["step"], item["attempt"], item["world_size"], item["pin"]) for item in document["items"]] == [
        (step, 3, 8, None) for step in (1, 2, 3, 4)
    ]
    checkpoint("pin", "2", "--reason", "in [the] paper")
    table, _ = checkpoint("ls")
    assert "in [the] paper" in table
    # what ls looks at: all files in their sizes
    (run.checkpoints_dir / "step-000003" / "orchestrator.msgpack").unlink()
    document = checkpoint.json("ls", code=1)
    assert "orchestrator.msgpack is missing" in document["items"][2]["problem"]


def test_verify_reads_what_ls_does_not(run: RunDir, checkpoint: Command) -> None:
    checkpoint("verify")
    damage(run, 3)
    checkpoint("ls")
    checkpoint("verify", "--sizes")
    checkpoint("verify", "4")
    out, _ = checkpoint("verify", code=1)
    assert "does not have the content" in out
    _, err = checkpoint("verify", "7", code=1)
    assert "there are 1, 2, 3, 4" in err


def test_show(run: RunDir, checkpoint: Command) -> None:
    shown = checkpoint.json("show")
    assert (shown["step"], shown["policy_version"], shown["blocked_s"], shown["pin"]) == (4, 4, 0.5, None)
    assert shown["orchestrator"] == {
        "next_group": 40,
        "groups_to_restart": 2,
        "finished_groups": 2,
        "finished_rollouts": 7,
    }
    assert set(shown["records"]) == {"trainer/0.distcp", "orchestrator.msgpack"}
    checkpoint("pin", "1", "--reason", "first")
    out, _ = checkpoint("show", "1")
    assert "first" in out
    assert checkpoint("show", "step-000001")[0] == out
    (run.checkpoints_dir / "step-000004" / "manifest.json").write_text("torn")
    assert "cannot be read" in checkpoint("show", code=1)[0]


def test_prune_by_the_rule_of_the_recipe(run: RunDir, checkpoint: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint("pin", "1", "--reason", "first")
    _, err = checkpoint("prune", "--dry-run")
    assert "step-000002" in err
    assert "step-000001" not in err
    assert steps(run) == [1, 2, 3, 4]
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    _, err = checkpoint("prune", code=1)
    assert "remove 1 of mine?" in err
    assert steps(run) == [1, 2, 3, 4]
    out, _ = checkpoint("prune", "--yes")
    assert out.split() == ["2"]
    assert steps(run) == [1, 3, 4]
    assert "nothing to remove" in checkpoint("prune", "--yes")[1]
    checkpoint("unpin", "1")
    assert checkpoint("prune", "--yes", "--keep-last", "1")[0].split() == ["1", "3"]
    assert not [name for name in os.listdir(run.checkpoints_dir) if name.startswith(".removed")]


def test_prune_named_steps(run: RunDir, checkpoint: Command) -> None:
    checkpoint("pin", "3", "--reason", "best")
    _, err = checkpoint("prune", "--step", "3", "--yes", code=1)
    assert "hint: hpcrl checkpoint unpin " in err
    assert "mine 3\n" in err
    checkpoint("prune", "--step", "2", "--step", "4", "--yes")
    assert steps(run) == [1, 3]
    _, err = checkpoint("prune", "--step", "9", "--yes", code=1)
    assert "there are 1, 3" in err


def test_prune_never_leaves_only_damaged_ones(run: RunDir, checkpoint: Command) -> None:
    damage(run, 4)
    damage(run, 3)
    _, err = checkpoint("prune", "--yes", code=1)
    assert "no valid checkpoint of mine would be left" in err
    assert steps(run) == [1, 2, 3, 4]
    assert checkpoint("prune", "--yes", "--keep-last", "3")[0].split() == ["1"]


def test_export_says_what_is_missing(
    run: RunDir, checkpoint: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    _, err = checkpoint("export", "-o", str(tmp_path / "there"), code=2)
    assert "exists already" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    _, err = checkpoint("export", "-o", str(tmp_path / "new"), code=2)
    assert f"{sys.executable} -m pip install '" in err
    assert "[trainer]'" in err

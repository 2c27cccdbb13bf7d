"""``hpcrl weights show|pin|unpin|gc`` on real hand-offs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from handoff_lab import model_directory, publish, publish_delta
from rich.filesize import decimal

from hpcrl.cli.main import main
from hpcrl.config.load import load_recipe
from hpcrl.errors import UsageError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.origin import find_source
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.fabric_record import FabricPeer
from hpcrl.weights.lifetime.readers import Registration
from hpcrl.weights.write.fabric_records import FabricRecords


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with versions 1 to 6; 5 is made from 3, and the recipe keeps 2."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    recipe = load_recipe("quickstart", ["handoff.keep_last=2"]).value
    run.recipe_path.write_text(json.dumps(recipe.model_dump(mode="json")))
    store, model = HandoffStore(run.weights_dir), model_directory(tmp_path / "model")
    for version in (1, 2, 3, 4):
        publish(store, version, model)
    publish_delta(store, 5, (3,), model)
    publish(store, 6, model)
    return run


class Cli:
    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._run, self._monkeypatch, self._capsys = run, monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        root = str(self._run.path.parent)
        self._monkeypatch.setattr(sys, "argv", ["hpcrl", "weights", *arguments, "--runs-root", root])
        with pytest.raises(SystemExit) as exit_info:
            main()
        return int(exit_info.value.code or 0), *self._capsys.readouterr()


@pytest.fixture
def cli(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(run, monkeypatch, capsys)


def test_show(cli: Cli, run: RunDir) -> None:
    with Registration(run.weights_dir, "engine-0", expiry_s=60.0) as reader:
        reader.acknowledge(3)
        reader.lease([5, 3])
        shown = json.loads(cli("show", "mine", "3", "--json")[1])
        assert (shown["kind"], shown["needed_by"]) == ("full", [5])
        assert (shown["served_by"], shown["leased_by"], shown["pin"]) == (["engine-0"], ["engine-0"], None)
        code, out, _ = cli("show", "mine", "5")
    assert code == 0
    assert "changes 4 tensors of version 3; made from 3" in out
    assert "leased by engine-0" in out
    assert json.loads(cli("show", "mine", "--json")[1])["version"] == 6
    assert cli("show", "mine", "v000005")[1] == cli("show", "mine", "v5")[1]
    code, _, error = cli("show", "mine", "v5x")
    assert code == 2
    assert "is not a version" in error
    code, _, error = cli("show", "mine", "9")
    assert code == 1
    assert "there are 1, 2, 3, 4, 5, 6" in error


def test_what_is_known_of_an_announced_version_is_shown(cli: Cli, run: RunDir) -> None:
    writer = VersionCommitter.claim(run.weights_dir, 4)
    records = FabricRecords(writer.fence, protocol="tcp", timeout_s=1.0)
    manifest = msgspec.structs.replace(writer.store.open(6).manifest, version=7)
    records.announce(manifest, {})
    records.write(manifest, [FabricPeer("127.0.0.1:1", 0, manifest.total_bytes, 1)], ((),))
    code, out, _ = cli("show", "mine", "7")
    assert code == 0
    assert "announced, not durable (attempt 4): served from memory by 1 of the trainer's ranks" in out
    assert decimal(manifest.total_bytes) in out
    shown = json.loads(cli("show", "mine", "7", "--json")[1])
    assert (shown["durable"], shown["announced_by"], shown["served_by_ranks"]) == (False, 4, 1)
    assert (shown["bytes"], shown["tensors"]) == (manifest.total_bytes, len(manifest.tensors))
    shown = json.loads(cli("show", "mine", "--json")[1])  # the newest durable one
    assert (shown["version"], shown["durable"], shown["announced_by"]) == (6, True, None)
    code, _, error = cli("pin", "mine", "7", "--reason", "figure 3")
    assert code == 1
    assert "version 7 of mine is announced, not durable" in error
    with pytest.raises(UsageError, match="version 7 of mine is announced, not durable"):
        find_source("mine@v7", run.path.parent)
    code, _, error = cli("show", "mine", "0")
    assert code == 1
    assert "0 is not a version of mine" in error
    assert "there are 1, 2, 3, 4, 5, 6; 7 announced, not durable" in error
    VersionCommitter.claim(run.weights_dir, 5)
    assert "7 is not a version of mine" in cli("show", "mine", "7")[2]
    for version in (1, 2, 3, 4, 5, 6):
        shutil.rmtree(run.weights_dir / f"v{version:06d}")
    assert "the newest is not a version of mine" in cli("show", "mine")[2]


def test_gc_names_what_goes_and_why_the_rest_stays(cli: Cli, run: RunDir) -> None:
    store = HandoffStore(run.weights_dir)
    assert cli("pin", "mine", "1", "--reason", "figure 3")[0] == 0
    assert cli("pin", "mine", "9", "--reason", "x")[0] == 1
    plan = json.loads(cli("gc", "mine", "--dry-run", "--json")[1])
    assert (plan["removable"], plan["removed"]) == ([2, 4], [])
    assert plan["kept"]["3"] == "needed to reconstruct version 5"
    assert plan["kept"]["1"].endswith("figure 3")
    assert store.versions() == [1, 2, 3, 4, 5, 6]
    code, out, _ = cli("gc", "mine", "--dry-run")
    assert code == 0
    assert "remove       2" in out
    assert cli("gc", "mine", "--json")[0] == 2
    with Registration(run.weights_dir, "engine-0", expiry_s=60.0) as reader:
        reader.lease([2])
        code, out, error = cli("gc", "mine", "--yes")
    assert code == 0
    assert "leased by engine-0" in out
    assert "removed 4" in error
    assert store.versions() == [1, 2, 3, 5, 6]
    assert cli("unpin", "mine", "1")[0] == 0
    assert json.loads(cli("gc", "mine", "--yes", "--keep", "1", "--json")[1])["removed"] == [1, 2, 3, 5]
    assert "nothing to remove" in cli("gc", "mine")[2]


def test_gc_asks(cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def confirm(text: str, **_: object) -> None:
        asked.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.confirm", confirm)
    cli("gc", "mine")
    assert asked[0].startswith("remove 3 versions of mine (")
    assert HandoffStore(run.weights_dir).versions() == [1, 2, 3, 4, 5, 6]

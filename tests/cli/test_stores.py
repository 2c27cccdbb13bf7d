"""``hpcrl weights`` and ``hpcrl checkpoint`` on real hand-offs and entries, whole and damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpcrl.cli.main import main
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import VersionCommitter, write_shard
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.write.fabric_records import FabricRecords
from hpcrl.weights.write.handoff_writer import ShardResult


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with versions 1 and 2, which differ in one tensor."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    writer = VersionCommitter.claim(run.weights_dir, 1)
    for version in (1, 2):
        stage = writer.stage(version)
        arrays = {"same": np.zeros(3, np.float32), "changed": np.full(5, version, np.float32)}
        file, tensors = write_shard(
            stage / "model.safetensors",
            [TensorBytes(name, "float32", array.shape, memoryview(array).cast("B")) for name, array in arrays.items()],
        )
        shards = [ShardResult("model.safetensors", file, tensors)]
        writer.publish(version=version, shards=shards, model_dir=tmp_path, producer="test")
    return run


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def hpcrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDir, *arguments: str) -> Result:
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments, "--runs-root", str(run.path.parent)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return Result(int(exit_info.value.code or 0), *capsys.readouterr())


def test_lists(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(hpcrl(monkeypatch, capsys, run, "weights", "ls", "mine", "--json").out)
    assert (document["schema"], document["kind"]) == ("hpcrl.stored/1", "version")
    assert [(item["number"], item["by"], item["problem"]) for item in document["items"]] == [
        (1, "test", ""),
        (2, "test", ""),
    ]


def test_verify_finds_what_ls_cannot(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hpcrl(monkeypatch, capsys, run, "weights", "verify", "mine").code == 0
    shard = run.weights_dir / "v000002/model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert hpcrl(monkeypatch, capsys, run, "weights", "ls", "mine").code == 0
    result = hpcrl(monkeypatch, capsys, run, "weights", "verify", "mine", "2")
    assert result.code == 1
    assert "model.safetensors" in result.out
    assert hpcrl(monkeypatch, capsys, run, "weights", "verify", "mine", "1").code == 0


def test_an_announced_version_is_listed_as_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = VersionCommitter.claim(run.weights_dir, 2)
    records = FabricRecords(writer.fence, protocol="tcp", timeout_s=1.0)
    for version in (2, 3):  # of 2 the announcement is still there
        manifest = msgspec.structs.replace(writer.store.open(2).manifest, version=version)
        records.announce(manifest, {})
        records.write(manifest, (), ())
    document = json.loads(hpcrl(monkeypatch, capsys, run, "weights", "ls", "mine", "--json").out)
    assert [(item["number"], item["durable"]) for item in document["items"]] == [(1, True), (2, True), (3, False)]
    for command in ("ls", "verify"):
        result = hpcrl(monkeypatch, capsys, run, "weights", command, "mine")
        assert result.code == 0
        assert result.out.count("announced, not durable") == 1
        assert result.out.count("announced, not durable (attempt 2)") == 1
    assert document["items"][2]["announced_by"] == 2
    assert document["items"][2]["bytes"] == document["items"][1]["bytes"] > 0
    assert hpcrl(monkeypatch, capsys, run, "weights", "verify", "mine", "3").code == 0
    difference = hpcrl(monkeypatch, capsys, run, "weights", "diff", "mine", "1", "3", "--json")
    assert json.loads(difference.out)["changed"] == ["changed"]


def test_diff(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = hpcrl(monkeypatch, capsys, run, "weights", "diff", "mine", "1", "2")
    assert result.out.splitlines() == ["~ changed", "1 of 2 tensors changed: 20 of 32 bytes"]


def test_unknown_version_names_those_there_are(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hpcrl(monkeypatch, capsys, run, "weights", "diff", "mine", "1", "7")
    assert result.code == 1
    assert "there are 1, 2" in result.err

"""``hpcrl weights`` and ``hpcrl checkpoint`` on real hand-offs and entries, whole and damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcrl.cli.main import main
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffWriter, write_shard
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.write.handoff_writer import ShardResult


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with versions 1 and 2, which differ in one tensor."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    writer = HandoffWriter.claim(run.weights_dir, 1)
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


def test_diff(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = hpcrl(monkeypatch, capsys, run, "weights", "diff", "mine", "1", "2")
    assert result.out.splitlines() == ["~ changed", "1 of 2 tensors changed: 20 of 32 bytes"]


def test_unknown_version_names_those_there_are(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hpcrl(monkeypatch, capsys, run, "weights", "diff", "mine", "1", "7")
    assert result.code == 1
    assert "there are 1, 2" in result.err

"""The sinks that hpcrl brings, read back by the library's own reader: one curve over kills and a requeue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from outlets_lab import EventBoard, outlets, until, write_steps
from supervisor_testing import create

from hpcrl.config.outlets import SinkConfig
from hpcrl.runs.events import EventWriter
from hpcrl.runs.outlets.trial import find_problems
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import position_path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".sinks" / "bin" / "python"
needs_libraries = pytest.mark.skipif(
    not PYTHON.is_file(), reason="libraries of sinks are not there (tools/bootstrap.py --sinks)"
)

#: each prints the curve ``reward/mean`` as pairs of step and value, the curve ``heldout/reward``, and the learning rate
#: of the configuration
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(directory + "/tensorboard")
events.Reload()
text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
config = json.loads("\\n".join(line[4:] for line in text.splitlines()))
curve = lambda name: [[each.step, round(each.value, 3)] for each in events.Scalars(name)]
""",
    "wandb": """
import glob, pathlib, struct
from wandb.proto import wandb_internal_pb2 as messages
rows, config = [], {}
for file in sorted(glob.glob(directory + "/wandb/offline-run-*/*.wandb")):
    data, position, whole = pathlib.Path(file).read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole = (whole if kind in (3, 4) else b"") + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = messages.Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                rows.append({item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
            if record.WhichOneof("record_type") == "run":
                ids = {record.run.run_id} | config.get("ids", set())
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update} | {"ids": ids}
assert len(config.pop("ids")) == 1
# numbers of rows go on from file to file: `wandb sync` puts all files into one run
assert [row["_step"] for row in rows] == list(range(len(rows))), rows
axis = lambda name: "heldout/version" if name.startswith("heldout") else "step"
curve = lambda name: [[row[axis(name)], round(row[name], 3)] for row in rows if name in row]
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=server or "sqlite:///" + directory + "/mlflow.db")
(experiment,) = [each for each in client.search_experiments() if each.name == "hpcrl"]
(run,) = client.search_runs([experiment.experiment_id])
config = {"recipe": {"trainer": {"optimizer": {
    "learning_rate": float(run.data.params["recipe.trainer.optimizer.learning_rate"])}}}}
curve = lambda name: [[each.step, round(each.value, 3)] for each in client.get_metric_history(run.info.run_id, name)]
""",
    "trackio": """
import os
os.environ["TRACKIO_DIR"] = directory + "/trackio"
from trackio.sqlite_storage import SQLiteStorage as storage
(name,) = storage.get_runs("hpcrl")
config = storage.get_run_config("hpcrl", name)
rows = storage.get_logs("hpcrl", name)
curve = lambda name: [[row["step"], round(row[name], 3)] for row in rows if name in row]
""",
}
PARAMETERS: dict[str, Any] = {
    "tensorboard": {},
    "wandb": {"mode": "offline"},
    "mlflow": {"tracking_uri": "sqlite:///DIRECTORY/mlflow.db"},
    "trackio": {"directory": "DIRECTORY/trackio"},
}


#: the program ``mlflow`` of an environment with all of MLflow, whose server mlflow-skinny does not have
MLFLOW = os.environ.get("HPCRL_TEST_MLFLOW")


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[str]:
    """A real MLflow server on loopback; its address."""
    assert MLFLOW is not None
    port = free_port()
    command = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/server.db"]
    command += ["--artifacts-destination", str(directory / "artifacts")]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120.0
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert process.poll() is None, (directory / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_back(kind: str, run: RunDir, server: str = "") -> dict[str, Any]:
    """Return the curves and the learning rate that the library's reader finds."""
    code = f"import json\ndirectory, server = {str(run.sinks_dir)!r}, {server!r}\n" + READERS[kind]
    code += """
print("FOUND", json.dumps({
    "reward": sorted(curve("reward/mean")), "heldout": sorted(curve("heldout/reward")), "config": config}, default=str))
"""
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def given(run: RunDir) -> tuple[int, int]:
    """Return the last step and the last evaluated version that the sink was given."""
    path = position_path(run, "curves")
    position = json.loads(path.read_text()) if path.exists() else {}
    return position.get("last_step", 0), position.get("last_version", -1)


def evaluate(run: RunDir, version: int, reward: float, attempt: int = 1) -> None:
    log = EventWriter(run, attempt=attempt, writer="orchestrator")
    log.emit("evaluation", version=version, reward=reward, prompts=8, by_env={"words": reward}, parts={})
    log.close()


@needs_libraries
def test_an_evaluation_without_a_finite_reward_does_not_count_as_a_step(tmp_path: Path) -> None:
    """Trackio has one list of rows: which of them are evaluations decides what comes after a restart."""
    code = f"""
from hpcrl.runs.outlets.interface import RunInfo
from hpcrl.runs.outlets.shipped.trackio_sink import TrackioSink
info = RunInfo("night", __import__("pathlib").Path({str(tmp_path)!r}), 1, {{}}, 0)
sink = TrackioSink(directory={str(tmp_path / "trackio")!r})
sink.open(info)
sink.log(1, {{"reward_mean": 0.5}})
sink.evaluated(4, {{"heldout_count": 0.0, "heldout_failed": 8.0}})
print("STORED", *sink.open(info))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "STORED 1 4" in done.stdout


@needs_libraries
@pytest.mark.slow
@pytest.mark.skipif(MLFLOW is None, reason="HPCRL_TEST_MLFLOW names no program")
async def test_one_curve_in_a_server_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server").mkdir()
    with mlflow_server(tmp_path / "server") as url:
        await check_one_curve("mlflow", {"tracking_uri": url}, tmp_path, monkeypatch, server=url)


@needs_libraries
@pytest.mark.parametrize("kind", READERS)
async def test_one_curve_over_kills_and_a_requeue(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_one_curve(kind, PARAMETERS[kind], tmp_path, monkeypatch)


async def check_one_curve(
    kind: str, given_parameters: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str = ""
) -> None:
    """Log steps through kills of the sink and an attempt that computes a step again; read them back."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    run, board = create(tmp_path / "runs"), EventBoard()
    parameters = json.loads(json.dumps(given_parameters).replace("DIRECTORY", str(run.sinks_dir)))
    config = SinkConfig(name="curves", sink=kind, parameters=parameters, python=str(PYTHON), close_timeout_s=120)
    assert find_problems([config], []) == []

    first = outlets(run, board, (config,))
    evaluate(run, 0, 0.1)
    # of a version whose step is not on record yet: it is newer than the last step that the sink has
    evaluate(run, 4, 0.2)
    write_steps(run, range(1, 4), reward=0.25)
    await first.start()
    await until(lambda: given(run) == (3, 4), "three steps")
    (pid,) = first.pids()
    os.kill(pid, signal.SIGKILL)
    write_steps(run, range(4, 5), reward=0.25)
    await until(lambda: given(run) == (4, 4), "the step after the first kill")
    (pid,) = first.pids()
    os.kill(pid, signal.SIGKILL)
    # what it was given stands in the sink; that the position was not written must not double it
    position_path(run, "curves").write_text('{"last_step": 2, "last_version": 0}')
    write_steps(run, range(5, 6), reward=0.25)
    await until(lambda: given(run) == (5, 4), "the step after the second kill")
    await first.end_sinks(left_s=None, requeued=True)

    # the next attempt computes step 5 again
    second = outlets(run, board, (config,), attempt=2)
    write_steps(run, range(5, 8), attempt=2, reward=0.75)
    evaluate(run, 6, 0.5, attempt=2)
    await second.start()
    await until(lambda: given(run) == (7, 6), "the steps of the second attempt")
    await second.end_sinks(left_s=None, requeued=False)

    assert [kind for kind, _ in board.events] == ["sink.failed", "sink.failed"]
    if kind == "wandb":
        # the log has the command for a machine with a network
        log = (run.sinks_dir / "curves.log").read_text()
        assert f"wandb sync {run.sinks_dir}/wandb/offline-run-*" in log
    found = read_back(kind, run, server)
    assert found["reward"] == [[step, 0.25 if step < 6 else 0.75] for step in range(1, 8)]
    assert found["heldout"] == [[0, 0.1], [4, 0.2], [6, 0.5]]
    assert (
        found["config"]["recipe"]["trainer"]["optimizer"]["learning_rate"]
        == run.recipe().trainer.optimizer.learning_rate
    )


#: the sink as its process uses it, three times: killed in a write, continued, and for another run of the same name
TENSORBOARD = """
import dataclasses, glob, os, pathlib, sys
from hpcrl.runs.outlets.interface import RunInfo
from hpcrl.runs.outlets.shipped import tensorboard_sink
from hpcrl.runs.outlets.shipped.tensorboard_sink import TensorBoardSink
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

tensorboard_sink.run_config = lambda run: {}
directory = pathlib.Path(sys.argv[1])
run = RunInfo("mine", directory, 1, {}, 0)
step = lambda number, reward: (number, {"reward_mean": reward, "tokens": 10.0})
evaluation = lambda version, reward: (version, {"heldout_reward": reward, "heldout_count": 8.0})

def shown():
    events = EventAccumulator(str(directory / "board/mine"))
    events.Reload()
    return [[(each.step, round(each.value, 2)) for each in events.Scalars(name)]
            for name in ("reward/mean", "heldout/reward")]

def opened(last_step):
    sink = TensorBoardSink(directory=str(directory / "board"))
    return sink, tuple(sink.open(dataclasses.replace(run, last_step=last_step)))

first, stored = opened(0)
assert stored == (0, -1), stored
first.evaluated(*evaluation(0, 0.25))
for number in (1, 2, 3):
    first.log(*step(number, 0.5))
first.evaluated(*evaluation(5, 0.75))
(file,) = glob.glob(str(directory / "board/mine/*"))
size = os.path.getsize(file)
first.log(*step(4, 0.5))
os.truncate(file, size + (os.path.getsize(file) - size) // 2)

second, stored = opened(3)
assert stored == (3, 5), stored
second.log(*step(4, 0.5))
second.close()
assert shown() == [[(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)], [(0, 0.25), (5, 0.75)]], shown()

other, stored = opened(0)
assert stored == (0, -1), stored
other.evaluated(*evaluation(0, 0.0))
other.log(*step(1, 1.0))
other.close()
assert shown() == [[(1, 1.0)], [(0, 0.0)]], shown()
_, stored = opened(1)
assert stored == (1, 0), stored
"""


@needs_libraries
def test_tensorboard_tells_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was cut by a kill is not stored; the files of another run of the same name do not count."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run([PYTHON, "-c", TENSORBOARD, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_libraries
@pytest.mark.parametrize("kind", sorted(READERS))
def test_a_missing_library_is_named_before_a_submit(kind: str) -> None:
    """Ours may have one of them; an interpreter without site-packages has none."""
    found = find_problems([SinkConfig(name="curves", sink=kind, python=sys.executable)], [])
    if found:
        assert found[0]["key"] == "sinks.curves"
        assert f"{sys.executable} cannot import" in found[0]["what"]
        assert "-m pip install" in found[0]["hint"]


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    (found,) = find_problems([SinkConfig(name="curves", sink="wandb", python=str(tmp_path / "python"))], [])
    assert found["key"] == "sinks.curves"
    assert str(tmp_path / "python") in found["what"]
    assert found["hint"] == "name an interpreter that has hpcrl and the library"

"""Sinks are told how a run ends, and show it in their own words; an attempt that another one follows is no end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outlets_lab import EventBoard, outlets, until, write_steps
from supervisor_testing import create, end_everything, make_cluster, make_plan, make_recipe, wait_ended
from test_shipped_sinks import PARAMETERS, PYTHON, ROOT, evaluate, given, needs_libraries

from hpcrl.config.outlets import SinkConfig
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import EventWriter
from hpcrl.runs.outlets.run_end import final_summary
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.submit.submission import create_run, submit_attempt

MODULE = """
class Told:
    def open(self, run):
        self.path = run.directory / "sinks/told.txt"

    def log(self, step, metrics):
        pass

    def ended(self, state, summary):
        self.say(f"{state} {summary['steps']:g}")

    def close(self):
        self.say("close")

    def say(self, text):
        with self.path.open("a") as stream:
            stream.write(text + "\\n")
"""
#: each gives the state that the library shows, and the last ``final/`` number of held-out rewards
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(directory + "/tensorboard")
events.Reload()
said = [each for each in events.Tags()["tensors"] if each == "end/text_summary"]
state = events.Tensors(said[0])[-1].tensor_proto.string_val[0].decode().splitlines()[0] if said else None
final = events.Scalars("final/heldout_last")[-1].value if said else None
""",
    "wandb": """
import glob
from wandb.proto import wandb_internal_pb2 as messages
from hpcrl.runs.outlets.shipped.wandb_files import wandb_records
from pathlib import Path
files = map(Path, glob.glob(directory + "/wandb/offline-run-*/*.wandb"))
newest = max(files, key=lambda file: file.stat().st_mtime_ns)
code, preempted, summary = None, False, {}
for data in wandb_records(newest.read_bytes()):
    record = messages.Record.FromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "exit":
        code = record.exit.exit_code
    if kind == "preempting":
        preempted = True
    if kind == "summary":
        for item in record.summary.update:
            summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
state, final = [code, preempted, summary.get("final/state")], summary.get("final/heldout_last")
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///" + directory + "/mlflow.db")
(experiment,) = [each for each in client.search_experiments() if each.name == "hpcrl"]
(run,) = client.search_runs([experiment.experiment_id])
state, final = run.info.status, run.data.metrics.get("final/heldout_last")
""",
    "trackio": """
import os
os.environ["TRACKIO_DIR"] = directory + "/trackio"
from trackio.sqlite_storage import SQLiteStorage as storage
(name,) = storage.get_runs("hpcrl")
rows = [row for row in storage.get_logs("hpcrl", name) if "final/state" in row]
state, final = (rows[-1]["final/state"], rows[-1]["final/heldout_last"]) if rows else (None, None)
""",
}
SHOWN: dict[str, dict[RunState | None, Any]] = {
    "tensorboard": {None: None, RunState.FAILED: "**FAILED**", RunState.COMPLETED: "**COMPLETED**"},
    "wandb": {
        None: [1, True, None],
        RunState.FAILED: [1, False, "FAILED"],
        RunState.COMPLETED: [0, False, "COMPLETED"],
    },
    "mlflow": {
        None: "SCHEDULED",
        RunState.FAILED: "FAILED",
        RunState.COMPLETED: "FINISHED",
        RunState.CANCELLED: "KILLED",
    },
    "trackio": {None: None, RunState.FAILED: "FAILED", RunState.COMPLETED: "COMPLETED"},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "told_sink.py").write_text(MODULE)
    paths = [str(modules), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    path = tmp_path / "runs"
    yield path
    for run_dir in path.iterdir() if path.is_dir() else ():
        end_everything(RunDir(run_dir))


def shown(kind: str, run: RunDir) -> tuple[Any, float | None]:
    code = f"import json\ndirectory = {str(run.sinks_dir)!r}\n{READERS[kind]}"
    code += "\nprint('FOUND', json.dumps([state, final]))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    state, final = json.loads(line.removeprefix("FOUND "))
    return state, final


@needs_libraries
@pytest.mark.parametrize("kind", SHOWN)
async def test_a_sink_shows_how_the_run_ended(kind: str, root: Path) -> None:
    run, board = create(root), EventBoard()
    parameters = json.loads(json.dumps(PARAMETERS[kind]).replace("DIRECTORY", str(run.sinks_dir)))
    config = SinkConfig(name="curves", sink=kind, parameters=parameters, python=str(PYTHON), close_timeout_s=120)
    evaluate(run, 0, 0.25)
    for attempt, end in enumerate(SHOWN[kind], 1):
        assert run.start_attempt() == attempt
        sinks = outlets(run, board, (config,), attempt=attempt)
        write_steps(run, range(attempt, attempt + 1), attempt=attempt)
        await sinks.start()
        await until(lambda step=attempt: given(run)[0] == step, "the step")  # type: ignore[misc]
        await sinks.end_sinks(left_s=None, requeued=False, end=end)
        state, final = shown(kind, run)
        assert state == SHOWN[kind][end]
        assert final == (None if end is None and attempt == 1 else 0.25)
    assert board.events == []


def test_the_summary_has_first_and_last(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert final_summary(run) == {"steps": 0.0, "attempts": 0.0}
    run.start_attempt()
    write_steps(run, range(1, 13), reward=0.25)
    write_steps(run, range(13, 15), reward=0.75)
    evaluate(run, 0, 0.5)
    # a mean of few rollouts is easily the best one
    log = EventWriter(run, attempt=1, writer="orchestrator")
    log.emit("evaluation", version=8, reward=0.75, prompts=8, failed=5, counted=3)
    log.close()
    evaluate(run, 12, 0.625)
    assert final_summary(run) == {
        "steps": 14.0,
        "attempts": 1.0,
        "reward_first": 0.25,
        "reward_last": pytest.approx(0.35),
        "heldout_first": 0.5,
        "heldout_last": 0.625,
        "heldout_best": 0.75,
        "heldout_last_count": 8.0,
        "heldout_best_count": 3.0,
    }


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("trainer", "said"), [("finish", ["COMPLETED 0", "close"]), ("crash", ["FAILED 0", "close"])])
def test_the_supervisor_tells_the_end(trainer: str, said: list[str], root: Path) -> None:
    """Sinks end before the state is written: what they are told must be what will be written."""
    root.mkdir()
    plan = make_plan(root / "run-1", trainer=trainer)
    plan = plan.model_copy(update={"sinks": (SinkConfig(name="told", sink="told_sink:Told"),)})
    run = create_run(make_recipe(), make_cluster(), plan).run
    submit_attempt(RunContents.read(run))
    view = wait_ended(run)
    lines = (run.sinks_dir / "told.txt").read_text().splitlines()
    assert lines == said
    assert lines[0].startswith(view.state.value)

"""What sinks have beside a step's record: percentiles, lengths, GPU-hours, engines, rollouts, plan and software."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outlets_lab import record, write_steps
from supervisor_testing import create
from test_shipped_sinks import PARAMETERS, PYTHON, ROOT, needs_libraries

from hpcrl.config.layout import JobComponent, Layout
from hpcrl.config.load import load_cluster
from hpcrl.config.lora import LoraConfig
from hpcrl.runs.consumed import step_name
from hpcrl.runs.events import EventWriter
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.outlets.curves import by_curve
from hpcrl.runs.outlets.derived import (
    DerivedMetrics,
    mean_lengths,
    model_flops_utilization,
    orchestrator_numbers,
    peak_flops,
    staleness_percentiles,
    step_ratios,
)
from hpcrl.runs.outlets.feed import SinkFeed
from hpcrl.runs.outlets.interface import RunInfo
from hpcrl.runs.outlets.samples import SAMPLE_COLUMNS, sample_rows
from hpcrl.runs.outlets.shipped.library import run_config
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import SinkPosition, read_position
from hpcrl.runs.start.snapshot import read_snapshot


def write_rollouts(run: RunDir, step: int, count: int = 5) -> None:
    lines = [
        {
            "step": step,
            "group": step,
            "member": member,
            "environment": "words",
            "reward": member / 4,
            "advantage": 0.5,
            "tokens": 30,
            "sampled_tokens": 10 * (member + 1),
            "staleness": 1,
            "text": f"reply {member} of step {step}\nand more",
        }
        for member in range(count)
    ]
    run.rollouts_dir.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.rollouts_dir / step_name(step)).write_text(text)


class Kept:
    """A sink of another package that takes tables, or refuses them."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.tables: dict[int, list[dict[str, Any]]] = {}
        self._refuses = refuses

    def open(self, run: RunInfo) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps[step] = dict(metrics)

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.tables[step] = rows
        if self._refuses:
            raise RuntimeError("no place for tables")

    def close(self) -> None: ...


def test_percentiles_and_means_of_a_record() -> None:
    made = msgspec.structs.replace(
        record(3), staleness_histogram={"0": 5, "10": 1, "2": 4}, reward_count=10, tokens=200, sampled_tokens=50
    )
    assert staleness_percentiles(made) == {"staleness_p50": 0.0, "staleness_p90": 2.0}
    assert mean_lengths(made) == {"length_mean": 20.0, "sampled_length_mean": 5.0}
    # a record of an earlier version, or of supervised training
    assert staleness_percentiles(record(3)) == mean_lengths(record(3)) == {}


def test_ratios_of_a_step_are_there_where_they_are_known() -> None:
    made = msgspec.structs.replace(
        record(3), entropy=0.5, mismatch_kl=0.01, tokens_per_s=80.0, phases_s={"wait_batch": 1.5, "other": 0.5}
    )
    assert step_ratios(made, 4) == {"step_s": 2.0, "tokens_per_s_per_gpu": 20.0, "kl_ent_ratio": 0.02}
    # no GPUs; a policy without entropy; a number that a record does not know
    assert step_ratios(msgspec.structs.replace(made, entropy=0.0), 0) == {"step_s": 2.0}
    assert step_ratios(msgspec.structs.replace(made, mismatch_kl=math.nan), 0) == {"step_s": 2.0}


def test_the_use_of_the_hardware_is_known_where_all_of_it_is() -> None:
    made = msgspec.structs.replace(record(3), phases_s={"wait_batch": 1.5, "other": 0.5}, model_flops=6e15)
    # 3e15 operations a second, of 4 GPUs that do 1e15 each
    assert model_flops_utilization(made, 4, 1e15) == {"mfu": 0.75}
    assert model_flops_utilization(made, 4, None) == model_flops_utilization(made, 0, 1e15) == {}
    assert model_flops_utilization(msgspec.structs.replace(made, model_flops=None), 4, 1e15) == {}
    assert model_flops_utilization(msgspec.structs.replace(made, phases_s={}), 4, 1e15) == {}


def test_the_peak_of_a_gpu_is_that_of_the_profile(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert peak_flops(run) is None  # this machine, of which a profile says nothing
    profile = load_cluster(str(ROOT / "clusters/h200-28.yaml")).value
    run.cluster_path.write_text(profile.model_dump_json())
    recipe = run.recipe()

    def with_trainer(**changes: Any) -> None:
        trainer = recipe.trainer.model_copy(update=changes)
        run.recipe_path.write_text(recipe.model_copy(update={"trainer": trainer}).model_dump_json())

    with_trainer(dtype="bfloat16")
    assert peak_flops(run) == 989e12
    with_trainer(dtype="float32")
    assert peak_flops(run) == 67e12
    # adapters have other operations than those that are counted
    with_trainer(dtype="bfloat16", lora=LoraConfig())
    assert peak_flops(run) is None


def test_numbers_of_the_orchestrator_and_of_replay() -> None:
    made = msgspec.structs.replace(
        record(3), rollouts={"dropped_stale": 3.0, "cancelled_stale": 4.0}, replayed_share=0.75
    )
    assert orchestrator_numbers(made) == {"stale_rollouts": 7.0, "routing_fallback_share": 0.25}
    assert orchestrator_numbers(record(3)) == {}
    named = by_curve(orchestrator_numbers(made))
    assert named["r3/routed_experts_fallback_token_route_fraction"] == 0.25


def test_lengths_engines_and_gpu_hours_of_a_step(tmp_path: Path) -> None:
    run = create(tmp_path)
    part = JobComponent(
        roles=("trainer",), nodes=2, partition="p", gpus_per_node=4, gres="gres", exclusive=True, cpus=8, memory_gib=64
    )
    plan = run.plan().model_copy(update={"layout": Layout(kind="single", components=(part,))})
    run.plan_path.write_text(plan.model_dump_json())
    attempt = run.start_attempt()
    events = EventWriter(run, attempt=attempt, writer="supervisor")
    events.emit("attempt.started")
    events.close()
    write_rollouts(run, 4)
    engines = [
        EngineView(replica=0, version=3, kv_usage=0.5, running=4, tokens_per_s=100.0),
        EngineView(replica=1, version=1, kv_usage=0.75, running=0, tokens_per_s=50.0, answers=False),
        EngineView(replica=2, version=-1, answers=False),
    ]
    begin_s = time.time()
    FleetView(time_s=begin_s, newest=3, in_flight=4, limit=8, engines=engines).write(run, attempt)
    derived = DerivedMetrics(run, attempt)
    found = derived.of(msgspec.structs.replace(record(4, attempt), time_s=begin_s + 3600.0))
    assert {name: value for name, value in found.items() if "length" in name} == {
        "sampled_length_p50": 30.0,
        "sampled_length_p90": 50.0,
        "sampled_length_max": 50.0,
    }
    # eight GPUs for an hour
    assert found["gpu_hours"] == pytest.approx(8.0, rel=0.01)
    # the profile is of this machine, and says nothing of its hardware
    assert "mfu" not in found
    # the trainer of the plan has one rank, on nodes with GPUs
    made = record(4, attempt)
    assert found["tokens_per_s_per_gpu"] == made.tokens_per_s
    assert found["step_s"] == pytest.approx(sum(made.phases_s.values()))
    assert found["fleet/kv_usage/mean"] == 0.625
    assert found["fleet/kv_usage/max"] == 0.75
    assert found["fleet/tokens_per_s/min"] == 50.0
    assert found["fleet/versions_behind/max"] == 2.0
    assert (found["fleet_engines"], found["fleet_silent"]) == (3.0, 2.0)
    assert not any(name.startswith("fleet/waiting") for name in found)
    # engines are those of now: a step of an hour ago has none, nor one of another attempt
    for old in (record(3, attempt), msgspec.structs.replace(record(4, attempt + 1), time_s=begin_s)):
        assert not any(name.startswith("fleet") for name in derived.of(old))


def test_samples_are_worst_median_and_best_and_bounded(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert sample_rows(run, 2) == []
    write_rollouts(run, 2)
    rows = sample_rows(run, 2)
    assert [(row["rank"], row["rollout"], row["reward"]) for row in rows] == [
        ("worst", "2/0", 0.0),
        ("median", "2/2", 0.5),
        ("best", "2/4", 1.0),
    ]
    assert tuple(rows[0]) == SAMPLE_COLUMNS
    path = run.rollouts_dir / step_name(2)
    path.write_text(path.read_text().replace("and more", "x" * 9000))
    assert all(len(row["text"]) < 4100 for row in sample_rows(run, 2))


@pytest.mark.parametrize("refuses", [False, True])
def test_tables_come_every_few_steps_and_never_hinder_curves(refuses: bool, tmp_path: Path) -> None:
    run = create(tmp_path)
    run.sinks_dir.mkdir()
    for step in range(1, 7):
        write_rollouts(run, step)
    write_steps(run, range(1, 7))
    sink = Kept(refuses=refuses)
    feed = SinkFeed(run, 1, "kept", sink, rollouts_every=2)  # type: ignore[arg-type]
    feed.open()
    feed.close()
    assert list(sink.steps) == [1, 2, 3, 4, 5, 6]
    assert sink.steps[6]["sampled_length_p50"] == 30.0
    assert list(sink.tables) == ([2] if refuses else [2, 4, 6])
    silent = Kept()
    (run.sinks_dir / "kept.json").unlink()
    SinkFeed(run, 1, "kept", silent, rollouts_every=0).open()  # type: ignore[arg-type]
    assert len(silent.steps) == 6
    assert silent.tables == {}


def test_a_damaged_position_does_not_end_a_sink_for_good(tmp_path: Path) -> None:
    """A node that ends may leave an empty file."""
    run = create(tmp_path)
    run.sinks_dir.mkdir()
    write_steps(run, range(1, 4))
    (run.sinks_dir / "kept.json").write_bytes(b"")
    sink = Kept()
    SinkFeed(run, 1, "kept", sink).open()  # type: ignore[arg-type]
    assert list(sink.steps) == [1, 2, 3]
    assert read_position(run, "kept") == SinkPosition(3)


def test_the_configuration_has_plan_and_software(tmp_path: Path) -> None:
    run = create(tmp_path)
    config = run_config(RunInfo("run-1", run.path, 1, {"name": "stand-ins"}, 0))
    assert [group["role"] for group in config["plan"]["groups"]] == ["engine", "trainer"]
    assert config["plan"]["layout"]["kind"] == "local"
    assert not any("command" in group or "env" in group for group in config["plan"]["groups"])
    snapshot = read_snapshot(run)
    assert snapshot is not None
    assert config["hpcrl"]["sha256"] == snapshot.hpcrl_sha256
    if snapshot.checkout is not None:
        assert config["hpcrl"]["commit"] == snapshot.checkout.commit
        assert config["hpcrl"]["diff_sha256"] == snapshot.checkout.diff_sha256
    assert config["packages"] == snapshot.packages


def test_the_configuration_has_the_origin_of_each_value_and_the_command(tmp_path: Path) -> None:
    run = create(tmp_path)
    origin = {"trainer.steps": "--set", "trainer.optimizer.learning_rate": "mine.yaml:7"}
    own = {"provenance": origin, "argv": ["hpcrl", "submit", "mine.yaml"], "git_commit": "a" * 40}
    msgspec.structs.replace(RunRecord.read(run), **own).write(run)
    config = run_config(RunInfo("run-1", run.path, 1, {"name": "stand-ins"}, 0))
    assert (config["recipe"], config["provenance"]) == ({"name": "stand-ins"}, origin)
    assert (config["command"], config["git_commit"]) == ("hpcrl submit mine.yaml", "a" * 40)


#: each gives the step of the table and its texts, and the curve ``length/sampled/p90``
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(directory + "/tensorboard")
events.Reload()
(text,) = events.Tensors("rollouts/text_summary")
tables = [[text.step, text.tensor_proto.string_val[0].decode()]]
curve = [[each.step, each.value] for each in events.Scalars("length/sampled/p90")]
times = {round(each.wall_time) for each in events.Scalars("reward/mean")}
""",
    "wandb": """
import glob
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as messages
from hpcrl.runs.outlets.shipped.wandb_files import wandb_records
(file,) = glob.glob(directory + "/wandb/offline-run-*/*.wandb")
rows = []
for data in wandb_records(Path(file).read_bytes()):
    record = messages.Record.FromString(data)
    if record.WhichOneof("record_type") == "history":
        rows.append({"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
assert [row["_step"] for row in rows] == list(range(len(rows))), rows
tables = [[row["step"], (Path(file).parent / "files" / row["rollouts/samples/path"]).read_text()]
          for row in rows if "rollouts/samples/path" in row]
curve = [[row["step"], row["length/sampled/p90"]] for row in rows if "length/sampled/p90" in row]
times = {round(row["_timestamp"]) for row in rows if "reward/mean" in row}
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///" + directory + "/mlflow.db")
(experiment,) = [each for each in client.search_experiments() if each.name == "hpcrl"]
(run,) = client.search_runs([experiment.experiment_id])
assert run.data.params["plan.groups.0.role"] == "engine"
from pathlib import Path
tables = [[int(each.path[-11:-5]), Path(client.download_artifacts(run.info.run_id, each.path)).read_text()]
          for each in client.list_artifacts(run.info.run_id, "rollouts")]
history = client.get_metric_history(run.info.run_id, "length/sampled/p90")
curve = [[each.step, each.value] for each in history]
times = {each.timestamp // 1000 for each in history}
""",
    "trackio": """
import os
os.environ["TRACKIO_DIR"] = directory + "/trackio"
from trackio.sqlite_storage import SQLiteStorage as storage
(name,) = storage.get_runs("hpcrl")
rows = storage.get_logs("hpcrl", name)
tables = [[row["step"], json.dumps(row["rollouts/samples"])] for row in rows if "rollouts/samples" in row]
curve = [[row["step"], row["length/sampled/p90"]] for row in rows if "length/sampled/p90" in row]
from datetime import datetime
times = {round(datetime.fromisoformat(row["timestamp"]).timestamp()) for row in rows if "reward/mean" in row}
""",
}


@needs_libraries
@pytest.mark.parametrize("kind", READERS)
def test_rollouts_and_times_are_read_back(kind: str, tmp_path: Path) -> None:
    """A caught-up step has the time at which it was made, and not that of writing."""
    run = create(tmp_path / "runs")
    run.sinks_dir.mkdir()
    parameters = json.loads(json.dumps(PARAMETERS[kind]).replace("DIRECTORY", str(run.sinks_dir)))
    for step in (1, 2, 3):
        write_rollouts(run, step)
    write_steps(run, range(1, 4))
    feed = f"""
from hpcrl.config.outlets import SinkConfig
from hpcrl.runs.outlets.feed import SinkFeed
from hpcrl.runs.outlets.making import make_sink
from hpcrl.runs.rundir import RunDir
from pathlib import Path
config = SinkConfig(name="curves", sink={kind!r}, parameters={parameters!r})
feed = SinkFeed(RunDir(Path({str(run.path)!r})), 1, "curves", make_sink(config), rollouts_every=2)
feed.open()
feed.close()
"""
    read = f"import json\ndirectory = {str(run.sinks_dir)!r}\n{READERS[kind]}"
    read += "\nprint('FOUND', json.dumps([tables, sorted(curve), sorted(times)]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path)}
    for code in (feed, read):
        done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    tables, curve, times = json.loads(line.removeprefix("FOUND "))
    ((step, text),) = tables
    assert step == 2
    for member in (0, 2, 4):
        assert f"reply {member} of step 2" in text
    assert curve == [[1, 50.0], [2, 50.0], [3, 50.0]]
    assert times == [1_700_000_000]

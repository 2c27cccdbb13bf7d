"""What the records and sinks of a run cost: size of its files, share of a step, loop lag, time of reading commands.

``python bench/sinks_cost.py --model DIR`` runs the quickstart twice, one after the other: without a sink, and with one
that hangs in its first call. ``DIR`` is its start model (``hpcrl warmup``).

- *Files* are grouped; those of ``--steps`` steps have what the first half of the run has, and for each further step
  what its second half added for one. Rollouts for people are compressed but for the newest hundred steps; records and
  the ledger of rollouts but for one file of full size. Packed bytes are those of the run's own files as they are
  compressed. Checkpoints, hand-offs and arrays of rollouts are left out: they are kept by number, not by step.
- *Writing* is the time that a process is held up by one record, event or look for requests, with the run's own records,
  times the number of them in a step, as a share of the median step.
- *Reading* is the median of five calls of a command, and their mean CPU seconds, which a busy machine changes little:
  on a run of 10,000 steps, the real records of the run repeated, next to the run itself; and next to 100 such runs.

``--again DIR`` reads the runs that an earlier call made there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from harness import ROOT, RunResult, record, scratch

from hpcrl.dock.ledger.entries import ledger_files
from hpcrl.dock.ledger.log import FILE_BYTES
from hpcrl.reporting import reports
from hpcrl.runs.consumed import STEPS_A_FILE, pack_lines
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.metrics import MetricsWriter, read_metrics
from hpcrl.runs.metrics_files import PART_BYTES, metrics_parts, part_path
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import content_from, seal_file, sealed_path
from hpcrl.trainer.state.attempt_requests import RequestReader

_LEDGER = "ledger of rollouts"
_BY_NUMBER = ("weights", "checkpoints", "start-model", "rollouts/payload")
GROUPS = {
    "metrics": ("metrics",),
    "events": ("events",),
    "logs": ("attempts", "submitit"),
    "sinks": ("sinks",),
    "rollouts for people": ("rollouts",),
    _LEDGER: ("rollouts/ledger",),
}
HANGING = """
import time

class Sink:
    def open(self, run):
        return None

    def log(self, step, metrics):
        time.sleep(1e6)

    def close(self):
        pass
"""
_CALLS = 5
COMMANDS = (["status"], ["status", "--json"], ["ls"])


def group_sizes(run: RunDir) -> dict[str, int]:
    """Bytes of the files of a run by group; a file counts in the deepest group that has it."""
    sizes = dict.fromkeys([*GROUPS, "others"], 0)
    places = sorted(((part, name) for name, parts in GROUPS.items() for part in parts), key=lambda each: -len(each[0]))
    for path in run.path.rglob("*"):
        relative = path.relative_to(run.path)
        if path.is_symlink() or any(relative.is_relative_to(part) for part in _BY_NUMBER):
            continue
        try:
            size = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # collected meanwhile
        where = next((name for part, name in places if relative.is_relative_to(part)), "others")
        sizes[where] += size
    return sizes


def watched_run(model: Path, root: Path, name: str, *settings: str, half: int) -> tuple[RunResult, dict[str, int]]:
    """Run the quickstart, where it is not there; return it, and its sizes when step ``half`` was recorded."""
    env = {**os.environ, "HPCRL_RUNS_ROOT": str(root)}
    sets = [word for each in (f"model.path={model}", *settings) for word in ("--set", each)]
    hpcrl = str(Path(sys.executable).with_name("hpcrl"))
    run, early = RunDir(root / name), root / f"{name}.json"
    if not early.is_file():
        subprocess.run([hpcrl, "submit", "quickstart", "--name", name, *sets], check=True, cwd=ROOT, env=env)
        path = run.metrics_dir / "0001.jsonl"
        while not path.is_file() or path.read_bytes().count(b"\n") < half:
            time.sleep(0.2)
        sizes = group_sizes(run)
        subprocess.run([hpcrl, "wait", name], check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        early.write_bytes(msgspec.json.encode(sizes))
    return RunResult(run, 0.0, read_metrics(run), []), msgspec.json.decode(early.read_bytes())


def files(run: RunDir, first: dict[str, int], half: int, wanted: int) -> dict[str, dict[str, float]]:
    """Megabytes by group at ``wanted`` steps, and the bytes of a step."""
    last, steps = group_sizes(run), len(read_metrics(run))
    found = {}
    for name, size in last.items():
        each = max(0.0, (size - first[name]) / (steps - half))
        found[name] = {"bytes a step": round(each), "megabytes": round((first[name] + each * (wanted - half)) / 1e6, 1)}
    people, newest = "rollouts for people", min(wanted, STEPS_A_FILE)
    packed = packed_step(run)
    total = packed * (wanted - newest) + found[people]["bytes a step"] * newest
    found[people] |= {"packed bytes a step": round(packed), "megabytes": round(total / 1e6, 1)}
    for name, parts, file_bytes in (
        ("metrics", metrics_parts(run), PART_BYTES),
        (_LEDGER, ledger_files(run.rollouts_dir / "ledger"), FILE_BYTES),
    ):
        packed = sealed_bytes(parts) / steps
        total = packed * wanted + file_bytes  # at most: the newest file is just full
        found[name] |= {"packed bytes a step": round(packed), "megabytes": round(total / 1e6, 1)}
    return found


def sealed_bytes(paths: list[Path]) -> int:
    """Bytes of copies of files after they were sealed."""
    root, total = scratch("sinks-sealed"), 0
    for path in paths:
        copy = root / path.name
        copy.write_bytes(content_from(path))
        assert seal_file(copy, size=copy.stat().st_size)
        total += sealed_path(copy).stat().st_size
    return total


def packed_step(run: RunDir) -> float:
    """Bytes that a step's rollouts for people take in the file of a hundred."""
    paths = sorted(run.rollouts_dir.glob("step-*.jsonl"))
    return len(pack_lines(b"".join(path.read_bytes() for path in paths))) / len(paths)


def writing(result: RunResult, root: Path) -> dict[str, float]:
    """Seconds of a step for which processes are held up by what they record, by process."""
    run = RunDir(root / "writing")
    run.start_attempt()
    steps = result.steps
    writer = MetricsWriter(run, 1)
    begin = time.perf_counter()
    for number in range(2000):
        writer.write(steps[number % len(steps)])
    record_s = (time.perf_counter() - begin) / 2000
    writer.close(60.0)
    found = [event for event in read_events(result.run) if event.writer != "supervisor"]
    events = EventWriter(run, attempt=1, writer="trainer-0")
    begin = time.perf_counter()
    for number in range(2000):
        event = found[number % len(found)]
        events.emit(event.kind, **event.data)
    event_s = (time.perf_counter() - begin) / 2000
    events.close(60.0)
    reports.flush(60.0)
    requests = RequestReader(RoleContext(result.run, attempt=1, role="trainer", replica=0, rank=0))
    begin = time.perf_counter()
    for _ in range(2000):
        requests.read()
    request_s = (time.perf_counter() - begin) / 2000
    each = Counter(event.writer.split("-")[0] for event in found)
    return {
        "record_us": 1e6 * record_s,
        "event_us": 1e6 * event_s,
        "look_for_requests_us": 1e6 * request_s,
        "trainer_s": record_s + request_s + event_s * each["trainer"] / len(steps),
        "orchestrator_s": event_s * each["orchestrator"] / len(steps),
        "events_a_step": len(found) / len(steps),
    }


def long_copy(run: RunDir, root: Path, name: str, steps: int) -> RunDir:
    """A run of ``steps`` steps with the records and events of a real one, repeated."""
    left_out = shutil.ignore_patterns("weights", "checkpoints", "rollouts", "sinks")
    copy = RunDir(Path(shutil.copytree(run.path, root / name, symlinks=True, ignore=left_out)))
    for path in (copy.record_path, copy.plan_path):
        path.write_text(path.read_text().replace(str(run.path), str(copy.path)).replace(run.name, name))
    msgspec.structs.replace(RunRecord.read(copy), name=name).write(copy)
    source = part_path(copy, 1)
    lines = [msgspec.json.decode(line) for line in source.read_bytes().splitlines()]
    span_s = lines[-1]["time_s"] - lines[0]["time_s"] + 1.0
    rounds = -(-steps // len(lines))
    part, records = 1, bytearray()
    for number in range(steps):
        line = lines[number % len(lines)]
        late_s = (number // len(lines) - rounds + 1) * span_s
        records += msgspec.json.encode({**line, "step": number + 1, "time_s": line["time_s"] + late_s}) + b"\n"
        if len(records) >= PART_BYTES or number == steps - 1:
            path = part_path(copy, 1, part)
            path.write_bytes(records)
            if number < steps - 1:
                seal_file(path, size=len(records))
            part, records = part + 1, bytearray()
    for path in copy.events_dir.glob("*.jsonl"):
        if "supervisor" not in path.name:
            path.write_bytes(path.read_bytes() * rounds)
    return copy


def linked_copy(run: RunDir, name: str) -> None:
    """A run with the files of another, but for its own name."""
    copy = RunDir(Path(shutil.copytree(run.path, run.path.with_name(name), symlinks=True, copy_function=os.link)))
    for path in (copy.record_path, copy.plan_path):
        text = path.read_text().replace(str(run.path), str(copy.path))
        path.unlink()
        path.write_text(text)
    msgspec.structs.replace(RunRecord.read(copy), name=name).write(copy)


def reading(runs: RunDir, root: Path) -> dict[str, dict[str, float]]:
    """Seconds of commands in a directory of runs."""
    env = {**os.environ, "HPCRL_RUNS_ROOT": str(root), "XDG_STATE_HOME": str(scratch("sinks-state"))}
    # with compiled modules, as pip installs them; without, half of the seconds would be the compiler's
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(scratch("sinks-compiled"))
    found = {}
    for command in COMMANDS:
        words = [str(Path(sys.executable).with_name("hpcrl")), *command]
        words += [runs.name] if command[0] == "status" else []
        subprocess.run(words, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds, before = [], os.times()
        for _ in range(_CALLS):
            begin = time.monotonic()
            subprocess.run(words, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - begin)
        after = os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        figures = {"seconds": statistics.median(seconds), "cpu_seconds": cpu_s / _CALLS}
        found[" ".join(command)] = {name: round(value, 2) for name, value in figures.items()}
    return found


def lag(result: RunResult) -> dict[str, float]:
    """Loop lag of the orchestrator in milliseconds, and the median step in seconds."""
    lags = [step.rollouts for step in result.steps if "loop_lag_p99_ms" in step.rollouts]
    return {
        "loop_lag_p50_ms": round(statistics.median(each["loop_lag_p50_ms"] for each in lags), 2),
        "loop_lag_p99_ms": round(statistics.median(each["loop_lag_p99_ms"] for each in lags), 2),
        "loop_lag_max_ms": round(max(each["loop_lag_max_ms"] for each in lags), 1),
        "step_s": round(statistics.median(sum(step.phases_s.values()) for step in result.steps), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="start model of the quickstart")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the long run")
    parser.add_argument("--trained", type=int, default=40, help="steps of the real runs")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--again", type=Path, metavar="DIR", help="of the runs of an earlier call")
    wanted = parser.parse_args()
    half, root = wanted.trained // 2, wanted.again or scratch("sinks-cost")
    module = scratch("sinks-module")
    (module / "hanging_sink.py").write_text(HANGING)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(module), *filter(None, [os.environ.get("PYTHONPATH")])])
    steps = f"trainer.steps={wanted.trained}"
    plain, early = watched_run(wanted.model.resolve(), root, "plain", steps, half=half)
    hanging = 'sinks=[{"name": "hang", "sink": "hanging_sink:Sink", "close_timeout_s": 5}]'
    hung, _ = watched_run(wanted.model.resolve(), root, "hung", steps, hanging, half=half)
    figures: dict[str, Any] = {
        "files": files(plain.run, early, half, wanted.steps),
        "without a sink": lag(plain),
        "with a sink that hangs": lag(hung),
    }
    sizes = {name: each["megabytes"] for name, each in figures["files"].items()}
    figures["megabytes"] = round(sum(sizes.values()), 1)
    cost = writing(plain, scratch("sinks-writing"))
    step_s = figures["without a sink"]["step_s"]
    shares = {f"{name}_share": round(cost[f"{name}_s"] / step_s, 5) for name in ("trainer", "orchestrator")}
    figures["writing"] = {name: round(value, 6) for name, value in cost.items()} | shares
    long_root = scratch("sinks-long")
    long = long_copy(plain.run, long_root, "long", wanted.steps)
    figures["reading"] = {
        "the run itself": reading(plain.run, root),
        f"a run of {wanted.steps} steps": reading(long, long_root),
    }
    for number in range(1, wanted.runs):
        linked_copy(long, f"{long.name}-{number:03d}")
    figures["reading"][f"{wanted.runs} runs of {wanted.steps} steps"] = reading(long, long_root)
    for name, value in figures.items():
        print(f"{name:24} {value}")
    record("sinks_cost", figures)


if __name__ == "__main__":
    main()

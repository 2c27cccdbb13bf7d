"""How the orchestrator holds up with thousands of rollouts in flight.

Starts stub engines in processes of their own and the real orchestrator in another, keeps ``--in-flight``
rollouts running, takes batches as a trainer would, and measures for ``--seconds``: the event loop's lag (from
``/metrics``), the orchestrator's CPU share, and what it got done. Writes ``bench/results/orchestrator_scale.json``.

    python bench/orchestrator_scale.py --in-flight 2048 --seconds 30
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.config.recipe import Recipe
from hpcrl.dock.client import DockClient
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.network.credentials import Credentials
from hpcrl.runs.role import Endpoints, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore

REPOSITORY = Path(__file__).resolve().parent.parent
RESULT = REPOSITORY / "bench" / "results" / "orchestrator_scale.json"
STUB = REPOSITORY / "tests" / "rollouts" / "stub_engine.py"
GOAL_P99_MS = 50.0


def make_run(path: Path, in_flight: int, settings: Mapping[str, Any], facts: Path | None) -> RunDir:
    """A run whose rollouts are words of one turn: the orchestrator's own work, with nothing else in it.

    ``settings`` are more of the recipe, by section; ``facts`` is the ``config.json`` of its model.
    """
    run = RunDir(path / "run")
    run.path.mkdir()
    write_character_tokenizer(path / "model")
    if facts is not None:
        shutil.copy(facts, path / "model" / "config.json")
    rollouts = {"rollouts_per_step": 256, "group_size": 8, "max_in_flight": in_flight} | settings.get("rollouts", {})
    # so far ahead that admission is bounded by max_in_flight alone
    rollouts["max_off_policy_steps"] = 4 * in_flight // rollouts["rollouts_per_step"]
    recipe = Recipe.model_validate(
        {
            "name": "scale",
            "model": {"path": str(path / "model")},
            "environments": [{"name": "words", "kind": "words"}],
            "trainer": {"steps": 1_000_000, "micro_batch_tokens": 8192},
            "evaluation": {"every_steps": 0, "prompts": 64},
            **settings,
            "rollouts": rollouts,
        }
    )
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run.start_attempt()
    return run


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def metrics(request: urllib.request.Request) -> dict[str, float]:
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("hpcrl_rollouts_"): float(value) for name, value in values}


def until_full(request: urllib.request.Request, in_flight: int, timeout_s: float) -> None:
    """Wait until the engines are full (RuntimeError where they never are)."""
    deadline = time.monotonic() + timeout_s
    while metrics(request).get("in_flight", 0) < 0.95 * in_flight:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{in_flight} rollouts were not in flight within {timeout_s:g} s")
        time.sleep(0.5)


class FastTrainer(threading.Thread):
    """Takes every batch as soon as there is one, and publishes a version for it."""

    def __init__(self, dock: DockClient, store: HandoffStore) -> None:
        super().__init__(daemon=True)
        self._dock, self._store, self.step, self.stop = dock, store, 0, threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            self._dock.batch(self.step + 1, rank=0, world_size=1)
            self.step += 1
            self._store.path_of(self.step).mkdir()
            self._dock.published(self.step)


def measure(request: urllib.request.Request, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Read lag, rollouts and CPU time; the lag's percentiles are over the last minute, the maximum over all."""
    before, cpu_before, started = metrics(request), process.cpu_times(), time.monotonic()
    in_flight = []
    while time.monotonic() - started < seconds:
        time.sleep(1.0)
        in_flight.append(metrics(request)["in_flight"])
    wall = time.monotonic() - started
    after, cpu_after = metrics(request), process.cpu_times()
    cpu = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    return {
        "seconds": round(wall, 2),
        "in_flight_mean": round(sum(in_flight) / len(in_flight)),
        "rollouts_per_s": round((after["finished_total"] - before["finished_total"]) / wall, 1),
        "cpu_share": round(cpu / wall, 3),
        "loop_lag_p50_ms": round(1e3 * after["loop_lag_p50_seconds"], 2),
        "loop_lag_p99_ms": round(1e3 * after["loop_lag_p99_seconds"], 2),
        "loop_lag_max_ms": round(1e3 * after["loop_lag_max_seconds"], 2),
        "engine_retries": after["engine_retries_total"] - before["engine_retries_total"],
        "rss_mib": round(process.memory_info().rss / (1 << 20)),
    }


def bench(
    in_flight: int,
    engines: int,
    request_s: float,
    seconds: float,
    *,
    engine: Path = STUB,
    settings: Mapping[str, Any] = MappingProxyType({}),
    facts: Path | None = None,
) -> dict[str, Any]:
    """One measurement, with the program ``engine`` for engines."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcrl-bench-")))
        run = make_run(path, in_flight, settings, facts)
        *ports, own = free_ports(engines + 1)
        urls = {
            "engine": [f"http://127.0.0.1:{port}" for port in ports],
            "orchestrator": [f"http://127.0.0.1:{own}"],
        }
        Endpoints(urls=urls).write(run, 1)
        RestoreDecision(step=None, verified="content", seconds=0.0, skipped=[]).write(restore_path(run, 1))

        log = stack.enter_context((path / "log").open("wb"))

        def start(command: list[str], **environment: str) -> subprocess.Popen[bytes]:
            child = subprocess.Popen([sys.executable, *command], env={**os.environ, **environment}, stderr=log)
            stack.callback(child.wait)
            stack.callback(child.kill)
            return child

        for port in ports:
            start([str(engine), "--port", str(port), "--request-s", str(request_s)])
        orchestrator = start(
            ["-m", "hpcrl.rollouts"],
            HPCRL_RUN_DIR=str(run.path),
            HPCRL_ATTEMPT="1",
            HPCRL_ROLE="orchestrator",
            HPCRL_REPLICA="0",
        )
        store = HandoffStore(run.weights_dir)
        store.path_of(0).mkdir(parents=True)
        credentials = Credentials.of_run(run.path, 1)
        dock = DockClient(urls["orchestrator"][0], credentials=credentials, wait_timeout_s=120.0)
        request = urllib.request.Request(f"{dock.url}/metrics", headers=credentials.headers)
        dock.published(0)
        trainer = FastTrainer(dock, store)
        trainer.start()
        until_full(request, in_flight, 60.0)
        result = {**measure(request, psutil.Process(orchestrator.pid), seconds), "steps": trainer.step}
        trainer.stop.set()
        trainer.join(timeout=60.0)
    return {"in_flight": in_flight, "engines": engines, "request_s": request_s, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=2048)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--request-s", type=float, default=5.0, help="mean time of a request on a stub, ± 50 %%")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    result = bench(arguments.in_flight, arguments.engines, arguments.request_s, arguments.seconds)
    result["goal_loop_lag_p99_ms"] = GOAL_P99_MS
    result["machine"] = {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result.items():
        print(f"{name:22} {value}")
    if result["loop_lag_p99_ms"] > GOAL_P99_MS:
        sys.exit(f"loop lag p99 is above {GOAL_P99_MS:g} ms")


if __name__ == "__main__":
    main()

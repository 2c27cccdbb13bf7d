"""Thousands of scripted rollouts of agents through the real orchestrator and its gateway, beside verifiers' env server.

The orchestrator is a process of its own, as in a run, with an environment that lets a player call the endpoint of each
rollout: every turn sends the whole history and gets a call of a tool. The engine says the same turn after a fixed time,
so that all else of a call is what the gateway takes, and the player and the engine on the same processors.

Three measurements in one run: hpcrl with ``--rollouts``, hpcrl with ``--peer-rollouts``, and as many by verifiers' env
server, with the same engine and the same player. In verifiers the worker of the environment server has the endpoint,
and its client assembles the rollouts. Writes ``bench/results/agents.json``.

    python bench/agents.py --rollouts 2048 --turns 100 --rate 500

At full size each measurement takes many minutes. ``--only`` takes one of them and leaves the figures of the others in
the file as they are; ``--seconds`` ends it early, with the figures of the calls until then:

    python bench/agents.py --only hpcrl --seconds 360
    python bench/agents.py --only hpcrl-beside-verifiers --seconds 200
    python bench/agents.py --only verifiers --seconds 200
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from agent_player import SAID, raise_file_limit
from harness import record
from orchestrator_scale import FastTrainer, free_ports, metrics
from tokenizers import AddedToken
from watched_processes import Alone, Below, IdleLag, cpu, memory

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from chat_lab import byte_tokenizer, write_model  # noqa: E402

from hpcrl.checkpoints.restore import RestoreDecision  # noqa: E402
from hpcrl.config.recipe import Recipe  # noqa: E402
from hpcrl.dock.client import DockClient  # noqa: E402
from hpcrl.errors import PeerLostError  # noqa: E402
from hpcrl.models.tokenizer import ChatTokenizer  # noqa: E402
from hpcrl.network.credentials import Credentials  # noqa: E402
from hpcrl.runs.role import Endpoints, restore_path  # noqa: E402
from hpcrl.runs.rundir import RunDir  # noqa: E402
from hpcrl.weights import HandoffStore  # noqa: E402

PLAYER = ROOT / "bench" / "agent_player.py"
PEER = ROOT / "bench" / "agents_verifiers.py"
GOALS = {"loop_lag_p99_ms": 50.0, "gateway_ms_a_call": 3.0, "calls_per_s": 500.0, "memory_gib": 4.0}
RESULTS = ROOT / "bench" / "results" / "agents.json"
#: measurements by the words of ``--only``
SIDES = {"hpcrl": "hpcrl", "hpcrl-beside-verifiers": "hpcrl beside verifiers", "verifiers": "verifiers"}
LOOK_S = 2.0
"""Seconds between two looks at a measurement that has begun."""
START_S = 120.0

#: of the run: it lets the player play
ENVIRONMENT = """
import aiohttp

from hpcrl.rollouts.environments import Outcome, Prompt


class Script:
    name = "script"
    http = None

    def __init__(self, player):
        self.player = player

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": "go"},))

    async def rollout(self, prompt, policy):
        if prompt.split == "heldout":
            await policy.reply(prompt.messages)
            return Outcome(reward=0.0)
        if self.http is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        async with policy.endpoint() as endpoint:
            data = {"url": endpoint.url, "key": endpoint.key}
            async with self.http.post(f"{self.player}/play", json=data) as answer:
                answer.raise_for_status()
        return Outcome(reward=float(prompt.index % 2))

    def demonstration(self, prompt, *, correct, rng):
        raise NotImplementedError
"""
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Load:
    """What the player plays: so many rollouts at once, of so many turns, with so many calls a second in sum."""

    rollouts: int
    turns: int
    rate: float
    engine_s: float
    seconds: float = math.inf
    """The measurement ends so long after the first call, whatever is left of the rollouts."""

    @property
    def settings(self) -> dict[str, float]:
        """Return what the player is told."""
        period_s = self.rollouts / self.rate
        # they neither begin nor end all together
        return {"turns": self.turns, "period_s": period_s, "ramp_s": min(10.0, self.turns / 2) * period_s}


class Machinery:
    """The engine and the player of one measurement, and further programs; all end with it."""

    def __init__(self, stack: ExitStack, load: Load, model: Path) -> None:
        self.path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcrl-agents-")))
        self._stack, self._load = stack, load
        self.log = stack.enter_context((self.path / "log").open("wb"))
        engine, player, self.port = free_ports(3)
        self.engine_url, self.player_url = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{player}"
        said = ChatTokenizer(model).encode(SAID)
        more = ["--engine-s", str(load.engine_s), "--token-ids", json.dumps(said)]
        self.start([sys.executable, str(PLAYER), "engine", str(engine), *more])
        self.start([sys.executable, str(PLAYER), "player", str(player)])
        wait_for(f"{self.player_url}/figures")
        wait_for(f"{self.engine_url}/health")
        ask(f"{self.player_url}/set_up", load.settings)

    def start(self, command: Sequence[str], *, piped: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program; its errors go to the log."""
        given, out = (subprocess.PIPE, subprocess.PIPE) if piped else (subprocess.DEVNULL, self.log)
        env = {**os.environ, **environment}
        child = subprocess.Popen(command, env=env, stdin=given, stdout=out, stderr=self.log)
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        return child

    def watch(self, processes: dict[str, psutil.Process], lag: Any = None) -> dict[str, Any]:
        """Wait until all rollouts are played; return figures of the calls, and of processes with their children."""
        load, limit = self._load, time.monotonic() + 20 * self._load.turns * self._load.rollouts / self._load.rate + 300
        cpu_before: dict[str, float] | None = None
        most, lags = dict.fromkeys(processes, 0), []
        idle = self._stack.enter_context(IdleLag())
        while True:
            time.sleep(0.1 if cpu_before is None else LOOK_S)
            state = ask(f"{self.player_url}/figures")
            if state["failed"]:
                raise RuntimeError(f"{state['failed']} rollouts failed: {state['why']}; {self.tail()}")
            if state["calls"] and cpu_before is None:
                cpu_before, calls_before, began = cpu(processes), state["calls"], time.monotonic()
            for name, process in processes.items():
                most[name] = max(most[name], memory(process))
            if state["calls"] and lag:
                lags.append(lag())
            if state["done"] >= load.rollouts:
                break
            if cpu_before is not None and time.monotonic() - began > load.seconds:
                break
            if time.monotonic() > limit:
                raise RuntimeError(f"rollouts take too long: {state}; {self.tail()}")
            if any(not process.is_running() for process in processes.values()):
                raise RuntimeError(f"a process has ended; {self.tail()}")
        assert cpu_before is not None
        seconds, calls = time.monotonic() - began, state["calls"] - calls_before
        # nothing where all was over at the first look
        used = cpu(processes) if calls else {}
        cpu_ms = {name: 1e3 * (now - cpu_before[name]) / calls for name, now in used.items()}
        above = sorted(1e3 * (each - load.engine_s) for each in ask(f"{self.player_url}/times"))
        return {
            "rollouts": load.rollouts,
            "turns": load.turns,
            "calls": len(above),
            "rollouts_ended": state["done"],
            "seconds": round(seconds, 1),
            "calls_per_s_asked": load.rate,
            "calls_per_s": round(calls / seconds, 1),
            "engine_ms": 1e3 * load.engine_s,
            "call_above_engine_ms": percentiles(above),
            "cpu_ms_a_call": {name: round(value, 3) for name, value in cpu_ms.items()},
            "memory_mib": {name: round(value / 2**20) for name, value in most.items()},
            "idle_lag_ms": percentiles(sorted(idle.late_ms)),
            "lags": lags,
        }

    def tail(self) -> str:
        """Return the end of the log."""
        return (self.path / "log").read_text(errors="replace")[-1500:]


def hpcrl_side(load: Load, model: Path, hold: Any = None) -> dict[str, Any]:
    """Play by the orchestrator; ``hold`` is called with its pid (a profiler)."""
    with ExitStack() as stack:
        parts = Machinery(stack, load, model)
        run = make_run(parts, load, model)
        urls = {"engine": [parts.engine_url], "orchestrator": [f"http://127.0.0.1:{parts.port}"]}
        Endpoints(urls=urls).write(run, 1)
        RestoreDecision(step=None, verified="content", seconds=0.0, skipped=[]).write(restore_path(run, 1))
        (parts.path / "bench_script.py").write_text(ENVIRONMENT)
        orchestrator = parts.start(
            [sys.executable, "-m", "hpcrl.rollouts"],
            HPCRL_RUN_DIR=str(run.path),
            HPCRL_ATTEMPT="1",
            HPCRL_ROLE="orchestrator",
            HPCRL_REPLICA="0",
            PYTHONPATH=os.pathsep.join([str(ROOT), str(parts.path)]),
        )
        store = HandoffStore(run.weights_dir)
        store.path_of(0).mkdir(parents=True)
        credentials = Credentials.of_run(run.path, 1)
        dock = DockClient(urls["orchestrator"][0], credentials=credentials, wait_timeout_s=3600.0)
        request = urllib.request.Request(f"{dock.url}/metrics", headers=credentials.headers)
        dock.published(0)
        trainer = Trainer(dock, store)
        trainer.start()
        if hold is not None:
            hold(orchestrator.pid)
        whole = psutil.Process(orchestrator.pid)
        found = parts.watch({"orchestrator": Alone(whole), "environment": Below(whole)}, lambda: metrics(request))
        counts = found.pop("lags")
        trainer.stop.set()
        last = counts[-1]
        return {
            **found,
            "loop_lag_ms": lag_windows(counts),
            "gateway_requests": last["gateway_requests_total"],
            "engine_retries": last["engine_retries_total"],
            "rollouts_dropped": last["dropped_environment_total"],
            "steps_trained": trainer.step,
        }


class Trainer(FastTrainer):
    """Trains until the orchestrator has ended."""

    def run(self) -> None:
        with suppress(PeerLostError):
            super().run()


def lag_windows(counts: list[dict[str, float]]) -> dict[str, float]:
    """Return the event loop's lag: it is measured a hundred times a second, and a percentile covers a minute."""
    p99 = [1e3 * each["loop_lag_p99_seconds"] for each in counts]
    return {
        "p50": round(1e3 * statistics.median(each["loop_lag_p50_seconds"] for each in counts), 2),
        "p99 of the median minute": round(statistics.median(p99), 2),
        "p99 of the worst minute": round(max(p99), 2),
        "max": round(1e3 * counts[-1]["loop_lag_max_seconds"], 2),
    }


def make_run(parts: Machinery, load: Load, model: Path) -> RunDir:
    """Make a run whose rollouts the player plays."""
    run = RunDir(parts.path / "run")
    run.path.mkdir()
    group = 8 if load.rollouts % 8 == 0 else 1
    step = min(256, load.rollouts)
    tokens = 512 * (load.turns + 2)
    recipe = Recipe.model_validate(
        {
            "name": "agents",
            "model": {"path": str(model)},
            "environments": [
                {
                    "name": "script",
                    "kind": "custom",
                    "factory": "bench_script:Script",
                    "args": {"player": parts.player_url},
                }
            ],
            "engine": {"max_model_len": tokens},
            "trainer": {"steps": 1_000_000, "micro_batch_tokens": tokens},
            "evaluation": {"every_steps": 0, "prompts": 8},
            "rollouts": {
                "rollouts_per_step": step,
                "group_size": group,
                "max_in_flight": load.rollouts,
                "max_off_policy_steps": max(1, 4 * load.rollouts // step),
                "sampling": {"max_new_tokens": 256},
            },
        }
    )
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    run.start_attempt()
    return run


def verifiers_side(load: Load, model: Path, python: Path) -> dict[str, Any]:
    """Play by verifiers' env server and its client."""
    with ExitStack() as stack:
        parts = Machinery(stack, load, model)
        lags = parts.path / "lags"
        lags.mkdir()
        address = f"tcp://127.0.0.1:{parts.port}"
        variables = {
            "BENCH_PLAYER": parts.player_url,
            "BENCH_LAGS": str(lags),
            "PYTHONPATH": str(PEER.parent),
            "HF_HUB_OFFLINE": "1",
        }
        server = parts.start([str(python), str(PEER), "serve", address], **variables)
        stack.enter_context(ending(server))
        client = parts.start(
            [str(python), str(PEER), "drive", address, parts.engine_url, str(model), str(load.rollouts)],
            piped=True,
            **variables,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        if client.stdout.readline() != b"warm\n":
            raise RuntimeError(parts.tail())
        ask(f"{parts.player_url}/set_up", load.settings)
        client.stdin.write(b"\n")
        client.stdin.flush()
        whole = psutil.Process(server.pid)
        watched = {"client": psutil.Process(client.pid), "broker": Alone(whole), "workers": Below(whole)}
        found = parts.watch(watched)
        # its client counts the calls when all rollouts are there
        said = {"failed": None, "calls": None}
        if found["rollouts_ended"] >= load.rollouts:
            said = json.loads(client.stdout.readline() or "null") or {"failed": "the client has ended"}
        if said["failed"]:
            raise RuntimeError(f"{said}; {parts.tail()}")
        found.pop("lags")
        workers = len(list(lags.glob("worker-*")))
        late = {
            name: sorted(1e3 * each for path in lags.glob(f"{name}-*") for each in json.loads(path.read_text()))
            for name in ("worker", "client")
        }
        return {
            **found,
            "workers": workers,
            "loop_lag_ms": {name: percentiles(each) for name, each in late.items() if each},
            "calls_in_traces": said["calls"],
        }


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let a server end its workers."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def percentiles(ordered: Sequence[float]) -> dict[str, float]:
    """Return percentiles of sorted values, and their number."""
    at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {**{name: round(value, 2) for name, value in at.items()}, "max": round(ordered[-1], 2), "n": len(ordered)}


def ask(url: str, data: Any = None) -> Any:
    """Return the JSON of an address."""
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(url, data=body, timeout=120.0) as answer:
        return json.load(answer)


def wait_for(url: str) -> None:
    """Wait until a server answers (RuntimeError where it never does)."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer within {START_S:g} s") from None
            time.sleep(0.1)


def write_policy(path: Path) -> Path:
    """Write a model directory without weights, of the format qwen3."""
    tokenizer = byte_tokenizer()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    write_model(path, TEMPLATE, tokenizer, eos_token="<|im_end|>")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 2048}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2048, help="rollouts at once")
    parser.add_argument("--turns", type=int, default=100, help="turns of each")
    parser.add_argument("--rate", type=float, default=500.0, help="calls a second, in sum")
    parser.add_argument("--peer-rollouts", type=int, default=256, help="rollouts beside verifiers; 0: none")
    parser.add_argument("--peer-turns", type=int, default=100, help="turns of each beside verifiers")
    parser.add_argument("--peer-rate", type=float, default=100.0, help="calls a second beside verifiers")
    parser.add_argument("--engine-s", type=float, default=0.5, help="seconds of each answer of the engine")
    parser.add_argument(
        "--python", type=Path, default=ROOT / ".verifiers/bin/python", help="interpreter with verifiers"
    )
    parser.add_argument("--only", choices=SIDES, help="one measurement; the file keeps the figures of the others")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds of each measurement, at most")
    parser.add_argument("--output", type=Path, help="file for the figures instead of bench/results/agents.json")
    given = parser.parse_args()
    raise_file_limit()
    figures: dict[str, Any] = {"processors": len(os.sched_getaffinity(0)), "goals": GOALS}
    with tempfile.TemporaryDirectory(prefix="hpcrl-agents-") as directory:
        model = write_policy(Path(directory) / "model")
        whole = Load(given.rollouts, given.turns, given.rate, given.engine_s, given.seconds)
        part = Load(given.peer_rollouts, given.peer_turns, given.peer_rate, given.engine_s, given.seconds)
        sides = {"hpcrl": lambda: hpcrl_side(whole, model)}
        if given.peer_rollouts:
            sides["hpcrl beside verifiers"] = lambda: hpcrl_side(part, model)
            sides["verifiers"] = lambda: verifiers_side(part, model, given.python)
        if given.only:
            name = SIDES[given.only]
            if name not in sides:
                parser.error("--peer-rollouts 0 leaves nothing to measure")
            sides = {name: sides[name]}
            figures = earlier(given.output or RESULTS) | figures
        for name, measure in sides.items():
            load = round(os.getloadavg()[0], 2)
            figures[name] = {**measure(), "load_before": load, "load_after": round(os.getloadavg()[0], 2)}
            print(name, json.dumps(figures[name], indent=2), flush=True)
            record("agents", figures, given.output)


def earlier(path: Path) -> dict[str, Any]:
    """Return the measurements that a file has, each with what it says of itself."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: value for name, value in found.items() if isinstance(value, dict) and "rollouts" in value}


if __name__ == "__main__":
    main()

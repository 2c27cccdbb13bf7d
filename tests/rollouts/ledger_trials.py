"""Runs that are killed at random moments, again and again; what must hold after each kill.

Engine, orchestrator and trainer are processes of their own; the trainer only asks, publishes and saves. It writes down
the rollouts of each batch before it counts them as trained, so that the ledger can be compared with what happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from free_ports import free_blocks, free_port
from harness import WORDS, make_run
from ledger_ranks import CALLS, DEADLINE_S, RankFiles, follow, lead
from stub_engine import StubEngine, coin, several_turns

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.processes import procfs
from hpcrl.rollouts import process
from hpcrl.rollouts.batches import warehouse
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.environments.sandbox import ProgramRunner
from hpcrl.rollouts.weights import updates as weight_updates
from hpcrl.runs.role import Endpoints, RoleContext, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import verify_rollouts

BOUND = 3
KINDS = {
    "embedded": ("run", "orchestrator", "rank", "lock", "engine", "warehouse"),
    "mooncake": ("run", "orchestrator", "rank", "engine", "master"),
}
"""What is killed, by the backend of the warehouse. Without a rank of the trainer the supervisor ends the orchestrator,
in order; without an orchestrator a trainer goes on for a while. ``lock`` is the rank that holds the lock of a block
which the other one of its node wants, too, and gets before the attempt ends. Behind these an attempt is over. An engine
comes back, and the attempt goes on, as it does where the warehouse loses its server, all files, or the content of
some, and where a pool of Mooncake's loses its master (its memory is the orchestrator's)."""
_GOES_ON = ("engine", "warehouse", "master")
_TOOLS = {"name": "tools", "kind": "calculator", "max_turns": 8}
CHANGES: dict[str, Any] = {
    "rollouts": {"max_off_policy_steps": BOUND},
    "trainer": {"steps": 1 << 20, "micro_batch_tokens": 256},
    "environments": [WORDS, _TOOLS],
}


def new_run(path: Path, backend: str = "embedded") -> RunDir:
    """A run without an attempt that has begun."""
    memory = path / "memory"
    memory.mkdir(parents=True)
    warehouse = {"backend": backend, "directory": str(memory), "limit_gib": 0.1}
    rollouts = {**CHANGES["rollouts"], "warehouse": warehouse}
    return make_run(path, **{**CHANGES, "rollouts": rollouts})


def _fork(work: Callable[[], None]) -> int:
    """A child that does this, and nothing after it."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            work()
        finally:
            os._exit(1)
    return child


async def _engine(port: int, seed: int) -> None:
    engine = StubEngine(answer=several_turns)
    engine.keep_requests = False
    engine.request_s = lambda number: 0.02 * coin(seed * 1000 + number).random()
    await engine.start(port)
    await asyncio.Event().wait()


def _orchestrator(run: RunDir) -> None:
    async def tool(self: ProgramRunner, program: str) -> str:
        return str(len(program))

    ProgramRunner.run = tool  # type: ignore[method-assign]
    warehouse.is_loopback = lambda host: False  # it is served, as to another node
    engine_pool.WATCH_S, weight_updates._RETRY_S = 0.1, 0.02
    process.main(RoleContext(run, attempt=run.attempts()[-1], role="orchestrator", replica=0, rank=0))


class Attempt:
    """The processes of one attempt."""

    def __init__(self, run: RunDir, seed: int, *, far: bool) -> None:
        """Begin; ``far``: the trainer is on another node than the orchestrator, and two ranks of it share rollouts."""
        self.run, self.far, self._seed, self._port = run, far, seed, free_port()
        url, attempt = f"http://127.0.0.1:{free_blocks([3])[0]}", run.attempts()[-1]
        newest = CheckpointLedger(run.checkpoints_dir).newest_verified().entry
        step = None if newest is None else newest.step
        Endpoints(urls={"engine": [f"http://127.0.0.1:{self._port}"], "orchestrator": [url]}).write(run, attempt)
        decision = RestoreDecision(step=step, verified="content", seconds=0.0, skipped=[])
        decision.write(restore_path(run, attempt))
        self._path, self._lost = run.path / "trained.jsonl", seed
        self.held = False
        # before anybody begins: the ledger says at once that later steps are undone
        with self._path.open("ab", buffering=0) as told:
            told.write(json.dumps({"restored": step or 0}).encode() + b"\n")
        self._before = self._path.stat().st_size
        self._children = {
            "engine": self._start_engine(),
            "orchestrator": _fork(lambda: _orchestrator(run)),
        }
        self._start_ranks(url, step or 0)

    def _start_ranks(self, url: str, step: int) -> None:
        if not self.far:
            self._children["trainer"] = _fork(lambda: lead(self.run, url, step, far=False, other=None))
            return
        ends = socket.socketpair()

        def leading() -> None:
            ends[1].close()
            lead(self.run, url, step, far=True, other=ends[0])

        def following() -> None:
            ends[0].close()
            follow(self.run, url, step, leader=ends[1])

        self._step = step
        self._children |= {"trainer": _fork(leading), "sister": _fork(following)}
        for end in ends:
            end.close()

    def _start_engine(self) -> int:
        return _fork(lambda: asyncio.run(_engine(self._port, self._seed)))

    def _trained(self) -> int:
        if not self._path.exists():
            return 0
        with self._path.open("rb") as stream:
            stream.seek(self._before)
            return stream.read().count(b"step")

    def train(self, steps: int) -> None:
        """Wait until it has trained so many more steps."""
        steps, deadline = self._trained() + steps, time.monotonic() + DEADLINE_S
        while self._trained() < steps:
            for name, child in self._children.items():
                if os.waitpid(child, os.WNOHANG)[0]:
                    del self._children[name]
                    self.kill(*self._children)
                    raise AssertionError(f"the {name} ended by itself")
            if time.monotonic() > deadline:
                self.kill(*self._children)
                raise AssertionError(f"an attempt did not train {steps} steps within {DEADLINE_S:g} s")
            time.sleep(0.002)

    def kill(self, *names: str) -> None:
        """SIGKILL."""
        children = [self._children.pop(name) for name in names]
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)

    def lose(self, kind: str, rest_s: float) -> bool:
        """Kill one kind of process; whether the attempt is over. ``rest_s``: how long others go on."""
        if kind == "engine":
            self.kill("engine")
            time.sleep(rest_s)
            self._children["engine"] = self._start_engine()
            return False
        if kind == "warehouse":
            self._lose_warehouse()
            return False
        if kind == "master":
            self._wait(lambda: self._kill_below("mooncake_master"), "there was no master")
            return False
        if kind == "orchestrator":
            self.kill("orchestrator")
            time.sleep(rest_s)
        elif kind in ("rank", "lock"):
            self.kill("trainer") if kind == "rank" else self._lose_holder()
            child = self._children.pop("orchestrator")
            os.kill(child, signal.SIGTERM)
            deadline = time.monotonic() + DEADLINE_S
            while not os.waitpid(child, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    self.kill(*self._children)
                    raise AssertionError("an orchestrator did not end in order")
                time.sleep(0.002)
        self.kill(*self._children)
        return True

    def _lose_holder(self) -> None:
        """A rank dies with the lock of a block, and the other one of its node goes on without it."""
        rng = random.Random(self._seed)
        names = ["trainer", "sister"]
        rng.shuffle(names)
        (victim, files), (_, others) = ((name, RankFiles.of(self.run, name)) for name in names)
        written = files.die.with_suffix(".new")
        written.write_text(str(rng.randint(0, CALLS)))
        written.rename(files.die)
        child = self._children[victim]
        self._wait(lambda: bool(os.waitpid(child, os.WNOHANG)[0]), f"the {victim} did not take a lock")
        del self._children[victim]
        self.held = files.held.read_bytes()[-1:] == b"+"
        wanted = self._fetched(files) + 1
        self._wait(lambda: self._fetched(others) >= wanted, f"nobody took over step {wanted} from the {victim}")

    def _fetched(self, files: RankFiles) -> int:
        """The last step whose batch a rank has."""
        lines = files.fetched.read_bytes().split(b"\n")[:-1] if files.fetched.exists() else []
        return int(lines[-1]) if lines else self._step

    def _wait(self, holds: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > deadline:
                self.kill(*self._children)
                raise AssertionError(f"{otherwise} within {DEADLINE_S:g} s")
            time.sleep(0.002)

    def _kill_below(self, program: str) -> bool:
        """A process of the orchestrator by its program, or a module of Python; False where there is none now."""
        for child in procfs.descendants(self._children["orchestrator"]):
            with suppress(OSError):  # it may end while it is looked at
                words = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode().split("\0")
                if words[0].endswith(program) or program in words[1:4]:
                    os.kill(child.pid, signal.SIGKILL)
                    return True
        return False

    def _lose_warehouse(self) -> None:
        """Its server, all of its files, or the content of each second one."""
        what, rng = self._lost % 3, random.Random(self._seed)
        self._lost += 1
        if what == 0:
            self._kill_below("hpcrl.dock.warehouse.server")
            return
        for directory in (self.run.path.parent / "memory").iterdir():
            if what == 1:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            for path in directory.glob("*.columns.*"):
                with suppress(FileNotFoundError):
                    size = path.stat().st_size
                    if rng.random() < 0.25:
                        os.truncate(path, size // 2)
                    elif rng.random() < 0.33:
                        with path.open("r+b") as file:
                            file.seek(128)
                            file.write(rng.randbytes(64))

    def stopped(self, look: Callable[[], list[str]]) -> list[str]:
        """What is seen while nothing moves."""
        for child in self._children.values():
            os.kill(child, signal.SIGSTOP)
        try:
            return look()
        finally:
            for child in self._children.values():
                os.kill(child, signal.SIGCONT)


def _told(run: RunDir) -> list[dict[str, Any]]:
    path = run.path / "trained.jsonl"
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def _trained(run: RunDir) -> dict[int, list[tuple[int, int]]]:
    """What was trained, by the trainer's own words: the steps of the branch that goes on."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for entry in _told(run):
        if "restored" in entry:
            steps = {step: ids for step, ids in steps.items() if step <= entry["restored"]}
        else:
            steps[entry["step"]] = [tuple(each) for each in entry["rollouts"]]  # type: ignore[attr-defined]
    return steps


def problems_of(run: RunDir) -> list[str]:
    """What a kill has broken: nothing."""
    if not list((run.rollouts_dir / "ledger").glob("*.jsonl")):
        return []
    verdict = verify_rollouts(run)
    problems = list(verdict.problems)
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    by_step: dict[int, set[tuple[int, int]]] = {}
    for held in replay.rollouts:
        if held.state is State.TRAINED and held.step is not None:
            by_step.setdefault(held.step, set()).add(held.id)
    told = _trained(run)
    seen: Counter[tuple[int, int]] = Counter()
    for step, ids in told.items():
        seen.update(ids)
        if set(ids) != by_step.get(step):
            problems.append(f"the trainer had {sorted(ids)} in step {step}, the ledger {sorted(by_step.get(step, ()))}")
    problems += [f"{each} was trained {count} times" for each, count in seen.items() if count > 1]
    # the ledger may be ahead: by a batch that was asked for, or because it has not heard of a restore yet
    if told and replay.step < max(told):
        problems.append(f"the trainer is at step {max(told)}, the ledger at {replay.step}")
    problems += [f"dropped for {held.why}" for held in replay.gone if held.why != "too old after a restore"]
    return problems


def _turns_recalled(run: RunDir) -> int:
    """Turns that were not asked for again, by the counters of batches; each attempt goes on from its checkpoint's."""
    count = known = 0
    by_step: dict[int, int] = {}
    for entry in _told(run):
        if "restored" in entry:
            known = by_step.get(entry["restored"], 0)
        else:
            count += max(0, int(entry["recalled"]) - known)
            known = by_step[entry["step"]] = int(entry["recalled"])
    return count


def run_trials(
    path: Path, kills: int, seed: int, kinds: Sequence[str] = (), backend: str = "embedded"
) -> dict[str, int]:
    """Kill a run so many times; returns what it came to, with ``problems`` after all kills."""
    rng, run, counts = random.Random(seed), new_run(path, backend), Counter[str]()
    kinds = kinds or KINDS[backend]
    attempt: Attempt | None = None
    try:
        for number in range(kills):
            kind = kinds[(seed + number) % len(kinds)]
            if attempt is not None and kind == "lock" and not attempt.far:
                attempt.lose("run", rest_s=0.0)
                attempt = None
            if attempt is None:
                if number:
                    run.start_attempt()
                far = backend == "embedded" and (kind == "lock" or run.attempts()[-1] % 2 == 1)
                attempt = Attempt(run, seed + number, far=far)
            # now and then before its first step: while it starts, restores, or rolls out for the first time
            early = kind not in _GOES_ON and rng.random() < 0.25
            attempt.train(0 if early else rng.randint(1, 4))
            time.sleep(rng.uniform(0.0, 0.6 if early else 0.1))
            over = attempt.lose(kind, rest_s=rng.uniform(0.0, 0.2))
            found = problems_of(run) if over else attempt.stopped(lambda: problems_of(run))
            for problem in found:
                print(f"seed {seed}, kill {number} ({kind}): {problem}", flush=True)
            counts["kills"] += 1
            counts[f"kills: {kind}"] += 1
            counts["died with a lock"] += attempt.held
            counts["problems"] += len(found)
            attempt = None if over else attempt
    finally:
        if attempt is not None:
            with suppress(ProcessLookupError):
                attempt.lose("run", rest_s=0.0)
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    counts["steps"], counts["rollouts"] = replay.step, len(replay.rollouts)
    for entry in _told(run):
        for source, count in dict(entry.get("sources", {})).items():
            counts[f"read from: {source}"] += count
    counts["started again"], counts["turns not asked for again"] = len(replay.gone), _turns_recalled(run)
    return dict(counts)

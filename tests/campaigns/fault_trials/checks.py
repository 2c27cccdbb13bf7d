"""What must hold after a fault and at the end of a run, found out without the code that is to make sure of it."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentStatus, RunStatus

_TRIES = 40


def other_weights(run: RunDir, engine: ComponentStatus) -> str:
    """Say how the weights of an engine differ from those of the version that it names; empty where they do not.

    The hashes of its tensors are compared with those of the manifest, while its label stays the same.
    """
    name = f"{engine.role} {engine.replica}"
    for _ in range(_TRIES):
        try:
            url = _url(run, engine)
            before = _ask(run, f"{url}/weight_info")["weight_version"]
            sums = _ask(run, f"{url}/weight_checker", {"action": "checksum"})["checksums"]
            if before == _ask(run, f"{url}/weight_info")["weight_version"]:
                found = json.loads((run.weights_dir / f"v{int(before):06d}" / "manifest.json").read_text())
                tensors = {name: each["xxh3_128"] for name, each in found["tensors"].items()}
                compared = [name for name in tensors if name in sums]
                wrong = [name for name in compared if sums[name] != tensors[name]]
                if not compared:
                    return f"{name}: nothing of version {before} could be compared"
                return f"{name}: {len(wrong)} tensors are not those of version {before}" if wrong else ""
        except (OSError, StopIteration, ValueError):
            pass  # between two lives, or the version was removed meanwhile
        time.sleep(0.25)
    return f"{name} did not keep one version for as long as its weights are hashed"


def check_end(lab: Any, run: RunDir, directory: Path) -> list[str]:
    """Say what is wrong with what a run has left; empty where nothing is.

    The ledger accounts for each rollout, versions are whole, and no number of a rollout or a step is one that no good
    engine or environment gives.
    """
    found = []
    for command in ("rollouts", "weights"):
        done = lab.hpcrl(command, "verify", run.name, check=False)
        if done.returncode:
            found.append(f"{command} verify: {(done.stdout + done.stderr).strip()[-500:]}")
    rows = directory / f"{run.name}.jsonl"
    done = lab.hpcrl("rollouts", "export", run.name, "--output", str(rows), check=False)
    if done.returncode:
        return [*found, f"rollouts export: {(done.stdout + done.stderr).strip()[-500:]}"]
    newest = max((step.step for step in read_metrics(run)), default=0)
    with rows.open(encoding="utf-8") as stream:
        wrong = {what for line in stream for what in _wrong_numbers(json.loads(line), newest)}
    rows.unlink()
    steps = {f"step {step.step}: loss {step.loss}" for step in read_metrics(run) if not math.isfinite(step.loss)}
    return found + sorted(wrong | steps)


def _wrong_numbers(row: dict[str, Any], newest: int) -> list[str]:
    found = []
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"rollout {row.get('id')}: {name} is {value}")
    for name, low, high in (("token_ids", 0, 1 << 20), ("logprobs", -1e4, 0.01), ("versions", 0, newest + 64)):
        values = row.get(name) or []
        found += [f"a rollout has {name} {value}" for value in values if value is None or not low <= value <= high]
    return found[:3]


def _url(run: RunDir, wanted: ComponentStatus) -> str:
    now = RunStatus.read(run)
    assert now is not None
    engine = next(c for c in now.components if (c.role, c.replica) == (wanted.role, wanted.replica))
    return f"http://{engine.host or '127.0.0.1'}:{engine.port}"


def _ask(run: RunDir, url: str, body: dict[str, Any] | None = None) -> Any:
    token = (run.path / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}.{run.attempts()[-1]}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10.0) as answer:
        return json.loads(answer.read())

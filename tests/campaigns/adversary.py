"""Another user of the machine against a living run: is every point of docs/trust.md true?

A run on a virtual cluster, with embedded engines and with vLLM's, is submitted from a directory where anybody may write
and where a stranger has laid traps. While it trains, ``adversary_stranger.py`` runs as another user and tries all that
it can think of. Each try must be refused, the run must reach its last step as if nothing had been, and its events
must tell of the refused requests. Figures go to ``bench/results/adversary.json``; exit code 1 where a try came through.

    python tests/campaigns/adversary.py [--engines embedded,vllm] [--uid 54321]

Needs root, because it becomes another user.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import xxhash
from campaign_paths import ROOT
from harness import record, warmup

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir

sys.path[:0] = [str(ROOT / "tests" / part) for part in (".", "e2e", "slurm_e2e")]
from lab import processes  # noqa: E402
from patience import wait_for  # noqa: E402
from slurm_lab import HPCRL, SlurmLab, job_id, wait_step  # noqa: E402
from start_models import SMALL_MODEL  # noqa: E402

STRANGER = Path(__file__).with_name("adversary_stranger.py")
OVER = ("COMPLETED", "FAILED", "LOST", "CANCELLED")
STEPS = {"embedded": 300, "vllm": 60}
REFUSED = ("401", "403")
#: servers that can check no token (docs/trust.md): what they answer is counted, and no verdict
METRICS = "metrics of vllm-router"
UNCHECKED_ROLES = frozenset({"store", METRICS})
#: what `ls` of a directory, a read or a write by a stranger ends with
DENIED = frozenset({"PermissionError", "FileNotFoundError", "OSError", "NotADirectoryError"})
TRAP = "import pathlib, os\npathlib.Path({mark!r}).joinpath('{name}').touch()\n"


class Trap:
    """A directory where anybody may write, as people submit from, with what a stranger has put there."""

    def __init__(self, root: Path, uid: int) -> None:
        self.path, self.sprung = root / "submitted-from", root / "sprung"
        for path in (self.path, self.sprung):
            path.mkdir()
            path.chmod(0o777)
        for name in ("submitit", "hpcrl", "json", "torch", "aiohttp"):
            package = self.path / name
            package.mkdir()
            (package / "__init__.py").write_text(TRAP.format(mark=str(self.sprung), name=name))
        (self.path / "sitecustomize.py").write_text(TRAP.format(mark=str(self.sprung), name="sitecustomize"))
        templates = self.path / "templates/sbatch"
        templates.mkdir(parents=True)
        for template in (ROOT / "templates/sbatch").iterdir():
            text = template.read_text() + f"\n: > {self.sprung}/template-{template.name}\n"
            (templates / template.name).write_text(text)
        for path in [self.path, *self.path.rglob("*")]:
            os.chown(path, uid, uid)

    def caught(self) -> list[str]:
        """What of it was executed."""
        return sorted(path.name for path in self.sprung.iterdir())


def plant_caches(run: RunDir, uid: int) -> list[Path]:
    """Node caches by the names that were predictable once, with a segment of the stranger's."""
    name = xxhash.xxh3_64_hexdigest(str(run.weights_dir.resolve()).encode())
    planted = Path(f"/dev/shm/hpcrl-weights-{os.getuid()}-{name}")
    (planted / "members").mkdir(parents=True)
    for path in (planted, planted / "members"):
        os.chown(path, uid, uid)
        path.chmod(0o777)
    return [planted]


def known(lab: SlurmLab, run: RunDir) -> dict[str, Any]:
    """All that the stranger is told; more than one could know."""
    entry = RunRecord.read(run)
    paths = {str(run.path): "directory"} | {
        str(path): "directory" if path.is_dir() else "file" for path in run.path.rglob("*") if path.exists()
    }
    squeue = ["squeue", "--noheader", f"--jobs={job_id(run)}", "--format=%k"]
    shown = subprocess.run(squeue, env=lab.env, capture_output=True, text=True, check=True)
    return {
        "uid": os.getuid(),
        "run": run.name,
        "run_id": entry.run_id,
        # every user of a site sees the comments of all jobs
        "comment": shown.stdout.splitlines()[0],
        "step": read_metrics(run)[-1].step,
        "ports": sorted(listeners(run)),
        "paths": dict(list(paths.items())[:400]),
        "pids": [process.pid for process in processes(run)],
        "cache_directories": [str(p) for p in Path("/dev/shm").glob("hpcrl-weights-*") if p.stat().st_uid == 0],
        "slurm": lab.cluster.environment(),
        "jobs": [job_id(run)],
    }


def attack(uid: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the stranger try; with an interpreter that everybody may run."""
    result = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", STRANGER.read_text()],
        input=json.dumps(facts),
        capture_output=True,
        text=True,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.defpath},
        timeout=1800,
        check=False,
    )
    if result.returncode:
        print(result.stderr, file=sys.stderr)
    assert result.returncode == 0, "the stranger's program failed: it proves nothing"
    return [json.loads(line) for line in result.stdout.splitlines()]


def listeners(run: RunDir) -> dict[int, str]:
    """Ports where processes of the run listen, with the role of each."""
    found = {
        connection.laddr.port: process.environ().get("HPCRL_ROLE", "supervisor")
        for process in processes(run)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    for url in Endpoints.read(run, 1).urls.get("router", []):
        if (port := (urlsplit(url).port or 0) + 1) in found:
            found[port] = METRICS
    return found


def came_through(tries: Sequence[dict[str, Any]], roles: dict[int, str], token: str) -> list[dict[str, Any]]:
    """What was not refused and should have been. What speaks no HTTP has no status."""
    bad = []
    for one in tries:
        point, got = one["point"], one["got"]
        role = roles.get(one.get("port", 0), "")
        if point == "servers":
            fine = not got.isdecimal() or got in REFUSED or role in UNCHECKED_ROLES
        elif point == "processes" and "text" in one:
            fine = bool(token) and token not in one["text"]
        elif point == "jobs":
            fine = "cancel" not in one["what"] or bool(one["code"])
        else:
            fine = got in DENIED
        if not fine:
            bad.append({**one, "role": role})
    return bad


def trial(lab: SlurmLab, engines: str, uid: int, trap: Trap) -> dict[str, Any]:
    """One run and one stranger."""
    name = f"watched-{engines}"
    run = RunDir(lab.runs_root / name)
    planted = plant_caches(run, uid)
    recipe = "quickstart" if engines == "embedded" else "quickstart_vllm"
    settings = [f"trainer.steps={STEPS[engines]}", "job.layout=hetjob", "evaluation.every_steps=0"]
    settings += [f"model.path={lab.model}", "orchestrator.wait_timeout_s=1200"]
    settings += ["trainer.nodes=1", "trainer.ranks=2", "engine.replicas=2"] if engines == "embedded" else []
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [HPCRL, "submit", recipe, "--cluster", str(lab.profile), "--name", name, *sets]
    environment = {key: value for key, value in lab.env.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=trap.path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    wait_step(run, 3, 900)
    secret = run.path / "token"
    token = secret.read_text().strip() if secret.is_file() else ""
    roles, first = listeners(run), read_metrics(run)[-1].step
    tries = attack(uid, known(lab, run))
    last = read_metrics(run)[-1].step
    state = wait_for(lambda: s if (s := lab.json("status", name)["state"]) in OVER else None, 900, "end of the run")
    shown = lab.json("status", name)
    steps = [step.step for step in read_metrics(run)]
    told = Counter(
        event.data.get("server", event.writer) for event in read_events(run) if event.kind == "access.refused"
    )
    for path in planted:
        shutil.rmtree(path, ignore_errors=True)
    found = came_through(tries, roles, token)
    harmed = {
        "state": state,
        "steps": len(set(steps)),
        "of": STEPS[engines],
        "restarts": len([e for e in read_events(run) if e.kind == "component.restarting"]),
        "attempts": shown.get("attempt", 1),
        "steps_during_the_attack": [first, last],
    }
    whole = {"state": "COMPLETED", "steps": STEPS[engines], "restarts": 0, "attempts": 1}
    asked = [one for one in tries if one["got"].isdecimal()]
    return {
        "engines": engines,
        "tries": dict(Counter(one["point"] for one in tries)),
        "listening": dict(Counter(roles.values())),
        "refused_by_role": dict(Counter(roles[one["port"]] for one in asked if one["got"] in REFUSED)),
        "answered_by_roles_that_check_no_token": dict(
            Counter(roles[one["port"]] for one in asked if roles[one["port"]] in UNCHECKED_ROLES)
        ),
        "ports_that_speak_no_http": dict(
            Counter(
                roles[port]
                for port in {one["port"] for one in tries if one["point"] == "servers"} - {one["port"] for one in asked}
            )
        ),
        "came_through": len(found),
        "came_through_first": found[:20],
        "traps_sprung": trap.caught(),
        # the attack must lie within the run: it proves nothing about a run that was over
        "unharmed": all(harmed[name] == value for name, value in whole.items()) and last < STEPS[engines],
        "run": harmed,
        "refused_in_events": dict(told),
    }


def readable_cluster(cluster: DevCluster) -> None:
    """A site lets all of its users talk to Slurm: so does this cluster, for the time of the bench."""
    for path in (cluster.paths.root.parent, cluster.paths.root, cluster.paths.etc, cluster.paths.munge):
        path.chmod(path.stat().st_mode | 0o055)
    for path in cluster.paths.etc.iterdir():
        path.chmod(path.stat().st_mode | 0o044)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,vllm", help="kinds of engines, with commas")
    parser.add_argument("--uid", type=int, default=54321, help="whom the stranger is")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("only root can become another user")
    root = Path(tempfile.mkdtemp(prefix="hpcrl-adversary-"))
    root.chmod(0o755)
    cluster = DevCluster.named("watched", root / "c")
    cluster.up(ClusterSettings(name="watched", nodes=4))
    figures = []
    try:
        readable_cluster(cluster)
        trap = Trap(root, arguments.uid)
        for engines in arguments.engines.split(","):
            recipe, small = ("quickstart", SMALL_MODEL) if engines == "embedded" else ("quickstart_vllm", ())
            model = root / f"model-{engines}"
            warmup(recipe, model, *small)
            changes = {"limits": {"start_timeout_s": 900, "save_timeout_s": 30, "time_limit_h": 24}}
            changes |= {"vllm_python": str(ROOT / ".venv-vllm/bin/python")} if engines == "vllm" else {}
            began_s = time.monotonic()
            lab = SlurmLab(root, model, cluster, **changes)
            try:
                figures.append(trial(lab, engines, arguments.uid, trap))
            finally:
                subprocess.run(["scancel", "--state=RUNNING,PENDING"], env=lab.env, check=False, capture_output=True)
            print(json.dumps(figures[-1], indent=2), f"\n{time.monotonic() - began_s:.0f} s", flush=True)
    finally:
        cluster.down()
    shutil.rmtree(root, ignore_errors=True)
    record("adversary", {"trials": figures})
    bad = any(f["came_through"] or f["traps_sprung"] or not f["unharmed"] for f in figures)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

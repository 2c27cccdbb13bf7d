"""Where runs with faults live: this machine, or a virtual cluster; and the switches by which faults are made there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from campaign_paths import ROOT

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.devcluster.settings import ClusterSettings
from hpcrl.runs.rundir import RunDir

sys.path[:0] = [str(ROOT / "tests" / part) for part in (".", "e2e", "slurm_e2e")]
from fault_shim import build_shim  # noqa: E402
from lab import Lab, processes, rank_number  # noqa: E402
from slurm_lab import SlurmLab  # noqa: E402

__all__ = ["Lab", "Skew", "SlurmLab", "Switches", "laboratory", "processes", "rank_number"]

NODES = 7
START_S = 60.0
"""What a role may take to start on the virtual cluster."""
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
#: a step that hangs before its tasks run, or whose tasks on one node have another clock
_SRUN = """\
#!/bin/bash
[ -e {hang} ] && exec sleep 3600
case "$*" in *--job-name=trainer*) export FAULTS_TIME=right;; *) unset FAULTS_TIME;; esac
exec {srun} --task-prolog={prolog} "$@"
"""
_PROLOG = """\
#!/bin/bash
# torchrun could not sleep with the libfaketime of Debian 12; whether the ranks' own launcher can was not tried
[ -r {skew} ] && [ -z "$FAULTS_TIME" ] || exit 0
read -r node seconds < {skew}
[ "$SLURMD_NODENAME" = "$node" ] || exit 0
echo "export LD_PRELOAD=$LD_PRELOAD:{library}"
echo "export FAKETIME=$seconds"
echo "export FAKETIME_DONT_FAKE_MONOTONIC=1"
"""
#: squeue that answers what it answered before, leaves out what was asked for, or does not reach its controller
_SQUEUE = """\
#!/bin/bash
kept={kept}/$(printf '%s ' "$@" | md5sum | cut -c1-16)
mode=$(cat {mode} 2>/dev/null)
case "$mode" in
fails) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1;;
"leaves the job out") exit 0;;
lags) [ -e "$kept" ] && exec cat "$kept";;
esac
{squeue} "$@" > "$kept.$$"
code=$?
cat "$kept.$$"
if [ $code = 0 ] && [ -z "$mode" ]; then mv "$kept.$$" "$kept"; else rm "$kept.$$"; fi
exit $code
"""
INSIDE = Path(__file__).parent / "inside"
"""What processes of runs import: an environment, and what makes an engine one that can be told to fail."""


class Skew:
    """A clock that is off, on one node, for steps that begin from now on (libfaketime)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.node, self.seconds = "", 0.0

    @staticmethod
    def possible() -> bool:
        """Whether libfaketime is there."""
        return _FAKETIME.exists()

    def choose(self, rng: random.Random, nodes: list[str]) -> None:
        """Set one node's clock off by up to two minutes."""
        self.node, self.seconds = rng.choice(nodes), round(rng.uniform(5.0, 120.0) * rng.choice((-1, 1)), 1)
        self._path.write_text(f"{self.node} {self.seconds:+}\n")

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self.node, self.seconds = "", 0.0


class Switches:
    """Files that turn faults on: read by preloaded libraries and by programs that stand before the real ones."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self._fault, self._hang, self._order = root / "fault", root / "hang", root / "order"
        self._squeue = root / "squeue"
        self.skew = Skew(root / "skew")
        self.environment = {
            "LD_PRELOAD": str(build_shim(root)),
            "TEST_FAULT": f"control={self._fault}",
            "FAULT_TRIAL_ORDERS": str(self._order),
        }

    @staticmethod
    def python_path(*more: str) -> str:
        """Return a ``PYTHONPATH`` by which processes of runs can be told to do something wrong."""
        return os.pathsep.join((str(INSIDE), *filter(None, more)))

    def fail_files(self, spec: str) -> None:
        """From now on calls of the filesystem fail (tests/faults.c)."""
        temporary = self._fault.with_suffix(".new")
        temporary.write_text(spec)
        temporary.rename(self._fault)

    def order(self, order: Mapping[str, Any]) -> None:
        """From now on an environment or an engine does what is ordered."""
        temporary = self._order.with_suffix(".new")
        temporary.write_text(json.dumps(dict(order)))
        temporary.rename(self._order)

    def answer_squeue(self, how: str) -> None:
        """From now on squeue is wrong."""
        self._squeue.write_text(how)

    def hang_srun(self) -> None:
        """From now on srun begins and does nothing."""
        self._hang.touch()

    def heal(self) -> None:
        """End all of that; clocks stay as they are."""
        for path in (self._fault, self._hang, self._order, self._squeue):
            path.unlink(missing_ok=True)

    def programs(self) -> Path:
        """A directory for the front of ``PATH`` with an srun and an squeue that have these switches."""
        directory, kept = self.root / "bin", self.root / "kept"
        directory.mkdir()
        kept.mkdir()
        srun, squeue = (shutil.which(name) or f"/usr/bin/{name}" for name in ("srun", "squeue"))
        prolog = self.root / "prolog"
        texts = {
            directory / "srun": _SRUN.format(hang=self._hang, srun=srun, prolog=prolog),
            directory / "squeue": _SQUEUE.format(mode=self._squeue, kept=kept, squeue=squeue),
            prolog: _PROLOG.format(skew=self.root / "skew", library=_FAKETIME),
        }
        for path, text in texts.items():
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return directory


@contextmanager
def laboratory(
    root: Path, model: Path, *, slurm: bool, nodes: int = NODES, **profile_changes: Any
) -> Iterator[tuple[Lab | SlurmLab, Switches]]:
    """Where runs are made; all of it is ended afterwards.

    Parameters
    ----------
    slurm:
        On a virtual cluster of ``nodes``, and not on this machine.
    profile_changes:
        What the cluster's profile has in place of what it ships with; ``limits`` are merged.
    """
    limits = profile_changes.get("limits", {})
    switches = Switches(root / "switches")
    if not slurm:
        lab = Lab(root, model)
        lab.env |= switches.environment | {"PYTHONPATH": switches.python_path(os.environ.get("PYTHONPATH", ""))}
        try:
            yield lab, switches
        finally:
            for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
                for process in processes(RunDir(path)):
                    process.send_signal(signal.SIGKILL)
        return
    cluster = DevCluster.named("faults", Path(f"/tmp/hpcrl-faults-{os.getpid()}"))  # sockets need short paths
    cluster.up(ClusterSettings(name="faults", nodes=nodes, grace_s=30))
    try:
        profile = yaml.safe_load((ROOT / "clusters" / "devcluster.yaml").read_text())
        programs = switches.programs()
        slurm_lab = SlurmLab(
            root,
            model,
            cluster,
            launch={"inherit": ["PYTHONPATH", *switches.environment], "path": [str(programs)]},
            **profile_changes | {"limits": {**profile["limits"], "start_timeout_s": START_S, **limits}},
        )
        slurm_lab.env |= switches.environment | {"PYTHONPATH": switches.python_path(slurm_lab.env["PYTHONPATH"])}
        # commands by which people ask see the same Slurm as jobs
        slurm_lab.env["PATH"] = f"{programs}{os.pathsep}{slurm_lab.env.get('PATH', '')}"
        yield slurm_lab, switches
    finally:
        subprocess.run(["scancel", "--me"], env={**os.environ, **cluster.environment()}, check=False)
        cluster.down()
        cluster.paths.root.parent.rmdir()

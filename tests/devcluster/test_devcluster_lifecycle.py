"""Clusters come up, stand beside each other, and go without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from devcluster_testing import wait_until

from hpcrl.devcluster import dev_cluster as cluster_module
from hpcrl.devcluster.daemons import find_processes, read_daemons
from hpcrl.devcluster.dev_cluster import DevCluster, list_dev_clusters
from hpcrl.devcluster.settings import ClusterSettings, Ports
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.processes import procfs

pytestmark = pytest.mark.slurm
Make = Callable[..., DevCluster]

#: a job whose processes leave their session, their parent and their environment behind
STRAY = """#!/bin/bash
#SBATCH --nodes=2 --output=/dev/null --gres=gpu:8
srun bash -c 'setsid sleep 1000 & env -i sleep 1000 & trap "" TERM; sleep 1000'
"""


def submit_stray(cluster: DevCluster, directory: Path) -> None:
    script = directory / "stray.sh"
    script.write_text(STRAY)
    cluster.client().submit(script, name="stray", token="stray")

    def sleeping() -> bool:
        tasks = [m for m in find_processes(cluster.paths) if m.kind == "task"]
        return sum(Path(f"/proc/{m.process.pid}/comm").read_text() == "sleep\n" for m in tasks) >= 6

    wait_until("the job sleeps on both nodes", sleeping)


def marked_processes(root: Path) -> list[int]:
    """Whatever has the cluster's directory in its environment, arguments or working directory; not ourselves."""
    found = []
    for pid in procfs.all_processes():
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            where = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if str(root).encode() in words or where.startswith(str(root)):
            found.append(pid)
    return found


def outside(home: Path) -> list[object]:
    """Places that a careless Slurm would write to."""
    places = (
        "/run",
        "/run/munge",
        "/etc/slurm",
        "/etc/munge",
        "/var/lib/slurm",
        "/var/log/slurm",
        "/var/spool",
    )
    listings = [sorted(os.listdir(place)) if os.path.isdir(place) else None for place in places]
    # other programs have memory and mounts of their own
    memory = [name for name in os.listdir("/dev/shm") if "slurm" in name or "munge" in name]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
    return [listings, memory, mounts]


def test_down_leaves_nothing(make_cluster: Make, home: Path, tmp_path: Path) -> None:
    before = outside(home)
    cluster = make_cluster("trace")
    submit_stray(cluster, tmp_path)
    assert {m.node for m in find_processes(cluster.paths) if m.kind != "daemon"} == {"trace-001", "trace-002"}
    sleepers = [m.process for m in find_processes(cluster.paths) if m.kind == "task"]
    cluster.down()
    assert not cluster.paths.root.exists()
    assert marked_processes(cluster.paths.root) == []
    assert [p for p in sleepers if procfs.is_alive(p.pid, p.start_ticks)] == []
    assert outside(home) == before


def test_down_after_crashes(make_cluster: Make, tmp_path: Path) -> None:
    """Daemons that were killed, and records that were lost, do not keep the rest from being found."""
    cluster = make_cluster("crash")
    submit_stray(cluster, tmp_path)
    for name, record in read_daemons(cluster.paths).items():
        if name in ("munged", "slurmctld", "crash-001"):
            os.kill(record.pid, signal.SIGKILL)
        (cluster.paths.processes / f"{name}.json").unlink()
    cluster.down()
    assert marked_processes(cluster.paths.root) == []


def test_two_at_once(make_cluster: Make, home: Path) -> None:
    one, two = make_cluster("one"), make_cluster("two", nodes=3)
    assert [c.paths.root.name for c in list_dev_clusters(home)] == ["one", "two"]
    assert not {n.address for n in one.record().nodes} & {n.address for n in two.record().nodes}
    one.down()
    assert sorted(node.name for node in two.client().nodes()) == ["two-001", "two-002", "two-003"]
    assert two.status().controller == "answers"


def test_up_in_a_shell_of_a_cluster_that_is_gone(
    make_cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind `eval "$(hpcrl devcluster env)"`, submit and down."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone/slurm.conf"))
    assert make_cluster("anew", nodes=1).client().answers()


def test_up_twice_is_refused(make_cluster: Make, home: Path) -> None:
    cluster = make_cluster("again", nodes=1)
    with pytest.raises(UsageError, match="is up already"):
        DevCluster.named("again", home).up(ClusterSettings(name="again"))
    assert cluster.client().answers()


def test_failed_start_leaves_logs_and_no_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster_module, "choose_cluster_ports", lambda *_, **__: Ports(port, 0, port + 1))
        # our own listener answers in slurmctld's place: the start must not believe it
        cluster = DevCluster.named("broken", home)
        with pytest.raises(HpcrlError, match="slurmctld"):
            cluster.up(ClusterSettings(name="broken", nodes=1))
    assert marked_processes(cluster.paths.root) == []
    assert "bind" in (cluster.paths.log / "slurmctld.log").read_text()
    with pytest.raises(UsageError, match="does not run"):
        cluster.up(ClusterSettings(name="broken", nodes=1))
    cluster.down()
    assert not cluster.paths.root.exists()


def test_foreign_directories_are_not_touched(home: Path) -> None:
    directory = home / "foreign"
    directory.mkdir(parents=True)
    (directory / "precious").touch()
    with pytest.raises(UsageError, match="not a virtual cluster"):
        DevCluster.named("foreign", home).up(ClusterSettings(name="foreign"))
    with pytest.raises(UsageError, match="there is no virtual cluster"):
        DevCluster.named("foreign", home).down()
    (directory / "precious").unlink()
    directory.rmdir()


@pytest.mark.slurm("stale")
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="mounting needs root and /dev/fuse")
def test_stale_view_of_the_shared_directory(make_cluster: Make, tmp_path: Path) -> None:
    """A node that has looked for a name stays blind to it, another one sees it; nothing is mounted outside."""
    cluster = make_cluster("stale", stale_s=1000.0)
    shared, out = cluster.paths.shared, tmp_path / "out"
    env = {**os.environ, **cluster.environment()}
    script = tmp_path / "look.sh"
    # the first node looks before the file is there and after, the second only after
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N1 -w stale-001 --output={out}\n"
        f"test -e {shared}/made; touch {tmp_path}/looked\n"
        f"while ! [ -e {tmp_path}/made ]; do sleep 0.05; done\n"
        f"echo first $(test -e {shared}/made && echo sees || echo blind)\n"
        f"srun --nodes=1 true; echo done\n"
    )
    client = cluster.client()
    client.submit(script, name="look", token="look")
    wait_until("the first node has looked", (tmp_path / "looked").exists)
    (shared / "made").touch()
    (tmp_path / "made").touch()
    wait_until("it has looked again", lambda: "done" in (out.read_text() if out.exists() else ""))
    assert "first blind" in out.read_text()
    second = subprocess.run(
        ["srun", "-w", "stale-002", "ls", str(shared)], env=env, capture_output=True, text=True, check=True, timeout=30
    )
    assert second.stdout == "made\n"
    assert str(shared) not in Path("/proc/mounts").read_text()
    cluster.down()
    assert marked_processes(cluster.paths.root) == []


def test_daemons_do_not_keep_files_that_their_starter_had_inherited(make_cluster: Make, tmp_path: Path) -> None:
    """Else a cluster that outlives a script keeps the script's lock."""
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)
    cluster = make_cluster("inherit")
    os.close(lock)
    held = [
        record.name
        for record in read_daemons(cluster.paths).values()
        for fd in Path(f"/proc/{record.pid}/fd").iterdir()
        if fd.exists() and os.readlink(fd) == str(tmp_path / "lock")
    ]
    assert held == []

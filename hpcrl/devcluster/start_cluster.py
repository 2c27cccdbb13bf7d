"""Starting the daemons of a virtual cluster, each with a readiness probe and a deadline."""

from __future__ import annotations

import getpass
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from hpcrl.devcluster.cluster_ports import is_listening
from hpcrl.devcluster.daemons import DaemonRecord, log_tail, start_daemon
from hpcrl.devcluster.packages import require_program
from hpcrl.devcluster.place import ClusterPaths
from hpcrl.devcluster.settings import Record, VirtualNode
from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmUnavailableError

CONTROLLER = "slurmctld"
_POLL_S = 0.05
_DAEMON_DEADLINE_S = 30.0
_NODE_DEADLINE_S = 0.2
"""Additional time for each node to register, on a machine with few cores."""

_MOUNT_THEN_RUN = 'bindfs -o "$1" "$2" "$2" && shift 2 && exec "$@"'
"""bindfs returns when the mount stands; it hides the directory behind a caching view of it, for this node only."""


def start_all(paths: ClusterPaths, record: Record) -> None:
    """Start everything, and return when every node is ready for jobs.

    HpcrlError where a daemon ends, DeadlineError where one, or the nodes, are not ready in time.
    """
    _start_munged(paths)
    if record.settings.accounting:
        _start_accounting(paths, record)
    controller = start_controller(paths, record, fresh=True)
    daemons = [controller, *(start_slurmd(paths, record, node) for node in record.nodes)]
    wait_for_nodes(paths, [node.name for node in record.nodes], daemons)


def start_controller(paths: ClusterPaths, record: Record, *, fresh: bool) -> DaemonRecord:
    """Start slurmctld and wait until it listens; ``fresh`` forgets what it knew. Errors are those of `wait_for`."""
    argv = [require_program("slurmctld"), "-D", *(["-c"] if fresh else [])]
    daemon = start_daemon(paths, CONTROLLER, argv, directory=paths.state)
    wait_for(paths, [daemon], "slurmctld listens", lambda: is_listening(record.ports.controller))
    return daemon


def start_slurmd(paths: ClusterPaths, record: Record, node: VirtualNode) -> DaemonRecord:
    """Start the daemon of a node; does not wait."""
    argv = [require_program("slurmd"), "-D", "-N", node.name]
    stale_s = record.settings.stale_s
    if stale_s is not None:
        # a mount namespace of the node's own: other processes do not see the mount, and it ends with the last process
        # in it
        options = ",".join(f"{kind}_timeout={stale_s:g}" for kind in ("attr", "entry", "negative"))
        mount = [
            require_program("unshare"),
            "--mount",
            "/bin/sh",
            "-c",
            _MOUNT_THEN_RUN,
            "mount",
            options,
            str(paths.shared),
        ]
        argv = [*mount, *argv]
    return start_daemon(paths, node.name, argv, directory=paths.node_spool(node.name), node=node.name)


def wait_for_nodes(paths: ClusterPaths, names: Sequence[str], daemons: Sequence[DaemonRecord] = ()) -> None:
    """Wait until Slurm could run jobs on all of these nodes (DeadlineError names those where it cannot).

    HpcrlError where one of ``daemons`` ends.
    """
    client = SlurmClient(conf=paths.conf, timeout_s=10.0)
    missing = set(names)

    def all_usable() -> bool:
        try:
            missing.intersection_update(node.name for node in client.nodes() if not node.usable)
        except SlurmUnavailableError:
            return False
        return not missing

    def explain() -> str:
        some = sorted(missing)
        return f"{len(some)} nodes are not usable ({', '.join(some[:5])} …)\n    {log_tail(paths, some[0])}"

    deadline_s = _DAEMON_DEADLINE_S + _NODE_DEADLINE_S * len(names)
    wait_for(paths, daemons, f"{len(names)} nodes are usable", all_usable, deadline_s=deadline_s, explain=explain)


def wait_for(
    paths: ClusterPaths,
    daemons: Sequence[DaemonRecord],
    what: str,
    probe: Callable[[], bool],
    *,
    deadline_s: float = _DAEMON_DEADLINE_S,
    explain: Callable[[], str] | None = None,
) -> None:
    """Poll until the probe is true.

    Raises
    ------
    HpcrlError
        One of the daemons ended.
    DeadlineError
        It took too long; ``explain`` adds to the message, by default the daemons' last words.
    """
    stop_at = time.monotonic() + deadline_s
    while not probe():
        for daemon in daemons:
            if daemon.process() is None:
                raise HpcrlError(
                    f"{daemon.name} ended while we waited until {what}\n    {log_tail(paths, daemon.name)}"
                )
        if time.monotonic() >= stop_at:
            words = explain() if explain is not None else "\n    ".join(log_tail(paths, d.name) for d in daemons)
            raise DeadlineError(f"waited {deadline_s:g} s until {what}\n    {words}")
        time.sleep(_POLL_S)


def _start_munged(paths: ClusterPaths) -> None:
    # --force: munged wants directories that all users can enter, all the way up; these may lie in a private home, and
    # then it serves those who can reach it
    files = {
        "socket": paths.munge_socket,
        "key-file": paths.munge_key,
        "pid-file": paths.munge / "pid",
        "log-file": paths.log / "munged.log",
        "seed-file": paths.munge / "seed",
    }
    options = [f"--{option}={path}" for option, path in files.items()]
    daemon = start_daemon(
        paths, "munged", [require_program("munged"), "--foreground", "--force", *options], directory=paths.munge
    )
    wait_for(paths, [daemon], "munged listens", lambda: _accepts(paths.munge_socket))


def _start_accounting(paths: ClusterPaths, record: Record) -> None:
    """Start MariaDB on its own socket without a TCP port, then slurmdbd, and add the cluster's entry."""
    _install_database(paths)
    database = start_daemon(
        paths,
        "mariadbd",
        [require_program("mariadbd"), f"--defaults-file={paths.etc / 'mariadb.cnf'}"],
        directory=paths.state,
    )
    wait_for(paths, [database], "MariaDB listens", lambda: _accepts(paths.database_socket))
    daemon = start_daemon(
        paths,
        "slurmdbd",
        [require_program("slurmdbd"), "-D"],
        directory=paths.state,
        env={"MYSQL_UNIX_PORT": str(paths.database_socket)},
    )
    wait_for(paths, [daemon, database], "slurmdbd listens", lambda: is_listening(record.ports.database))
    SlurmClient(conf=paths.conf).add_cluster(record.settings.name)


def _install_database(paths: ClusterPaths) -> None:
    user = getpass.getuser()
    argv = [
        require_program("mariadb-install-db"),
        "--no-defaults",
        f"--datadir={paths.database}",
        f"--user={user}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={user}",
        "--skip-test-db",
        "--skip-name-resolve",
    ]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=paths.state)
    if result.returncode:
        said = f"{result.stdout}\n{result.stderr}".strip().splitlines()
        raise HpcrlError("mariadb-install-db failed\n" + "\n".join(f"      {line}" for line in said[-8:]))


def _accepts(path: object) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0

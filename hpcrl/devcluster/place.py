"""The directory of a virtual cluster.

::

    <home>/<name>/
      cluster.json            record of the cluster; a directory without it is not a cluster
      processes/<daemon>.json pid and start time of each daemon
      etc/                    slurm.conf and the like
      munge/  state/  database/  spool/<node>/  dev/  log/
      shared/                 stands for the shared filesystem; each node may see it stale
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec

from hpcrl.devcluster.settings import Record
from hpcrl.errors import UsageError
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared

HOME_VARIABLE = "HPCRL_DEVCLUSTER_HOME"

_SAFE_PATH = re.compile(r"/[A-Za-z0-9._/+-]*")
_LONGEST_SOCKET_PATH = 107
"""Maximum length of ``sun_path`` in bytes (unix(7)), without the final zero."""


def default_home() -> Path:
    """Return the directory of clusters.

    It is ``$HPCRL_DEVCLUSTER_HOME``, or ``hpcrl/devcluster`` in the user's data directory.
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).absolute()
    data_home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    return data_home / "hpcrl/devcluster"


class ClusterPaths:
    """Paths of one cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "cluster.json"
        self.processes = root / "processes"
        self.etc = root / "etc"
        self.conf = self.etc / "slurm.conf"
        self.munge = root / "munge"
        self.munge_key = self.munge / "key"
        self.munge_socket = self.munge / "socket"
        self.state = root / "state"
        self.database = root / "database"
        self.database_socket = self.state / "mariadb.socket"
        self.spool = root / "spool"
        self.devices = root / "dev"
        self.log = root / "log"
        self.shared = root / "shared"

    def node_spool(self, node: str) -> Path:
        return self.spool / node

    def read_record(self) -> Record | None:
        """Read the record of the cluster; return None where there is none.

        Raises
        ------
        UsageError
            It is damaged, or of another version.
        """
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=prepared(Record))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self.record} cannot be read: {error}\n    hint: `hpcrl devcluster down` ends and removes it"
            ) from error

    def check(self, *, longest_node: str) -> None:
        """Raise `UsageError` where Slurm could not work with this path."""
        if not _SAFE_PATH.fullmatch(str(self.root)):
            raise UsageError(
                f"Slurm's configuration cannot hold the path {str(self.root)!r}\n"
                f"    hint: --home DIR (or {HOME_VARIABLE}) with letters, digits and ._/+- only"
            )
        # slurmstepd's socket: <spool>/<node>/<node>_<job>.<step>
        longest = len(f"{self.node_spool(longest_node)}/{longest_node}_1000000.4294967291")
        if longest > _LONGEST_SOCKET_PATH:
            raise UsageError(
                f"{self.root} is too long: paths of sockets would have {longest} characters, the kernel takes "
                f"{_LONGEST_SOCKET_PATH}\n    hint: --home DIR (or {HOME_VARIABLE}) with a shorter path"
            )

    def create(self, record: Record) -> None:
        """Make the directories; the record is first, so that whatever follows can be found and removed."""
        # state and spool hold scripts and environments of jobs
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700)
        write_json(self.record, record)
        nodes = [self.node_spool(node.name) for node in record.nodes]
        inside = (self.processes, self.etc, self.munge, self.state, self.spool, self.devices, self.log, self.shared)
        for directory in (*inside, *nodes):
            directory.mkdir()
        for number in range(record.settings.gpus):
            # slurmd wants a device file; a link to one needs no right to make devices
            (self.devices / f"gpu{number}").symlink_to("/dev/null")
        key = os.open(self.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        os.write(key, os.urandom(128))
        os.close(key)

    def remove(self) -> None:
        """Delete the directory. Only to be called when `record` was found in it and no process is left."""
        assert self.record.is_file(), f"{self.root} is not a virtual cluster"
        # the record last: an interrupted removal can be repeated
        for entry in self.root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self.record:
                entry.unlink()
        self.record.unlink()
        self.root.rmdir()

"""Address of the master of a run's pool, and the settings of engines for it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared


class StoreEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a master; they stay the same when it is restarted, because engines know them.

    Attributes
    ----------
    host:
        Host on which all three listen.
    rpc_port, metadata_port, admin_port:
        For clients; for the metadata of transfers; health, metrics and lists over HTTP.
    etcd, cluster:
        Endpoints at which the master is elected, separated by semicolons, and its name there; empty without etcd.
    """

    host: str
    rpc_port: int
    metadata_port: int
    admin_port: int
    etcd: str = ""
    cluster: str = ""

    @property
    def master(self) -> str:
        """Return the master's address for clients: ``host:port``, or the place where clients look it up."""
        return f"etcd://{self.etcd}" if self.etcd else f"{self.host}:{self.rpc_port}"

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that clients read from their environment."""
        return {"MC_STORE_CLUSTER_ID": self.cluster} if self.cluster else {}

    @property
    def metadata(self) -> str:
        """Return the URL of the metadata server."""
        return f"http://{self.host}:{self.metadata_port}/metadata"

    @property
    def admin(self) -> str:
        """Return the base URL of health, metrics and lists."""
        return f"http://{self.host}:{self.admin_port}"

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        """Return the path of the endpoints of an attempt."""
        return run.attempt_dir(attempt) / "store.json"

    def write(self, run: RunDir, attempt: int) -> None:
        """Say where this master is."""
        write_json(self.path(run, attempt), self)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> StoreEndpoints:
        """Read the endpoints of an attempt.

        Raises
        ------
        HpcrlError
            The attempt has no store, or it has not started yet.
        """
        path = cls.path(run, attempt)
        try:
            return msgspec.json.decode(path.read_bytes(), type=prepared(cls))
        except FileNotFoundError as error:
            raise HpcrlError(
                f"attempt {attempt} of {run.name} has no KV store that was started\n"
                "    hint: engine.kv_store in the recipe turns it on"
            ) from error


def engine_settings(
    endpoints: StoreEndpoints,
    *,
    run_id: str,
    protocol: str,
    devices: tuple[str, ...],
    segment_bytes: int,
    local_buffer_bytes: int,
    disk: bool,
) -> dict[str, object]:
    """Return the settings for ``MOONCAKE_CONFIG_PATH`` of an engine: one rank's share of the pool.

    Parameters
    ----------
    run_id:
        Separates keys (``tenant_id``), also where two runs use the same master.
    protocol, devices:
        ``rdma`` with adapters by name, or ``tcp``.
    segment_bytes, local_buffer_bytes:
        Sizes of this rank, in bytes.
    disk:
        Whether blocks move to disk when memory is full.
    """
    return {
        "metadata_server": endpoints.metadata,
        "master_server_address": endpoints.master,
        "protocol": protocol,
        "device_name": ",".join(devices),
        "mode": "embedded",
        "global_segment_size": segment_bytes,
        "local_buffer_size": local_buffer_bytes,
        "enable_offload": disk,
        "tenant_id": run_id,
    }

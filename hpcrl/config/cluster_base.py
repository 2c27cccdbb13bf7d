"""Settings of profiles of every kind: name, directories, ports, deadlines, environment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpcrl.config.base import Name, PositiveFloat, RoleName, StrictModel
from hpcrl.config.outlets import NotifierConfig, SinkConfig


class PathsConfig(StrictModel):
    """Directories of a site. ``~`` and ``$NAME`` are expanded; relative ones start where hpcrl is called."""

    runs_root: str
    """Holds a directory for each run; visible under the same name from all nodes."""
    models_root: str = "models"
    """Holds published models, as ``OWNER/NAME``: ``hpcrl model get`` puts them there, and a ``model.path`` of that form
    is looked for there. Visible under the same name from all nodes."""


class PortsConfig(StrictModel):
    """Range in which the supervisor looks for free TCP ports."""

    first: Annotated[int, Field(ge=1024, le=65535)] = 20000
    """Lowest port. Stay below the kernel's ephemeral range (32768 by default), or a connection may take it."""
    last: Annotated[int, Field(ge=1024, le=65535)] = 29999
    """Highest port."""


class LimitsConfig(StrictModel):
    """Deadlines that depend on the site."""

    start_timeout_s: PositiveFloat = 300.0
    """Longest start of one role, from process start to ready, in seconds."""
    stop_timeout_s: PositiveFloat = 5.0
    """Time between asking a role to stop and killing it, in seconds."""
    time_limit_h: PositiveFloat = 168.0
    """Longest run in hours."""


class FilesConfig(StrictModel):
    """Read access to runs for users other than the owner. Other users never have write access."""

    group: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]{0,62}$")] | None = None
    """Group that may read run directories (mode 2750, files 0640). None: the user alone (0700, 0600). Secrets and the
    run's token are the user's alone in any case."""


class ClusterBase(StrictModel):
    """A site of any kind."""

    name: Name
    """Name of the profile; equals its file name without ``.yaml``."""
    description: str = ""
    """One sentence for ``hpcrl cluster ls``."""
    ports: PortsConfig = PortsConfig()
    """Free ports."""
    files: FilesConfig = FilesConfig()
    """Read access to runs for other users."""
    env: dict[str, str] = {}
    """Environment variables for all roles. Names that hpcrl sets itself are refused, and secrets."""
    secrets: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Annotated[str, Field(pattern=r"^[/~$]")]] = {}
    """Variables of all roles, sinks and notifiers whose values are secrets: name and file. The file is read on the node
    when a process starts, must belong to the run's user and not be readable by other users (mode 0600), and is copied
    nowhere. ``~`` and ``$NAME`` are expanded where hpcrl is called."""
    etcd: list[str] = []
    """Endpoints of the site's etcd, for example ``http://etcd-1:2379``. The master of a KV pool is then elected there
    (Mooncake's HA), and engines ask etcd who it is."""
    python_by_role: dict[RoleName, str] = {}
    """Interpreter by role, with hpcrl installed for it; that of ``engine`` is also for the roles on its nodes.
    ``~`` and ``$NAME`` are expanded, and relative ones start where hpcrl is called, unless roles run in containers.
    Others have the interpreter of hpcrl, or the container's."""
    vllm_python: str | None = None
    """Interpreter of engines with the backend ``vllm``, and of router and store with engines of any backend, where
    ``python_by_role`` does not name theirs. vLLM pins torch and much else: it has an environment of its own."""

    sinks: Annotated[tuple[SinkConfig, ...], Field(strict=False)] = ()
    """Metric sinks, which receive the metrics of each step of every run, in addition to the recipe's."""
    notify: Annotated[tuple[NotifierConfig, ...], Field(strict=False)] = ()
    """Notifiers, which send messages about events of every run, in addition to the recipe's."""

    def python_of(self, role: str, *, backend: str) -> str | None:
        """Return the interpreter of a role; None where the profile names none."""
        by_role = {str(key): python for key, python in self.python_by_role.items()}
        if role not in ("engine", "prefill", "decode", "router", "store"):
            return by_role.get(role)
        theirs = backend == "vllm" or role in ("router", "store")
        return by_role.get(role) or by_role.get("engine") or (self.vllm_python if theirs else None)

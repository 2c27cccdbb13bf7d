"""Settings of a sandbox for programs of ``kind: harness``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from hpcrl.config.base import PositiveFloat, PositiveInt, StrictModel

_ForwardedAddress = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]


class HarnessSandboxConfig(StrictModel):
    """A sandbox for each program. It has no network but the policy, and the addresses of ``forward``."""

    image: str | None = None
    """Directory with an unpacked root filesystem, in place of the node's ``/usr``. It needs ``python3``."""
    mounts: dict[str, str] = {}
    """Directories of the node that the program may read, by their absolute path inside: its own files, for example."""
    forward: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}$")], _ForwardedAddress] = {}
    """Further addresses that the program may reach: a port on its loopback interface, and ``HOST:PORT`` of the
    network to which it leads."""
    memory_gib: PositiveFloat = 2.0
    """Memory, files included."""
    disk_gib: PositiveFloat = 1.0
    """Size of the files in its directory."""
    processes: PositiveInt = 256
    """Processes and threads."""


def _from_switch(value: Any) -> Any:
    """Read ``true`` as the defaults, and ``false`` as no sandbox."""
    if value is True:
        return {}
    return None if value is False else value


OptionalSandbox = Annotated[HarnessSandboxConfig | None, BeforeValidator(_from_switch)]

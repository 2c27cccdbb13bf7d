"""Programs in sandboxes: they reach the policy by a port of their own loopback interface, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hpcrl.config.harness_sandbox import HarnessSandboxConfig
from hpcrl.processes.thread_resources import acquire_in_thread
from hpcrl.rollouts.environments.harness import relay_program
from hpcrl.rollouts.environments.harness.forwarding import forwarded
from hpcrl.rollouts.environments.harness.program import EndedProgram, filled, usable
from hpcrl.rollouts.environments.sandbox_limits import sandbox_limits
from hpcrl.sandboxes import Sandbox
from hpcrl.sandboxes.interface import DEFAULT_WORK_DIRECTORY
from hpcrl.sandboxes.on_demand import SandboxesOnDemand
from hpcrl.storage.trusted_paths import SCRATCH_PREFIX

GATEWAY_PORT = 8321
"""Port inside at which the policy is."""
_PLACE = "/harness"
"""Directory inside with the sockets, the task and the program of the relay; a read-only directory of the node."""
_RELAY = "/tmp/.hpcrl-relay.json"
_ERRORS = f"{DEFAULT_WORK_DIRECTORY}/.harness-errors"
_PATH = "/usr/local/bin:/usr/bin:/bin"


class SandboxedPrograms:
    """Runs programs, each in a sandbox of its own. The daemon of sandboxes is started with the first one."""

    def __init__(self, config: HarnessSandboxConfig) -> None:
        """Prepare; nothing is started."""
        self._config = config
        self._limits = sandbox_limits(config)
        self._sandboxes = SandboxesOnDemand(lambda host: host)

    async def run(
        self,
        command: Sequence[str],
        *,
        task: bytes,
        environ: Mapping[str, str],
        url: str,
        words: Mapping[str, str],
        time_limit_s: float,
        max_bytes: int,
    ) -> EndedProgram:
        """Run a program to its end. Cancelling this ends it.

        Parameters
        ----------
        command, task, words, time_limit_s, max_bytes:
            As those of `hpcrl.rollouts.environments.harness.program.run_program`.
        environ:
            All variables of the program. Addresses at the host and port of ``url`` become those inside.
        url:
            Address of the policy.

        Raises
        ------
        HarnessProgramError
            The program failed.
        SandboxError
            The sandbox did.
        """
        config = self._config
        place = Path(await acquire_in_thread(os.rmdir, tempfile.mkdtemp, prefix="hpcrl-harness-"))
        split = urlsplit(url)
        outside, inside = f"{split.scheme}://{split.netloc}", f"http://127.0.0.1:{GATEWAY_PORT}"
        addresses = {"policy": (split.hostname or "127.0.0.1", split.port or 80)}
        addresses |= {f"port-{port}": _host_and_port(address) for port, address in config.forward.items()}
        ports = {str(GATEWAY_PORT): f"{_PLACE}/policy"} | {port: f"{_PLACE}/port-{port}" for port in config.forward}
        known = {**words, "python": "python3", "task": f"{_PLACE}/task.json", "directory": DEFAULT_WORK_DIRECTORY}
        own = {
            name: inside + value.removeprefix(outside) if value.startswith(f"{outside}/") else value
            for name, value in environ.items()
        }
        told = {
            "command": [filled(word, known) for word in command],
            "environ": {"PATH": _PATH, **own, "HOME": DEFAULT_WORK_DIRECTORY, "TMPDIR": DEFAULT_WORK_DIRECTORY},
            "ports": ports,
            "errors": _ERRORS,
        }
        try:
            await asyncio.to_thread(_prepare, place, task)
            async with forwarded(place, addresses):
                mounts = {**config.mounts, _PLACE: str(place)}
                _, sandbox = await self._sandboxes.start(
                    lambda host: host.start(image=config.image, limits=self._limits, mounts=mounts)
                )
                try:
                    # with the key of the rollout: in files of the node it could be read by others than the sandbox
                    await sandbox.put({_RELAY: msgspec.json.encode(told)})
                    return await _run_inside(sandbox, task, time_limit_s, max_bytes)
                finally:
                    await asyncio.shield(sandbox.kill())
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))

    async def aclose(self) -> None:
        """End all sandboxes."""
        await self._sandboxes.aclose()


def _prepare(place: Path, task: bytes) -> None:
    """Write what the sandbox reads: as root its user is another one, else this one."""
    _let_pass(place.parent)
    other = os.geteuid() == 0
    os.chmod(place, 0o711 if other else 0o700)
    files = {"task.json": task, "relay.py": Path(relay_program.__file__).read_bytes()}
    for name, data in files.items():
        (place / name).write_bytes(data)
        os.chmod(place / name, 0o644 if other else 0o600)


def _let_pass(scratch: Path) -> None:
    """Let the users of sandboxes pass through the temporary directory of this role; they cannot list it."""
    # as an ordinary user sandboxes have that user's own id
    if os.geteuid() == 0 and scratch.parent.name.startswith(SCRATCH_PREFIX):
        for directory in (scratch.parent, scratch):
            os.chmod(directory, stat.S_IMODE(directory.stat().st_mode) | stat.S_IXOTH)


async def _run_inside(sandbox: Sandbox, task: bytes, time_limit_s: float, max_bytes: int) -> EndedProgram:
    argv = ["python3", "-I", f"{_PLACE}/relay.py", _RELAY]
    # as much is kept of the end as of the beginning, and the end counts
    ran = await sandbox.exec(argv, stdin=task, timeout_s=time_limit_s, max_output=2 * max_bytes)
    errors = b""
    with contextlib.suppress(Exception):
        errors = (await sandbox.get([_ERRORS])).get(_ERRORS, b"")
    stderr = errors[-max_bytes:].decode("utf-8", "replace")
    if ran.killed_by not in (None, "timeout"):
        stderr += f"\nit was ended at its limit of {ran.killed_by}"
    stdout = ran.out[-max_bytes:].decode("utf-8", "replace")
    return usable(EndedProgram(ran.rc, ran.killed_by == "timeout", stdout, stderr))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)

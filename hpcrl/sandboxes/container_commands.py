"""Command lines of Docker, Podman and Apptainer for sandboxes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hpcrl.sandboxes.identities import FIRST_UID
from hpcrl.sandboxes.interface import SandboxLimits


class ContainerCommands(Protocol):
    """Command lines of one program that runs containers.

    Attributes
    ----------
    memory:
        Means that limit memory, in words.
    attached:
        A container ends with the process that started it, which it does when its input ends.
    """

    @property
    def memory(self) -> str: ...

    @property
    def attached(self) -> bool: ...

    def start(
        self,
        name: str,
        image: str,
        *,
        limits: SandboxLimits,
        work_directory: str,
        work_source: str,
        mounts: Mapping[str, str],
    ) -> list[str]:
        """Return the command line that starts a container and lets it wait; images are never fetched."""

    def exec(self, name: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> list[str]:
        """Return the command line that runs a program in it."""

    def kill(self, name: str) -> list[str]:
        """Return the command line that ends it."""


@dataclass(frozen=True, slots=True)
class DockerCommands:
    """Docker, or Podman, whose options are the same.

    A container waits for the end of its standard input, which the daemon of sandboxes holds: it ends with that daemon,
    however that ends.
    """

    program: Literal["docker", "podman"]

    @property
    def memory(self) -> str:
        """See `ContainerCommands.memory`."""
        return f"--memory of {self.program}"

    @property
    def attached(self) -> bool:
        """See `ContainerCommands.attached`."""
        return True

    def start(
        self,
        name: str,
        image: str,
        *,
        limits: SandboxLimits,
        work_directory: str,
        work_source: str,
        mounts: Mapping[str, str],
    ) -> list[str]:
        """See `ContainerCommands.start`."""
        user = f"{FIRST_UID}:{FIRST_UID}"
        argv = [self.program, "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", name]
        argv += ["--hostname", "sandbox", "--network", limits.network, "--ipc", "private", "--read-only"]
        argv += ["--user", user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        argv += ["--pids-limit", str(limits.processes), "--shm-size", str(limits.shm_bytes)]
        argv += ["--ulimit", f"nofile={limits.open_files}:{limits.open_files}", "--ulimit", "core=0:0"]
        argv += ["--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}"]
        argv += ["--ulimit", f"cpu={round(limits.cpu_s)}:{round(limits.cpu_s)}"]
        for path, size in (("/tmp", limits.scratch_bytes), (work_directory, limits.disk_bytes)):
            argv += ["--tmpfs", f"{path}:rw,nosuid,nodev,exec,mode=1777,size={size},nr_inodes={limits.inodes}"]
        for inside, outside in sorted(mounts.items()):
            argv += ["--mount", f"type=bind,source={outside},target={inside},readonly"]
        return [*argv, "--workdir", "/", "--entrypoint", "cat", image]

    def exec(self, name: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> list[str]:
        """See `ContainerCommands.exec`."""
        variables = [word for key, value in sorted(env.items()) for word in ("--env", f"{key}={value}")]
        return [self.program, "exec", "--interactive", "--workdir", cwd, *variables, name, *argv]

    def kill(self, name: str) -> list[str]:
        """See `ContainerCommands.kill`."""
        return [self.program, "kill", "--signal", "KILL", name]


@dataclass(frozen=True, slots=True)
class ApptainerCommands:
    """Apptainer, with a SIF file, a squashfs file or a directory as the image.

    Limits of memory and processes need control groups of version 2 that the user may write to. The work tree is a
    directory of the node, whose bytes nothing limits. A container is an instance: where the daemon is killed with
    SIGKILL, it lives on until the job ends.
    """

    program: str = "apptainer"

    @property
    def memory(self) -> str:
        """See `ContainerCommands.memory`."""
        return f"--memory of {self.program}"

    @property
    def attached(self) -> bool:
        """See `ContainerCommands.attached`."""
        return False

    def start(
        self,
        name: str,
        image: str,
        *,
        limits: SandboxLimits,
        work_directory: str,
        work_source: str,
        mounts: Mapping[str, str],
    ) -> list[str]:
        """See `ContainerCommands.start`."""
        argv = [self.program, "instance", "start", "--containall", "--cleanenv", "--no-home", "--no-mount", "hostfs"]
        argv += ["--no-privs", "--disable-cache", "--hostname", "sandbox"]
        argv += [] if limits.network == "host" else ["--net", "--network", "none"]
        argv += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        argv += ["--pids-limit", str(limits.processes), "--bind", f"{work_source}:{work_directory}"]
        for inside, outside in sorted(mounts.items()):
            argv += ["--bind", f"{outside}:{inside}:ro"]
        return [*argv, image, name]

    def exec(self, name: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> list[str]:
        """See `ContainerCommands.exec`."""
        variables = [word for key, value in sorted(env.items()) for word in ("--env", f"{key}={value}")]
        return [self.program, "exec", "--cleanenv", "--pwd", cwd, *variables, f"instance://{name}", *argv]

    def kill(self, name: str) -> list[str]:
        """See `ContainerCommands.kill`."""
        return [self.program, "instance", "stop", "--signal", "KILL", name]

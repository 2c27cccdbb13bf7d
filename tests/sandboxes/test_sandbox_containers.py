"""Docker, Podman and Apptainer: their command lines, and the interface over a program that stands in for them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hpcrl.sandboxes import (
    Patch,
    SandboxError,
    SandboxFile,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)
from hpcrl.sandboxes.container_commands import ApptainerCommands, ContainerCommands, DockerCommands
from hpcrl.sandboxes.container_host import ContainerHost, ContainerSandbox
from hpcrl.sandboxes.node_memory import NodeMemory

LIMITS = SandboxLimits(
    memory_bytes=1 << 28, processes=33, disk_bytes=1 << 20, scratch_bytes=1 << 19, inodes=77, cpu_s=9
)


def options_of(argv: list[str]) -> dict[str, list[str]]:
    """Values of options by their name; an option without a value has an empty list."""
    found: dict[str, list[str]] = {}
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--"):
            values = found.setdefault(word, [])
            if not following.startswith("-"):
                values.append(following)
    return found


def started(commands: ContainerCommands, limits: SandboxLimits = LIMITS) -> list[str]:
    return commands.start(
        "box",
        "image",
        limits=limits,
        work_directory="/testbed",
        work_source="/private/box",
        mounts={"/opt/x": "/data/x"},
    )


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_docker_command_lines(program: str) -> None:
    commands = DockerCommands(program)  # type: ignore[arg-type]
    argv = started(commands)
    found = options_of(argv)
    assert argv[:2] == [program, "run"]
    assert argv[-3:] == ["--entrypoint", "cat", "image"]
    assert found["--network"] == ["none"]
    assert found["--pull"] == ["never"]
    assert found["--cap-drop"] == ["ALL"]
    assert found["--security-opt"] == ["no-new-privileges"]
    assert found["--user"] == ["70000:70000"]
    assert found["--memory"] == found["--memory-swap"] == [str(1 << 28)]
    assert found["--pids-limit"] == ["33"]
    assert found["--tmpfs"] == [
        f"/tmp:rw,nosuid,nodev,exec,mode=1777,size={1 << 19},nr_inodes=77",
        f"/testbed:rw,nosuid,nodev,exec,mode=1777,size={1 << 20},nr_inodes=77",
    ]
    assert "cpu=9:9" in found["--ulimit"]
    assert found["--mount"] == ["type=bind,source=/data/x,target=/opt/x,readonly"]
    assert {"--read-only", "--rm", "--init", "--interactive"} <= found.keys()
    assert not {"--privileged", "--volume", "-v", "--env"} & found.keys()
    assert options_of(started(commands, SandboxLimits(network="host")))["--network"] == ["host"]
    assert commands.exec("box", ["sh", "-c", "x y"], cwd="/work", env={"B": "2", "A": "1 2"}) == [
        *(program, "exec", "--interactive", "--workdir", "/work"),
        *("--env", "A=1 2", "--env", "B=2", "box", "sh", "-c", "x y"),
    ]
    assert commands.kill("box") == [program, "kill", "--signal", "KILL", "box"]


def test_apptainer_command_lines() -> None:
    argv = started(ApptainerCommands())
    found = options_of(argv)
    assert argv[:3] == ["apptainer", "instance", "start"]
    assert argv[-2:] == ["image", "box"]
    assert found["--bind"][0] == "/private/box:/testbed"
    assert "/data/x:/opt/x:ro" in found["--bind"]
    assert found["--network"] == ["none"]
    assert found["--memory"] == [str(1 << 28)]
    assert found["--pids-limit"] == ["33"]
    assert {"--containall", "--cleanenv", "--no-home", "--no-privs", "--net"} <= found.keys()
    assert "--net" not in options_of(started(ApptainerCommands(), SandboxLimits(network="host")))
    assert ApptainerCommands().exec("box", ["true"], cwd="/work", env={"A": "1"}) == [
        *("apptainer", "exec", "--cleanenv", "--pwd", "/work", "--env", "A=1", "instance://box", "true"),
    ]
    assert ApptainerCommands().kill("box") == ["apptainer", "instance", "stop", "--signal", "KILL", "box"]


@pytest.fixture(params=[DockerCommands("docker"), ApptainerCommands()], ids=["docker", "apptainer"])
async def containers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ContainerHost]:
    """A host over the program that stands in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "store").mkdir()
    program = tmp_path / "bin" / request.param.program
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_containers.py")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CONTAINERS", str(tmp_path / "store"))
    (tmp_path / "trees").mkdir()
    host = ContainerHost(request.param, tmp_path / "trees")
    yield host
    await host.close()


@pytest.fixture
async def container(containers: ContainerHost) -> ContainerSandbox:
    tree = await containers.add_tree({"a/b": b"1\n", "run": SandboxFile(b"#!/bin/sh\necho ran $X\n", executable=True)})
    return await containers.start(image="image", tree=tree, limits=LIMITS, env={"X": "1"})


async def test_programs(container: ContainerSandbox) -> None:
    found = await container.exec(["sh", "-c", "cat; pwd; ./run; echo err >&2; exit 3"], stdin=b"in\n", cwd=".")
    assert (found.rc, found.killed_by) == (3, None)
    assert found.text.startswith("in\n")
    assert found.text.endswith("ran 1\nerr\n")
    assert (await container.exec(["nowhere"])).rc == 127
    found = await container.exec(["sh", "-c", "echo before; sleep 1000"], timeout_s=5.0)
    assert (found.rc, found.text, found.killed_by) == (-9, "before\n", "timeout")
    found = await container.exec(["sh", "-c", "printf start; head -c 9000 /dev/zero; printf end"], max_output=10)
    assert (found.out, found.truncated, found.out_bytes) == (b"start\0\0end", True, 9008)


async def test_files(container: ContainerSandbox, containers: ContainerHost) -> None:
    base = await container.snapshot()
    odd = os.fsdecode(b"new\n\xff")
    await container.put({"a/b": b"two\n", odd: b"3", "x": SandboxFile(b"", executable=True)})
    await container.exec(["sh", "-c", "rm run; ln -s a/b link"])
    assert await container.get(["a/b", odd, "missing", "a"]) == {"a/b": b"two\n", odd: b"3"}
    with pytest.raises(SandboxLimitError, match="more than 3 bytes"):
        await container.get(["a/b"], max_bytes=3)
    patch = await container.diff(base)
    assert {entry.path: entry.after for entry in patch.entries} == {
        "a/b": SandboxFile(b"two\n"),
        "link": SandboxFile(b"a/b", link=True),
        odd: SandboxFile(b"3"),
        "run": None,
        "x": SandboxFile(b"", executable=True),
    }
    with pytest.raises(SandboxLimitError):
        await container.diff(base, max_bytes=3)
    other = await containers.start(image="image", tree=base, limits=LIMITS)
    await other.apply(patch)
    assert await other.diff(await container.snapshot()) == Patch()


async def test_the_end(container: ContainerSandbox, tmp_path: Path) -> None:
    await container.kill()
    await container.kill()
    with pytest.raises(SandboxLostError):
        await container.exec(["true"])
    with pytest.raises(SandboxLostError):
        await container.snapshot()
    assert [path.name for path in (tmp_path / "trees").iterdir()] == ["trees"]


async def test_limits_of_all_containers_have_room_in_that_of_the_node(
    containers: ContainerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    memory = NodeMemory(LIMITS.memory_bytes * 3 // 2, "a" * 32, base=tmp_path / "memory", room_s=0.2)
    monkeypatch.setattr(containers, "_node_memory", memory)
    first = await containers.start(image="image", limits=LIMITS)
    with pytest.raises(SandboxStartError, match=r"a container with 256 MiB found no room within 0\.2 s: all"):
        await containers.start(image="image", limits=LIMITS)
    await first.kill()
    with pytest.raises(SandboxError, match="no tree"):
        await containers.start(image="image", tree="0" * 40, limits=LIMITS)
    # one that has ended and one that did not start have given their room back
    await containers.start(image="image", limits=LIMITS)
    assert (await containers.describe())["node_memory"].endswith(", 384 MiB")


async def test_starts_that_fail(containers: ContainerHost, tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="needs an image"):
        await containers.start()
    with pytest.raises(SandboxError, match="no tree"):
        await containers.start(image="image", tree="0" * 40)
    if isinstance(containers._commands, DockerCommands):
        with pytest.raises(SandboxStartError, match=r"no such container\n.*hint: is the image other on this node"):
            await containers.start(image="other")
    assert [path.name for path in (tmp_path / "trees").iterdir()] == ["trees"]

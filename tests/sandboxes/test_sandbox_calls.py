"""The interface of sandboxes, through the daemon and its client."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandbox_lab import SMALL, boxes, mark, python, skip_without_bubblewrap, until, with_argument

from hpcrl.sandboxes import (
    ExecResult,
    Patch,
    PatchEntry,
    Sandbox,
    SandboxError,
    SandboxFile,
    SandboxHost,
    SandboxLimitError,
    SandboxLostError,
    SandboxStartError,
    interface,
)
from hpcrl.sandboxes.bubblewrap_host import BubblewrapHost
from hpcrl.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from hpcrl.sandboxes.client import RemoteSandbox, SandboxClient, SandboxDaemon
from hpcrl.sandboxes.init_program import init_program
from hpcrl.sandboxes.messages import FORMAT_VERSION, HelloCall


async def test_a_program(sandbox: Sandbox) -> None:
    found = await sandbox.exec(
        ["sh", "-c", "cat; pwd; echo $GIVEN; echo to stderr >&2; exit 3"],
        stdin=b"in\n",
        cwd="/tmp",
        env={"GIVEN": "x y"},
    )
    assert (found.rc, found.text, found.truncated, found.killed_by) == (3, "in\n/tmp\nx y\nto stderr\n", False, None)
    assert found.out_bytes == len(found.out)


async def test_programs_that_do_not_run(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["nowhere"])) == ExecResult(
        127, b"nowhere: No such file or directory\n", wall_s=pytest.approx(0, abs=60), out_bytes=35
    )
    assert (await sandbox.exec(["/etc/passwd"])).rc == 126
    assert (await sandbox.exec(["true"], cwd="missing")).rc == 127
    with pytest.raises(SandboxError, match="needs a name"):
        await sandbox.exec([])
    with pytest.raises(SandboxError, match="NUL"):
        await sandbox.exec(["a\0b"])


async def test_signals_and_long_arguments(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["sh", "-c", "kill -TERM $$"])).rc == -15
    long = "x" * 100_000
    found = await sandbox.exec(["printf", "%s", long, long], max_output=1 << 20)
    assert found.out == 2 * long.encode()
    odd = os.fsdecode(b"\xff\n")
    assert (await sandbox.exec(["printf", "%s", odd])).out == b"\xff\n"


async def test_programs_that_enter_while_other_sandboxes_end(host: SandboxClient) -> None:
    """The spawner ends what is left of a sandbox, and no program that has just entered another one."""
    sandboxes = await asyncio.gather(*(host.start(limits=SMALL) for _ in range(4)))

    async def end_others() -> None:
        for _ in range(8):
            await (await host.start(limits=SMALL)).kill()

    programs = [each.exec(["sh", "-c", f"exit {n}"]) for n in range(24) for each in sandboxes]
    results, *_ = await asyncio.gather(asyncio.gather(*programs), end_others(), end_others())
    assert [each.rc for each in results] == [n for n in range(24) for _ in sandboxes]


async def test_timeout(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["sh", "-c", "echo before; sleep 1000"], timeout_s=3.0)
    assert (found.rc, found.text, found.killed_by) == (-9, "before\n", "timeout")
    assert found.wall_s >= 3.0


async def test_files_in_and_out(host: SandboxClient) -> None:
    tree = await host.add_tree(
        {
            "run.sh": SandboxFile(b"#!/bin/sh\necho ran\n", executable=True),
            "a/b/c": b"deep",
            "l": SandboxFile(b"a", link=True),
        }
    )
    sandbox = await host.start(tree=tree, limits=SMALL)
    assert (await sandbox.exec(["./run.sh"])).text == "ran\n"
    assert await sandbox.get(["l/b/c", "missing", "a"]) == {"l/b/c": b"deep"}
    await sandbox.put({"a/b/c": b"new", "x": SandboxFile(b"", executable=True), "/tmp/y": b"1"})
    assert await sandbox.get(["a/b/c", "/tmp/y"], max_bytes=4) == {"a/b/c": b"new", "/tmp/y": b"1"}
    with pytest.raises(SandboxLimitError, match="more than 3 bytes"):
        await sandbox.get(["a/b/c", "/tmp/y"], max_bytes=3)
    for path in ("", ".", "/"):
        with pytest.raises(SandboxError, match="not a path"):
            await sandbox.put({path: b""})


async def test_changes(host: SandboxClient) -> None:
    """A patch holds each kind of change exactly, can be cut by path, and makes the same tree elsewhere."""
    files = {"kept": b"1\n", "changed": b"2\n", "gone/a": b"3\n", "gone/b": b"4\n", "mode": b"5\n", "turned": b"6\n"}
    tree = await host.add_tree({**files, "binary": b"\0\1"})
    sandbox = await host.start(tree=tree, limits=SMALL)
    assert await sandbox.diff(tree) == Patch()
    script = """
echo two > changed; rm -r gone; echo three > gone; chmod +x mode; ln -sf kept turned; mkdir -p new/er
printf 'no end' > new/er/file; mkdir empty; head -c 10 /dev/zero > binary; touch tests.py
"""
    await sandbox.exec(["sh", "-c", script])
    patch = await sandbox.diff(tree)
    changed = {entry.path: (entry.before, entry.after) for entry in patch.entries}
    assert changed == {
        "binary": (SandboxFile(b"\0\1"), SandboxFile(bytes(10))),
        "changed": (SandboxFile(b"2\n"), SandboxFile(b"two\n")),
        "gone": (None, SandboxFile(b"three\n")),
        "gone/a": (SandboxFile(b"3\n"), None),
        "gone/b": (SandboxFile(b"4\n"), None),
        "mode": (SandboxFile(b"5\n"), SandboxFile(b"5\n", executable=True)),
        "new/er/file": (None, SandboxFile(b"no end")),
        "tests.py": (None, SandboxFile(b"")),
        "turned": (SandboxFile(b"6\n"), SandboxFile(b"kept", link=True)),
    }
    fresh = await host.start(tree=tree, limits=SMALL)
    await fresh.apply(patch.select(lambda path: path != "tests.py"))
    assert (await fresh.diff(tree)).paths == tuple(path for path in patch.paths if path != "tests.py")
    assert (await fresh.diff(tree)).select(lambda path: path == "mode").entries == patch.select(
        lambda path: path == "mode"
    ).entries


@pytest.mark.skipif(shutil.which("git") is None, reason="git reads the text of a patch")
async def test_text_of_a_patch_is_read_by_git(tmp_path: Path) -> None:
    before = {"a.txt": "one\ntwo\nthree", "gone.txt": "x\n", "run.sh": "echo\n", "empty": ""}
    after = {"a.txt": "one\n2\nthree\n", "new.txt": "y", "run.sh": "echo\n", "cr.txt": "a\r\nb\x0cc\n"}
    entries = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old != new or path == "run.sh":
            entries.append(
                PatchEntry(
                    path,
                    None if old is None else SandboxFile(old.encode()),
                    None if new is None else SandboxFile(new.encode(), executable=path == "run.sh"),
                )
            )
    for path, text in before.items():
        (tmp_path / path).write_bytes(text.encode())
    process = await asyncio.create_subprocess_exec("git", "apply", "-", cwd=tmp_path, stdin=-1, stderr=-1)
    _, said = await process.communicate(Patch(tuple(entries)).text().encode())
    assert process.returncode == 0, said
    assert {path.name: path.read_bytes().decode() for path in tmp_path.iterdir()} == after
    assert os.access(tmp_path / "run.sh", os.X_OK)


async def test_large_changes_are_the_programs_fault(host: SandboxClient) -> None:
    sandbox = await host.start(limits=SMALL)
    base = await sandbox.snapshot()
    await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero > large"])
    with pytest.raises(SandboxLimitError, match="more than 1000000 bytes"):
        await sandbox.diff(base, max_bytes=1_000_000)
    # files with holes have more bytes than fit on the disk
    await sandbox.exec(["sh", "-c", "for n in 1 2 3 4; do truncate -s 30M hole$n; done"])
    with pytest.raises(SandboxLimitError, match="more than 67108864 bytes"):
        await sandbox.diff(base)
    with pytest.raises(SandboxLimitError, match=f"more than {SMALL.disk_bytes} bytes"):
        await sandbox.snapshot()
    with pytest.raises(SandboxLimitError, match="more than 1 bytes"):
        await sandbox.get(["hole1"], max_bytes=1)
    await sandbox.exec(["sh", "-c", "rm hole*; cat /dev/zero > fill"])
    with pytest.raises(SandboxLimitError, match="No space"):
        await sandbox.put({"more": bytes(1 << 20)})


async def test_snapshots(host: SandboxClient) -> None:
    """A snapshot is a tree as any other: sandboxes that start from it do not see what comes later."""
    sandbox = await host.start(limits=SMALL)
    await sandbox.exec(["sh", "-c", "mkdir -p built; echo 1 > built/one; chmod +x built/one; ln -s one built/link"])
    tree = await sandbox.snapshot()
    assert await sandbox.snapshot() == tree
    await sandbox.exec(["rm", "-r", "built"])
    copy = await host.start(tree=tree, limits=SMALL)
    assert (await copy.exec(["sh", "-c", "cat built/link; ls -l built | cut -c1-10"])).text == (
        "1\ntotal 4\nlrwxrwxrwx\n-rwxr-xr-x\n"
    )
    assert await copy.diff(tree) == Patch()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


async def test_trees(host: SandboxClient, open_directory: Path) -> None:
    """A directory and files give the same tree; the directory may change; a tree goes when all have dropped it."""
    (open_directory / "d").mkdir()
    (open_directory / "d" / "f").write_bytes(b"1")
    (open_directory / "d" / "g").symlink_to("f")
    tree = await host.add_tree({"d/f": b"1", "d/g": SandboxFile(b"f", link=True)})
    assert await host.add_tree(open_directory) == tree
    await host.drop_tree(tree)
    sandbox = await host.start(tree=tree, limits=SMALL)
    await host.drop_tree(tree)
    await host.drop_tree(tree)
    with pytest.raises(SandboxError, match="no tree"):
        await host.start(tree=tree, limits=SMALL)
    with pytest.raises(SandboxError, match="not a name of a tree"):
        await host.start(tree="../secret", limits=SMALL)
    assert await sandbox.get(["d/g"]) == {"d/g": b"1"}
    with pytest.raises(SandboxError, match="No such file"):
        await host.add_tree(open_directory / "missing")


async def test_directories_of_the_node(host: SandboxClient) -> None:
    """They can be read, and not be written; another work directory hides them not."""
    sandbox = await host.start(
        limits=SMALL, mounts={"/opt/share": "/usr/share"}, work_directory="/testbed", env={"A": "1"}
    )
    script = "pwd; ls -d /opt/share/doc; touch /opt/share/x; touch here && ls; echo $A$B"
    found = await sandbox.exec(["sh", "-c", script], env={"B": "2"})
    assert found.text.split("\n")[:2] == ["/testbed", "/opt/share/doc"]
    assert "Read-only" in found.text
    assert found.text.endswith("here\n12\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"work_directory": "work"}, "not an absolute path"),
        ({"work_directory": "/usr/x"}, "part of the sandbox's own"),
        ({"work_directory": "/"}, "part of the sandbox's own"),
        ({"mounts": {"/work/x": "/usr"}}, "overlaps"),
        ({"mounts": {"/proc": "/usr"}}, "overlaps"),
        ({"mounts": {"/opt": "/nowhere"}}, "no such directory"),
        ({"image": "/nowhere"}, "unpacked root filesystem"),
    ],
)
async def test_refused_starts(host: SandboxClient, options: dict[str, object], said: str) -> None:
    with pytest.raises(SandboxStartError, match=said):
        await host.start(**options)  # type: ignore[arg-type]


async def test_an_image(host: SandboxClient, open_directory: Path) -> None:
    """A root filesystem without anything of the node: here with one static program, which is ours."""
    for name in ("bin", "etc", "proc", "lib"):
        (open_directory / name).mkdir()
    (open_directory / "bin" / "wait").write_bytes(init_program(os.uname().machine))
    (open_directory / "bin" / "wait").chmod(0o755)
    (open_directory / "etc" / "image").write_text("mine")
    sandbox = await host.start(image=str(open_directory), limits=SMALL)
    found = await sandbox.exec(["/bin/wait"], timeout_s=3.0)
    assert (found.out, found.killed_by) == (b"R", "timeout")
    assert (await sandbox.exec(["ls"])).rc == 127
    await sandbox.put({"x": b"y"})
    assert await sandbox.get(["x", "/etc/image", "/etc/passwd"]) == {"x": b"y", "/etc/image": b"mine"}


async def test_giving_up_a_call(host: SandboxClient) -> None:
    """What a cancelled call has started is ended."""
    sandbox = await host.start(limits=SMALL)
    seconds = mark()
    task = asyncio.create_task(sandbox.exec(["sleep", seconds], timeout_s=1000))
    await until(lambda: bool(with_argument(seconds)), what="the program does not start")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not with_argument(seconds), what="the program lives on")
    assert (await sandbox.exec(["true"])).rc == 0


async def test_giving_up_starts(daemon: SandboxDaemon) -> None:
    """At any moment of a start: nothing is left, also where the daemon had finished."""
    host = await SandboxClient.connect(daemon.directory)
    process = psutil.Process(daemon.pid)
    await until(lambda: not boxes(process), what="sandboxes of other tests are left")
    for number in range(12):
        task = asyncio.create_task(host.start(limits=SMALL))
        await asyncio.sleep(number * 0.006)
        task.cancel()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(found, RemoteSandbox):  # it was faster
            await found.kill()
        else:
            assert isinstance(found, asyncio.CancelledError)
    await until(lambda: not boxes(process), what="sandboxes are left")
    await host.close()


async def test_many_at_once(host: SandboxClient) -> None:
    """Sandboxes and programs do not wait for each other."""
    sandboxes = await asyncio.gather(*(host.start(limits=SMALL) for _ in range(12)))
    assert len({each.id for each in sandboxes}) == 12
    slow = asyncio.create_task(sandboxes[0].exec(["sleep", "1000"], timeout_s=1000))
    found = await asyncio.gather(*(each.exec(["sh", "-c", f"echo {n}"]) for n, each in enumerate(sandboxes)))
    assert [each.text for each in found] == [f"{n}\n" for n in range(12)]
    assert not slow.done()
    await sandboxes[0].kill()
    with pytest.raises(SandboxLostError):
        await slow


async def test_a_wrong_secret(daemon: SandboxDaemon) -> None:
    assert (daemon.directory / "socket").stat().st_mode & 0o777 == 0o600
    assert daemon.directory.stat().st_mode & 0o777 == 0o700
    for call in (HelloCall("0" * 64, FORMAT_VERSION), HelloCall("", FORMAT_VERSION)):
        client = SandboxClient(*await asyncio.open_unix_connection(daemon.directory / "socket"))
        with pytest.raises(SandboxLostError, match="refused"):
            await client.call(call, None)
        await client.close()
    secret = (daemon.directory / "secret").read_text()
    client = SandboxClient(*await asyncio.open_unix_connection(daemon.directory / "socket"))
    with pytest.raises(SandboxError, match="format"):
        await client.call(HelloCall(secret, FORMAT_VERSION + 1), None)
    await client.close()


async def test_clients_do_not_reach_each_others_sandboxes(daemon: SandboxDaemon, host: SandboxClient) -> None:
    sandbox = await host.start(limits=SMALL)
    other = await SandboxClient.connect(daemon.directory)
    with pytest.raises(SandboxLostError, match="no sandbox"):
        await RemoteSandbox(other, sandbox.id).exec(["true"])
    await RemoteSandbox(other, sandbox.id).kill()
    await other.close()
    assert (await sandbox.exec(["true"])).rc == 0


def test_a_daemon_that_cannot_start(monkeypatch: pytest.MonkeyPatch, open_directory: Path) -> None:
    """The owner gets the reason, and nothing is left."""
    (open_directory / "bin").mkdir()
    (open_directory / "bin" / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    (open_directory / "bin" / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_directory / "bin"), prepend=os.pathsep)
    with pytest.raises(SandboxStartError, match=r"version bubblewrap 0\.4\.1, which is too old\n.*hint: install"):
        SandboxDaemon(scratch=open_directory)
    (open_directory / ("x" * 90)).mkdir()
    with pytest.raises(SandboxStartError, match=r"too long for a socket"):
        SandboxDaemon(scratch=open_directory / ("x" * 90))
    assert {path.name for path in open_directory.rglob("*")} == {"bin", "bwrap", "x" * 90}


@pytest.mark.parametrize(
    ("protocol", "kinds"),
    [(Sandbox, (BubblewrapSandbox, RemoteSandbox)), (SandboxHost, (BubblewrapHost, SandboxClient))],
)
def test_implementations_have_the_interface(protocol: type, kinds: tuple[type, ...]) -> None:
    for name, wanted in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            for kind in kinds:
                found = inspect.signature(getattr(kind, name))
                assert list(found.parameters.values()) == list(inspect.signature(wanted).parameters.values()), (
                    kind,
                    name,
                )


async def test_limits_have_names_in_the_wire(host: SandboxClient) -> None:
    """Every limit arrives: a program sees those that it can ask for."""
    limits = dataclasses.replace(SMALL, open_files=99, cpu_s=77, processes=21)
    program = (
        "import resource as r\nfor n in ('NOFILE', 'CPU', 'NPROC'): print(r.getrlimit(getattr(r, 'RLIMIT_' + n))[0])"
    )
    assert (await python(await host.start(limits=limits), program)).split() == ["99", "77", "22"]
    assert interface.SandboxLimits() != limits


async def test_example_of_the_docs(open_directory: Path) -> None:
    """The example of docs/environments.md, with tests that fail until they are fixed."""
    skip_without_bubblewrap()
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    (block,) = [text for text in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "local_sandboxes" in text]
    # the node's own Python may have no pytest
    example: dict[str, Any] = {}
    exec(block.replace('"-m", "pytest", "-q"', '"test_code.py"'), example)
    (open_directory / "code_.py").write_text("def double(n):\n    return n + n + 1\n")
    (open_directory / "test_code.py").write_text("import code_\nassert code_.double(2) == 4, 'wrong'\n")
    assert "AssertionError: wrong" in await example["failing_tests"](open_directory, {})
    fixed = await example["failing_tests"](open_directory, {"code_.py": b"def double(n):\n    return n + n\n"})
    assert "-    return n + n + 1\n+    return n + n\n" in fixed

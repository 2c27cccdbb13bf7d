"""Parts of sandboxes that need no sandbox: the filter, the first process, command lines, archives, groups, ids."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import until

from hpcrl.processes.left_groups import group_name, remove_left_groups
from hpcrl.processes.procfs import is_alive
from hpcrl.sandboxes import Patch, PatchEntry, SandboxError, SandboxFile, SandboxLimits, SandboxStartError, cgroups
from hpcrl.sandboxes.archive import (
    DIRECTORY,
    END,
    FAILED,
    FILE,
    ArchiveError,
    ArchiveRecord,
    encoded,
    read_records,
    records_of,
)
from hpcrl.sandboxes.bubblewrap import bubblewrap_command, check_paths, tmpfs_options
from hpcrl.sandboxes.cgroups import find_cgroups
from hpcrl.sandboxes.identities import BLOCK, FIRST_UID, Identities, uid_block
from hpcrl.sandboxes.init_program import READY, init_program
from hpcrl.sandboxes.program_output import ProgramOutput
from hpcrl.sandboxes.seccomp import ARCHITECTURES, SYSTEM_CALLS, seccomp_filter
from hpcrl.sandboxes.trees import TreeStore

ALLOW = "allow"


def decide(program: bytes, number: int, arguments: tuple[int, ...] = (), machine: str = "x86_64") -> str | int:
    """Run a filter as the kernel does: ``allow``, ``kill``, or the error number that the call gets."""
    data = struct.pack(
        "<IIQ6Q", number, ARCHITECTURES.get(machine, 0x40000003), 0, *arguments, *[0] * (6 - len(arguments))
    )
    steps = list(struct.iter_unpack("<HBBI", program))
    at, value = 0, 0
    while True:
        code, true, false, k = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif code in (0x15, 0x35, 0x45):
            at += true if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code] else false
        else:
            assert code == 0x06
            return {0x7FFF0000: ALLOW, 0x80000000: "kill"}.get(k) or k & 0xFFFF


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter(machine: str) -> None:
    program = seccomp_filter(machine)
    index = list(ARCHITECTURES).index(machine)

    def ask(number: int, *arguments: int) -> str | int:
        return decide(program, number, arguments, machine)

    for name, numbers in SYSTEM_CALLS.items():
        if numbers[index] is not None:
            assert ask(numbers[index]) == errno.EPERM, name
    read, openat, execve = {"x86_64": (0, 257, 59), "aarch64": (63, 56, 221)}[machine]
    assert [ask(read), ask(openat), ask(execve)] == [ALLOW] * 3
    clone, ioctl, opened = {"x86_64": (56, 16, 41), "aarch64": (220, 29, 198)}[machine]
    assert ask(435) == errno.ENOSYS
    assert ask(clone, 0x01200011) == ALLOW
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
        assert ask(clone, 0x11 | flag) == errno.EPERM
    assert [ask(ioctl, 0, request) for request in (0x5401, 0x5412, 0x541C)] == [ALLOW, errno.EPERM, errno.EPERM]
    assert [family for family in range(50) if ask(opened, family) == ALLOW] == [1, 2, 10, 16]
    # arguments are looked at by their low half, as the kernel does for ints
    assert ask(opened, 0xFFFFFFFF00000028) == errno.EPERM
    assert decide(program, read, (), "another") == "kill"
    assert ask(0x40000000 | read) == (errno.ENOSYS if machine == "x86_64" else ALLOW)


def test_filter_without_unmapped_memory() -> None:
    strict, wide = seccomp_filter("x86_64", unmapped_memory=False), seccomp_filter("x86_64")
    for number in (319, 447, 68, 29):
        assert (decide(strict, number), decide(wide, number)) == (errno.EPERM, ALLOW)
    with pytest.raises(ValueError, match="riscv64"):
        seccomp_filter("riscv64")


async def test_init_program_waits(tmp_path: Path) -> None:
    """It says that it runs, closes its streams, ignores children, and is not seen by others of its user."""
    path = tmp_path / "init"
    path.write_bytes(init_program(platform.machine()))
    path.chmod(0o755)
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read() == READY  # and the end, because it has closed it
            # its first stream is closed before the second, and standard error after both
            await until(lambda: os.listdir(f"/proc/{process.pid}/fd") == [], what="it has open files")
            status = Path(f"/proc/{process.pid}/status").read_text()
            ignored = next(line for line in status.splitlines() if "SigIgn" in line)
            assert int(ignored.split()[1], 16) & 1 << 16  # SIGCHLD is 17
            assert os.stat(f"/proc/{process.pid}/mem").st_uid == 0
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("reader", ["gone", "none"])
def test_init_program_ends_where_no_process_reads_that_it_is_ready(tmp_path: Path, reader: str) -> None:
    """Also as the first process of a namespace, to which the kernel sends no SIGPIPE."""
    path = tmp_path / "init"
    path.write_bytes(init_program(platform.machine()))
    path.chmod(0o755)
    reading, writing = os.pipe()
    os.close(reading)
    ignores = signal.getsignal(signal.SIGPIPE)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        options: dict[str, Any] = {"stdout": writing} if reader == "gone" else {"preexec_fn": lambda: os.close(1)}
        with subprocess.Popen([path], restore_signals=False, **options) as process:
            try:
                assert process.wait(10.0) == 1
            finally:
                process.kill()
    finally:
        os.close(writing)
        signal.signal(signal.SIGPIPE, ignores)


def test_init_program_of_the_other_architecture() -> None:
    """Its instructions for aarch64, which no test here can run, by hand."""
    data = init_program("aarch64")
    assert data[:20] == b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 183)
    code = struct.unpack_from("<29I", data, 120)
    assert code[0] == 0xD28010C8  # movz x8, #134
    assert code[1] == 0xD2800220  # movz x0, #17
    address = 120 + 8 + (code[2] >> 5 & 0x7FFFF) * 4 + (code[2] >> 29 & 3)
    assert struct.unpack_from("<Q", data, address) == (1,)
    written = code.index(0xF100041F)  # subs xzr, x0, #1
    # b.eq 16 bytes further, movz x0, #1, movz x8, #94, svc 0
    assert code[written + 1 : written + 5] == (0x54000080, 0xD2800020, 0xD2800BC8, 0xD4000001)
    assert code[written - 1] == 0xD4000001
    assert data[-1:] == READY
    assert len(data) == struct.unpack_from("<Q", data, 64 + 32)[0]
    with pytest.raises(ValueError, match="riscv64"):
        init_program("riscv64")


def test_bubblewrap_command_line() -> None:
    limits = SandboxLimits(disk_bytes=1234, scratch_bytes=55, shm_bytes=66, inodes=9)
    command = bubblewrap_command("/usr/bin/bwrap", limits=limits, work_directory="/testbed", mounts={"/opt/x": "/data"})
    argv, text = list(command.argv), " ".join(command.argv)
    for flag in ("user", "pid", "ipc", "uts", "net", "cgroup-try"):
        assert f"--unshare-{flag}" in argv
    for flag in ("--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"):
        assert flag in argv
    assert "--cap-drop ALL" in text
    assert "--uid 1000 --gid 1000" in text
    assert f"--seccomp {command.numbers['seccomp']}" in text
    # each size stands before its own tmpfs, and what is read-only becomes so last
    assert "--size 66 --tmpfs /dev/shm --size 55 --tmpfs /tmp --size 1234 --tmpfs /testbed" in text
    assert text.endswith("--ro-bind /data /opt/x --remount-ro /dev --remount-ro / --chdir / -- /.init")
    assert not [word for word in argv if word in ("--bind", "--dev-bind", "--bind-try", "--share-net", "--setenv")]
    assert sorted(command.numbers.values()) == list(range(3, 3 + len(command.numbers)))
    assert tmpfs_options(limits, "/testbed") == dict.fromkeys(("/dev/shm", "/tmp", "/testbed"), "nr_inodes=9")
    host = bubblewrap_command("bwrap", limits=SandboxLimits(network="host"), work_directory="/work")
    assert "--unshare-net" not in host.argv
    assert "/etc/resolv.conf" in host.argv
    assert "/etc/resolv.conf" not in argv


def test_bubblewrap_command_line_with_an_image(tmp_path: Path) -> None:
    for name in ("usr", "etc", "proc", "dev", "tmp", "root", "opt"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "file").touch()
    command = bubblewrap_command("bwrap", limits=SandboxLimits(), work_directory="/work", image=str(tmp_path))
    argv = list(command.argv)
    bound = [argv[n + 2] for n, word in enumerate(argv) if word == "--ro-bind"]
    assert bound == ["/etc", "/opt", "/usr"]
    assert argv[argv.index("--symlink") + 1 : argv.index("--symlink") + 3] == ["usr/bin", "/bin"]
    assert command.contents == {}


@pytest.mark.parametrize("path", ["work", "/work/", "/a/../b", "/", "/tmp", "/proc/x", "/usr/share", "/etc"])
def test_refused_work_directories(path: str) -> None:
    with pytest.raises(SandboxStartError, match="work_directory"):
        check_paths(path, {})


def test_archives() -> None:
    records = [ArchiveRecord(DIRECTORY, False, b"d"), ArchiveRecord(FILE, True, b"d/\xff\n", b"content")]
    data = b"".join(map(encoded, records)) + encoded(ArchiveRecord(END, False, b""))
    assert list(read_records(io.BytesIO(data))) == records
    assert list(read_records(io.BytesIO(data), max_bytes=7)) == records
    with pytest.raises(ArchiveError, match="more than 6 bytes"):
        list(read_records(io.BytesIO(data), max_bytes=6))
    for length in range(len(data)):
        with pytest.raises(ArchiveError):
            list(read_records(io.BytesIO(data[:length])))
    failed = encoded(ArchiveRecord(FAILED, False, b"28", b"No space"))
    assert [record.content for record in read_records(io.BytesIO(failed))] == [b"No space"]
    # what claims to be larger than it is takes no memory, and other kinds are no records
    for torn in (struct.pack(">cBIQ", FILE, 0, 1, 1 << 62) + b"x", struct.pack(">cBIQ", b"z", 0, 0, 0), bytes(100)):
        with pytest.raises(ArchiveError):
            list(read_records(io.BytesIO(torn)))
    for path in (b"a\0b", b"x" * 5000):
        with pytest.raises(ArchiveError, match="not an archive"):
            list(read_records(io.BytesIO(encoded(ArchiveRecord(FILE, False, path)) + data)))


def test_records_of_a_directory(tmp_path: Path) -> None:
    """Pipes, sockets and what cannot be read are left out; links are not followed."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"1")
    (tmp_path / "d.txt").write_bytes(b"2")
    (tmp_path / "l").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(tmp_path):
            listener.bind("socket")
        found = [(record.kind, record.path, record.content) for record in records_of(os.fsencode(tmp_path))]
    assert found == [(b"d", b"d", b""), (b"f", b"d.txt", b"2"), (b"f", b"d/f", b"1"), (b"l", b"l", b"/etc")]
    with pytest.raises(FileNotFoundError):
        list(records_of(os.fsencode(tmp_path / "missing")))


def test_trees_are_counted(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "trees")
    record = ArchiveRecord(FILE, False, b"a", b"1")
    name = store.add([record])
    assert store.add([record]) == name
    store.drop(name)
    os.close(store.open(name))
    store.drop(name)
    store.drop(name)
    with pytest.raises(SandboxError, match="no tree"):
        store.open(name)
    assert list((tmp_path / "trees").iterdir()) == []
    torn = store.scratch()
    torn.write_bytes(encoded(record))
    with pytest.raises(ArchiveError):
        store.add_archive(torn)
    assert list((tmp_path / "trees").iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, 2, 9, 10, 11])
def test_program_output(size: int) -> None:
    for step in (1, 3, 5000):
        data = bytes(n % 251 for n in range(12_345))
        output = ProgramOutput(size)
        for at in range(0, len(data), step):
            output.add(data[at : at + step])
        head = size - size // 2
        assert output.content() == data[:head] + (data[len(data) - size // 2 :] if size // 2 else b"")
        assert (output.total, output.truncated) == (len(data), True)
    short = ProgramOutput(10)
    short.add(b"0123456789")
    assert (short.content(), short.truncated) == (b"0123456789", False)


def test_user_ids() -> None:
    everybody = "         0          0 4294967295\n"
    assert uid_block(everybody, 0) == range(FIRST_UID, FIRST_UID + BLOCK)
    assert uid_block(everybody, 2)[0] == FIRST_UID + 2 * BLOCK
    for few in ("0 1000 1\n", "0 1000 1\n1 100000 65536\n", "", f"0 0 {FIRST_UID + BLOCK - 1}\n"):
        with pytest.raises(SandboxStartError, match="never run as root"):
            uid_block(few, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_daemons_do_not_share_user_ids() -> None:
    one, two = Identities(), Identities()
    try:
        first, second = one.take(), two.take()
        assert first is not None
        assert second is not None
        assert first >= FIRST_UID
        assert abs(first - second) >= BLOCK
        one.give_back(first)
        assert one.take() == first
        for _ in range(BLOCK - 1):
            one.take()
        with pytest.raises(SandboxStartError, match="maximum of a daemon"):
            one.take()
    finally:
        one.close()
        two.close()


def group_files(directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (directory / name).touch()


def make_group(path: Path, *names: str, taken: str = "") -> None:
    """Make a group as the kernel does: with its files; ``taken`` is one that cannot be written."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    group_files(path, ("cgroup.subtree_control", *names))
    if taken:
        os.mkdir(path / taken)


def test_delegated_groups(tmp_path: Path) -> None:
    """Version 2: controllers are switched on at each level, and limits written below."""
    group_files(tmp_path, ("cgroup.controllers", "cgroup.subtree_control", "cgroup.procs"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda self, exist_ok=False: make_group(self, "cgroup.procs"))
        patch.setattr(cgroups.SandboxCgroup, "remove", lambda self: True)
        tree, how = find_cgroups(os.getpid(), root=tmp_path / "none", delegated=tmp_path)
        assert how == "cgroup v2"
        assert tree is not None
        group = tree.make("one", SandboxLimits(memory_bytes=1000, processes=5))
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    (directory,) = group.directories
    assert (directory / "memory.max").read_text() == "1000"
    assert (directory / "memory.swap.max").read_text() == "0"
    assert (directory / "pids.max").read_text() == "8"
    assert group.joins == (str(directory / "cgroup.procs"),)
    assert group.oom_kills() == 0
    (directory / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert group.oom_kills() == 3


def test_other_versions_find_a_daemon_in_the_name_of_its_group() -> None:
    """They remove the groups of a daemon that does not live, by the last two numbers."""
    _, pid, ticks = group_name(os.getpid()).rsplit("-", 2)
    assert int(pid) == os.getpid()
    assert is_alive(int(pid), int(ticks))


def test_groups_of_ended_daemons_are_removed(tmp_path: Path) -> None:
    """As the guard of a role does it, whose daemon had no time to."""
    for controller in ("memory", "pids"):
        (tmp_path / controller / "hpcrl-sandboxd-4194305-7" / "3").mkdir(parents=True)
        (tmp_path / controller / group_name(os.getpid())).mkdir()
        (tmp_path / controller / "another").mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    remove_left_groups(tmp_path)
    for controller in ("memory", "pids"):
        left = {path.name for path in (tmp_path / controller).iterdir()}
        assert left == {group_name(os.getpid()), "another", "cgroup.procs"}


def test_groups_that_cannot_be_entered(tmp_path: Path) -> None:
    """A delegated directory that processes of another subtree may not move to: the next way is taken."""
    group_files(tmp_path, ("cgroup.controllers", "cgroup.subtree_control"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda self, exist_ok=False: make_group(self, taken="cgroup.procs"))
        tree, how = find_cgroups(os.getpid(), root=tmp_path / "none", delegated=tmp_path)
    assert tree is None
    assert how.startswith("cgroup v2: a process may not enter: Is a directory")


def test_nodes_without_groups(tmp_path: Path) -> None:
    tree, how = find_cgroups(os.getpid(), root=tmp_path)
    assert tree is None
    assert how == "cgroup v2: not mounted; cgroup v1: not mounted"
    group_files(tmp_path, ("cgroup.controllers",))
    (tmp_path / "cgroup.subtree_control").mkdir()  # as where it may not be written
    tree, how = find_cgroups(os.getpid(), root=tmp_path, delegated=tmp_path)
    assert tree is None
    assert how.startswith("cgroup v2: Is a directory")
    assert not list(tmp_path.glob("hpcrl-sandboxd-*"))


def test_text_of_a_patch() -> None:
    patch = Patch(
        (
            PatchEntry("a", SandboxFile(b"1\n2"), SandboxFile(b"1\n3\n")),
            PatchEntry("b", None, SandboxFile(b"\0")),
            PatchEntry("c", SandboxFile(b""), None),
            PatchEntry("d", None, SandboxFile(b"a", link=True)),
            PatchEntry("e", None, SandboxFile(b"x\n" * 10_000)),
        )
    )
    assert patch.text() == (
        "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n 1\n-2\n\\ No newline at end of file\n+3\n"
        "diff --git a/b b/b\nnew file mode 100644\nBinary files /dev/null and b/b differ\n"
        "diff --git a/c b/c\ndeleted file mode 100644\n"
        "diff --git a/d b/d\nnew file mode 120000\n--- /dev/null\n+++ b/d\n@@ -0,0 +1 @@\n+a\n"
        "\\ No newline at end of file\n"
        "diff --git a/e b/e\nnew file mode 100644\nBinary files /dev/null and b/e differ\n"
    )
    assert patch.select(lambda path: path in "ab").paths == ("a", "b")

"""`hpcrl site install`: an environment is whole under its name, or not there; every refusal is one message."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from patience import wait_for
from tiny_wheels import tiny_contents, tiny_wheel

from hpcrl.cli.main import main
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sites.installation import staging
from hpcrl.sites.installation.environment import EnvironmentContents, InstalledEnvironment, install
from hpcrl.sites.installation.installers import (
    Installer,
    InstallFailedError,
    find_installer,
    pip_command,
    run_installer,
)
from hpcrl.sites.installation.interpreters import Interpreter, ask_interpreter, own_interpreter
from hpcrl.sites.installation.staging import Stage, staged

PIP = Installer("pip", pip_command())
NOTHING = Installer("pip", ("/bin/true",))
"""An installer that must not be needed, or does nothing."""


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return ask_interpreter(own_interpreter())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    tiny_wheel(directory, "tiny_one", code="def main(): print('one')\n")
    return directory


def make(
    prefix: Path,
    interpreter: Interpreter,
    contents: Callable[[Stage], EnvironmentContents],
    installer: Installer = PIP,
) -> InstalledEnvironment:
    return install(prefix, "env", interpreter, installer, contents, say=lambda _: None)


def left_in(prefix: Path) -> list[str]:
    """What is in a prefix beside the file of the lock."""
    return sorted(path.name for path in prefix.iterdir() if path.name != ".env.lock")


@pytest.mark.slow
def test_an_environment_is_whole_under_its_final_name(
    tmp_path: Path, interpreter: Interpreter, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "with blanks ü"
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    umask = os.umask(0o077)
    try:
        made = make(prefix, interpreter, lambda stage: tiny_contents(wheels, stage))
    finally:
        os.umask(umask)
    assert made == InstalledEnvironment(prefix / "env", True)
    assert left_in(prefix) == ["env"]
    # all users of a site can read it, whatever the umask of who made it
    assert [path for path in made.path.rglob("*") if not path.is_symlink() and not path.stat().st_mode & 0o044] == []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([made.path / "bin/hpcrl"], env=environ, capture_output=True, text=True, check=True)
    assert run.stdout == "tiny hpcrl\n"
    # modules are compiled, and what they name are their final places
    (compiled,) = made.path.rglob("tiny_one/__pycache__/*.pyc")
    assert os.fsencode(made.path / "lib") in compiled.read_bytes()
    named = subprocess.run(["grep", "-rlF", ".installing-", made.path], capture_output=True, text=True, check=False)
    assert named.stdout == ""
    assert [path.name for path in (made.path / "share/hpcrl").iterdir()] == ["hpcrl-0.1.0-py3-none-any.whl"]

    # the same once more: seen, not made; an installer would fail
    again = make(prefix, interpreter, lambda stage: tiny_contents(wheels, stage), Installer("pip", ("/bin/false",)))
    assert again == InstalledEnvironment(prefix / "env", False)

    # runs may use it: another one never takes its place
    with pytest.raises(UsageError, match=r"made from other inputs \(name differ\)\n    hint: .*another --prefix"):
        make(prefix, interpreter, lambda stage: replace(tiny_contents(wheels, stage), name="other"))
    (made.path / "bin/python").unlink()
    with pytest.raises(UsageError, match=r"does not run: .*\n    hint: remove .*env"):
        make(prefix, interpreter, lambda stage: tiny_contents(wheels, stage))
    assert left_in(prefix) == ["env"]


def test_a_name_that_something_else_has_is_left_alone(tmp_path: Path, interpreter: Interpreter, wheels: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/mine").touch()
    with pytest.raises(UsageError, match=r"was not made by `hpcrl site install`.*\n    hint: name another --prefix"):
        make(tmp_path, interpreter, lambda stage: tiny_contents(wheels, stage))
    assert [path.name for path in tmp_path.rglob("*")][-1] == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "installer", "says"),
    [
        ("digest", PIP, "a wheel does not have the digest that hpcrl ships for it"),
        ("import", PIP, "import tiny_none: ModuleNotFoundError"),
        ("crash", PIP, "the interpreter ended while it imported hpcrl, tiny_one"),
        ("version", PIP, "is unavailable in the version"),
        ("nothing", NOTHING, "tiny-one is missing and not 1.0"),
        ("failure", Installer("pip", ("/bin/false",)), "false failed with exit code 1"),
    ],
)
def test_an_installation_that_fails_leaves_nothing(
    tmp_path: Path, interpreter: Interpreter, damage: str, installer: Installer, says: str
) -> None:
    wheels = tmp_path / "wheels"
    tiny_wheel(wheels, "tiny_one", code="import os; os._exit(3)\n" if damage == "crash" else "")

    def contents(stage: Stage) -> EnvironmentContents:
        found = tiny_contents(wheels, stage)
        if damage == "digest":
            tiny_wheel(wheels, "tiny_one", code="print('changed')\n")
        if damage == "version":
            return replace(found, packages=(replace(found.packages[0], version="2.0"),))
        return replace(found, imports=("hpcrl", "tiny_none")) if damage == "import" else found

    with pytest.raises(InstallFailedError) as error:
        make(tmp_path / "prefix", interpreter, contents, installer)
    assert says in str(error.value)
    assert "\n    hint: " in str(error.value)
    assert left_in(tmp_path / "prefix") == []


KILLED = """
import sys
from pathlib import Path
from hpcrl.sites.installation.environment import install
from hpcrl.sites.installation.installers import Installer
from hpcrl.sites.installation.interpreters import ask_interpreter, own_interpreter
from tiny_wheels import tiny_contents
prefix, wheels, script = map(Path, sys.argv[1:])
install(prefix, "env", ask_interpreter(own_interpreter()), Installer("pip", (str(script),)),
        lambda stage: tiny_contents(wheels, stage), say=print)
"""


def test_what_a_killed_installation_left_is_cleared_away(
    tmp_path: Path, interpreter: Interpreter, wheels: Path
) -> None:
    prefix, script = tmp_path / "prefix", tmp_path / "installer"
    script.write_text(
        f'#!/bin/sh\necho $$ > "{tmp_path}/pid.new"\nmv "{tmp_path}/pid.new" "{tmp_path}/pid"\nexec sleep 600\n'
    )
    script.chmod(0o755)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    words = [sys.executable, "-c", KILLED, str(prefix), str(wheels), str(script)]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL) as process:
        wait_for((tmp_path / "pid").exists, 60, "installer")
        process.send_signal(signal.SIGKILL)
    installer = int((tmp_path / "pid").read_text())
    assert len(left_in(prefix)) == 1
    assert left_in(prefix)[0].startswith(".installing-env-")
    try:
        # what it started lives and may still write: until its end nobody else works there
        with pytest.raises(
            UsageError, match=rf"is being installed now, by process {process.pid} on \S+\n    hint: wait"
        ):
            make(prefix, interpreter, lambda stage: tiny_contents(wheels, stage), NOTHING)
        assert len(left_in(prefix)) == 1
    finally:
        os.kill(installer, signal.SIGKILL)

    def free() -> bool:
        try:
            with staged(prefix, "env") as stage:
                return left_in(prefix) == [stage.root.name]
        except UsageError:
            return False

    assert wait_for(free, 60, "lock")
    assert left_in(prefix) == []


@pytest.mark.slow
def test_of_two_on_a_filesystem_without_locks_the_first_gives_the_name(
    tmp_path: Path, interpreter: Interpreter, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    other = tmp_path / ".installing-env-elsewhere-1"
    other.mkdir()
    names = iter(["node-b"])
    monkeypatch.setattr(staging, "hostname", lambda: next(names, "node"))
    faster: list[InstalledEnvironment] = []

    def verified(environment: Path, contents: EnvironmentContents) -> None:
        """While the first looks whether all is well, a second one begins and ends."""
        if environment.is_relative_to(tmp_path / f".installing-env-node-b-{os.getpid()}"):
            faster.append(make(tmp_path, interpreter, lambda second: tiny_contents(wheels, second)))

    monkeypatch.setattr("hpcrl.sites.installation.environment.verify", verified)
    made = make(tmp_path, interpreter, lambda stage: tiny_contents(wheels, stage))
    assert faster == [InstalledEnvironment(tmp_path / "env", True)]
    assert made == InstalledEnvironment(tmp_path / "env", False)
    # without a lock nobody knows whose it is
    assert left_in(tmp_path) == [other.name, "env"]


def test_no_room_is_reported_before_anything_is_made(tmp_path: Path, interpreter: Interpreter, wheels: Path) -> None:
    with pytest.raises(UsageError, match=r"no room for the environment: .* bytes in .*\n    hint: make room"):
        make(tmp_path, interpreter, lambda stage: replace(tiny_contents(wheels, stage), wheel_bytes=1 << 60), NOTHING)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("prefix", ["/sys/hpcrl-test", "/dev/null/envs"])
def test_a_prefix_that_cannot_be_written_is_refused(prefix: str, interpreter: Interpreter, wheels: Path) -> None:
    with pytest.raises(UsageError, match=rf"--prefix {prefix}: .*\n    hint: name a directory that you may write"):
        make(Path(prefix), interpreter, lambda stage: tiny_contents(wheels, stage), NOTHING)


@pytest.mark.slow
def test_without_a_network_the_bundle_is_named(
    tmp_path: Path, interpreter: Interpreter, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    closed = "http://127.0.0.1:9/simple"
    for name, value in (("CONFIG_FILE", os.devnull), ("INDEX_URL", closed), ("RETRIES", "1"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(InstallFailedError, match=r"no package index answers") as error:
        make(tmp_path, interpreter, lambda stage: replace(tiny_contents(wheels, stage), wheels=None))
    assert "hpcrl site bundle -o FILE.tar" in str(error.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([[3, 9, 2], "cpython", "linux", "x86_64", ["glibc", "2.36"]], r"needs Python 3\.11 or newer, .* is 3\.9\.2"),
        ([[3, 11, 2], "pypy", "linux", "x86_64", ["glibc", "2.36"]], "is pypy"),
        ([[3, 11, 2], "cpython", "darwin", "arm64", ["", ""]], "runs on darwin"),
        ([[3, 11, 2], "cpython", "linux", "x86_64", ["", ""]], r"need glibc 2\.34 or newer, .* another C library"),
        ([[3, 11, 2], "cpython", "linux", "x86_64", ["glibc", "2.28"]], r"runs on glibc 2\.28"),
        ("no Python at all", "is not a Python"),
        (None, "cannot be run"),
    ],
)
def test_an_interpreter_that_will_not_do_is_refused(tmp_path: Path, answer: object, says: str) -> None:
    python = tmp_path / "python"
    if answer is not None:
        text = answer if isinstance(answer, str) else json.dumps([*list(answer), "/p/python", "/p", True])  # type: ignore[call-overload]
        python.write_text(f"#!/bin/sh\necho '{text}'\n")
        python.chmod(0o755)
    with pytest.raises(UsageError, match=says) as error:
        ask_interpreter(str(python))
    assert "\n    hint: " in str(error.value)


def test_an_interpreter_without_venv_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    answer = json.dumps([[3, 11, 2], "cpython", "linux", "x86_64", ["glibc", "2.36"], "/p/python", "/p", False])
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    with pytest.raises(UsageError, match="has no module venv"):
        ask_interpreter(str(python))


@pytest.mark.parametrize("role", ["login", "env", "trainer", "vllm"])
def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    prefix = tmp_path / "envs"
    monkeypatch.setattr(sys, "argv", ["hpcrl", "site", "install", "--role", role, "--prefix", str(prefix), "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    out, err = capsys.readouterr()
    python = f"{prefix}/{role}/bin/python"
    assert (
        out.strip()
        == {
            "login": f"# no key of a profile: people on login nodes call {prefix}/login/bin/hpcrl",
            "env": f'python_by_role: {{orchestrator: "{python}"}}',
            "trainer": f'python_by_role: {{trainer: "{python}", orchestrator: "{python}"}}'
            "  # with backend: embedded also engine",
            "vllm": f'vllm_python: "{python}"',
        }[role]
    )
    assert f"{prefix}/{role} would be made" in err
    assert not prefix.exists()


def test_pip_gets_only_index_settings_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that would install elsewhere are dropped, mirrors and caches are not; a bundle asks none of them."""
    script = tmp_path / "installer"
    script.write_text(f'#!/bin/sh\nenv > "{tmp_path}/env"\n')
    script.chmod(0o755)
    for name in ("PIP_TARGET", "PIP_USER", "PYTHONPATH", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "given")
    for offline, kept in ((False, {"PIP_INDEX_URL"}), (True, set())):
        run_installer([str(script)], scratch=tmp_path, offline=offline)
        lines = (tmp_path / "env").read_text().splitlines()
        assert {line.split("=")[0] for line in lines if line.endswith("=given")} == kept
        assert f"TMPDIR={tmp_path}" in lines


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            "no room",
            "--prefix",
        ),
        ("error: failed to write to file: Disk quota exceeded (os error 122)", "no room", "UV_CACHE_DIR"),
        ("error: Hash mismatch for `six==1.17.0`", "not have the digest", "index or a proxy"),
        ("error: Request failed\n  cause: dns error\n  cause: no address", "no package index answers", "site bundle"),
        ("ERROR: No matching distribution found for six==9", "unavailable in the version", "platform"),
        ("something else", "env failed with exit code 7", "its output is above"),
    ],
)
def test_what_installers_say_is_explained(tmp_path: Path, words: str, says: str, hint: str) -> None:
    command = ["/usr/bin/env", "sh", "-c", 'printf "%s\\n" "$1"; exit 7', "sh", words]
    with pytest.raises(InstallFailedError) as error:
        run_installer(command, scratch=tmp_path)
    what, _, way_out = str(error.value).partition("\n    hint: ")
    assert says in what
    assert words.splitlines()[0] in what
    assert hint in way_out
    assert isinstance(error.value, HpcrlError)


def test_uv_is_taken_where_it_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_installer() == PIP
    (tmp_path / "uv").touch(mode=0o755)
    uv = find_installer()
    assert uv == Installer("uv", (str(tmp_path / "uv"), "pip"))
    for installer in (uv, PIP):
        for wheels in (None, tmp_path):
            words = installer.words(tmp_path / "python", tmp_path / "list", wheels=wheels, hashed=True)
            # exactly what the list has, each with its digest, and nothing that must be compiled
            assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(words)
            assert words[words.index("--python") + 1] == str(tmp_path / "python")
            assert ("--no-index" in words) == (wheels is not None)
            assert ("--offline" in words) == (wheels is not None and installer is uv)

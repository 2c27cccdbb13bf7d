"""Programs of ``kind: harness`` in real sandboxes: they reach the policy, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dataset_testing import questions, write_jsonl
from patience import patience

from hpcrl.config.environments import HarnessEnv
from hpcrl.network.interfaces import interface_addresses
from hpcrl.rollouts.environments import PolicyEndpoint
from hpcrl.rollouts.environments.harness import sandboxed
from hpcrl.rollouts.environments.harness.environment import HarnessEnvironment
from hpcrl.rollouts.environments.harness.program import HarnessProgramError
from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap

KEY = "secret-of-the-rollout"
ASK = """
import json, os, socket, sys, urllib.request

def ask(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.read().decode()
    except OSError as error:
        return type(error).__name__ + " " + str(error)

def reached(family, address):
    try:
        with socket.socket(family) as client:
            client.settimeout(5)
            client.connect(address)
        return True
    except OSError:
        return False
"""


class Front:
    """A policy whose endpoint answers with what it was asked, and a server that is not for programs."""

    seed = 77

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = self.other_port = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Front]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            sites = [web.TCPSite(runner, "127.0.0.1", 0) for _ in range(2)]
            for site in sites:
                await site.start()
            self.port, self.other_port = (address[1] for address in runner.addresses)
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        return web.Response(text="x" * 300_000 + request.path)

    @contextlib.asynccontextmanager
    async def endpoint(self) -> AsyncIterator[PolicyEndpoint]:
        yield PolicyEndpoint(f"http://127.0.0.1:{self.port}/r/abc/v1", KEY, "policy")


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    async with Front().serving() as made:
        yield made


@contextlib.asynccontextmanager
async def environment(path: Path, program: str, **changes: Any) -> AsyncIterator[HarnessEnvironment]:
    # not in pytest's directory, which no other user may enter, as the program of a sandbox may be
    with tempfile.TemporaryDirectory(dir="/tmp") as agent:
        Path(agent).chmod(0o755)
        (Path(agent) / "agent.py").write_text(ASK + program)
        sandbox = {"mounts": {"/agent": agent}, **changes.pop("sandbox", {})}
        made = HarnessEnvironment(
            HarnessEnv(
                name="agents",
                kind="harness",
                path=str(write_jsonl(path / "tasks.jsonl", questions(20))),
                held_out_share=0.3,
                command=("{python}", "/agent/agent.py", "{task}", "{directory}"),
                sandbox=sandbox,
                **{"time_limit_s": 60.0 * patience(), **changes},
            )
        )
        try:
            yield made
        finally:
            await made.aclose()


async def parts_of(front: Front, path: Path, program: str, **changes: Any) -> dict[str, float]:
    async with environment(path, program, **changes) as made:
        outcome = await made.rollout(made.prompt("train", 0), front)  # type: ignore[arg-type]
    return dict(outcome.parts)


async def test_the_policy_is_all_that_a_program_reaches(front: Front, tmp_path: Path) -> None:
    abstract = f"\0hpcrl-test-{os.getpid()}"
    outside = await asyncio.start_unix_server(lambda reader, writer: writer.close(), abstract)
    address = next(iter(found), None) if (found := _addresses()) else None
    program = f"""
task = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
said = ask(url + "/models", Authorization="Bearer " + key)
port = int(url.split(":")[2].split("/")[0])
parts = {{
    "policy": said.endswith("/r/abc/v1/models") and len(said) > 300000,
    "wrong_key": "401" in ask(url + "/models", Authorization="Bearer no"),
    "same_task": json.load(open(sys.argv[1]))["prompt"] == task["prompt"],
    "home": os.getcwd() == sys.argv[2] == os.environ["HOME"],
    "gateway": reached(socket.AF_INET, ("127.0.0.1", {front.port})),
    "other_server": reached(socket.AF_INET, ("127.0.0.1", {front.other_port})),
    "by_address": reached(socket.AF_INET, ({address!r}, {front.port})) if {address!r} else False,
    "abstract": reached(socket.AF_UNIX, {abstract!r}),
    "run": any(name.startswith("HPCRL") for name in os.environ),
    "written": True,
    "interfaces": len(socket.if_nameindex()),
}}
try:
    open("/harness/relay.py", "a")
except OSError:
    parts["written"] = False
print("oh", file=sys.stderr)
print(json.dumps({{"reward": 1.0, "parts": {{name: float(value) for name, value in parts.items()}}}}))
"""
    async with outside:
        parts = await parts_of(front, tmp_path, program)
    right = dict.fromkeys(("policy", "wrong_key", "same_task", "home", "interfaces"), 1.0)
    wrong = ("gateway", "other_server", "by_address", "abstract", "run", "written", "timed_out")
    assert parts == right | dict.fromkeys(wrong, 0.0)
    assert set(front.asked) == {"/r/abc/v1/models"}


async def test_the_temporary_directory_of_a_role_is_private(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run it is below one of the run, and the sandbox has another user."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hpcrl-") as run:
        scratch = Path(run) / "1-orchestrator-0"
        scratch.mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        parts = await parts_of(front, tmp_path, "print(json.dumps({'reward': 1.0}))")
        assert parts == {"timed_out": 0.0}
        assert not list(scratch.glob("hpcrl-harness-*"))
        for directory in (Path(run), scratch):
            # no list of names, and nothing to write
            assert directory.stat().st_mode & 0o077 in (0, 0o001)


async def test_no_file_of_the_node_has_the_key(front: Front, tmp_path: Path) -> None:
    """As root such a file is one for another user, and so for all."""
    program = """
places = [f"/harness/{name}" for name in ("task.json", "relay.py", "relay.json")]
files = [path for path in places if os.path.exists(path)]
held = [path for path in files if os.environ["OPENAI_API_KEY"] in open(path).read()]
print(json.dumps({"reward": 1.0, "parts": {"files": len(files), "held": len(held)}}))
"""
    assert await parts_of(front, tmp_path, program) == {"files": 2.0, "held": 0.0, "timed_out": 0.0}


def test_other_users_do_not_read_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``hpcrl env try`` has its files in ``/tmp``, where all users see their names."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    place = tmp_path / "hpcrl-harness-x"
    place.mkdir(mode=0o755)
    sandboxed._prepare(place, b"{}")
    assert not [each for each in (place, *place.iterdir()) if each.stat().st_mode & 0o077]


async def test_listed_addresses_are_forwarded(front: Front, tmp_path: Path) -> None:
    program = """
at = "http://127.0.0.1:9000/package"
dead = ask("http://127.0.0.1:9001/x")
parts = {"listed": ask(at, Authorization="Bearer KEY").endswith("/package"), "dead": not dead.startswith("x")}
print(json.dumps({"reward": 1.0, "parts": {name: float(value) for name, value in parts.items()}}))
""".replace("KEY", KEY)
    forward = {"9000": f"127.0.0.1:{front.other_port}", "9001": "127.0.0.1:9"}
    parts = await parts_of(front, tmp_path, program, sandbox={"forward": forward})
    assert parts == {"listed": 1.0, "dead": 1.0, "timed_out": 0.0}
    assert front.asked == ["/package"]


async def test_limits_and_failures(front: Front, tmp_path: Path) -> None:
    program = "print(json.dumps({'reward': 0.25}), flush=True)\nimport subprocess; subprocess.run(['sleep', '600'])\n"
    async with environment(tmp_path, program, time_limit_s=5.0 * patience()) as made:
        outcome = await made.rollout(made.prompt("train", 0), front)  # type: ignore[arg-type]
        assert (outcome.reward, outcome.parts) == (0.25, {"timed_out": 1.0})
    async with environment(tmp_path, "raise SystemExit('not today')") as made:
        with pytest.raises(HarnessProgramError, match="not today"):
            await made.rollout(made.prompt("train", 0), front)  # type: ignore[arg-type]
    async with environment(tmp_path, "held = b'x' * (1 << 28)", sandbox={"memory_gib": 0.125}) as made:
        with pytest.raises(HarnessProgramError, match=r"memory|MemoryError|exit code 137"):
            await made.rollout(made.prompt("train", 0), front)  # type: ignore[arg-type]


async def test_a_rollout_that_is_cancelled_leaves_nothing(front: Front, tmp_path: Path) -> None:
    program = "ask(os.environ['OPENAI_BASE_URL'])\nimport time; time.sleep(600)\n"
    async with environment(tmp_path, program) as made:
        running = asyncio.ensure_future(made.rollout(made.prompt("train", 0), front))  # type: ignore[arg-type]
        async with asyncio.timeout(60 * patience()):
            while not front.asked:
                await asyncio.sleep(0.02)
        assert b"agent.py" in _commands()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        async with asyncio.timeout(30 * patience()):
            while b"/agent/agent.py" in _commands():
                await asyncio.sleep(0.02)


def test_a_switch_is_the_defaults(tmp_path: Path) -> None:
    own = {"name": "a", "kind": "harness", "path": "t.jsonl", "command": ["x"]}
    made = HarnessEnv.model_validate({**own, "sandbox": True})
    assert made.sandbox is not None
    assert made.sandbox.forward == {}
    assert HarnessEnv.model_validate({**own, "sandbox": False}).sandbox is None
    assert HarnessEnv.model_validate(json.loads(made.model_dump_json())) == made


def _commands() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes()
    return found


def _addresses() -> list[str]:
    return [a for listed in interface_addresses().values() for a in listed if ":" not in a and not a.startswith("127.")]

"""The server of ``hpcrl mcp`` by the client that its library has, in this process and as a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from runs_testing import Hpcrl, make_run, write_log, write_status, write_steps

from hpcrl.mcp_server.bounded_search import search_lines
from hpcrl.mcp_server.changing import CHANGING
from hpcrl.mcp_server.reading import READING
from hpcrl.mcp_server.server import make_server
from hpcrl.mcp_server.skill import skill_text
from hpcrl.mcp_server.tool_answers import MAX_CHARACTERS
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

NAMES = [function.__name__ for function in READING]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    made = make_run(tmp_path / "runs", "night-1")
    write_steps(made, 7)
    return made


async def ask(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    (content,) = answer.content
    assert not answer.is_error, content
    return str(content.text)  # type: ignore[union-attr]


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    return str(answer.content[0].text)  # type: ignore[union-attr]


async def test_documents_are_those_of_the_commands(run: RunDir, hpcrl: Hpcrl) -> None:
    async with Client(make_server(allow_changes=False)) as client:
        for tool, command in (("show_status", "status"), ("explain_run", "why")):
            assert json.loads(await ask(client, tool, run="night-1")) == json.loads(
                hpcrl(command, "night-1", "--json")[1]
            )
        assert json.loads(await ask(client, "show_runs")) == json.loads(hpcrl("ls", "--json")[1])


async def test_runs_are_compared_as_by_the_command(run: RunDir, hpcrl: Hpcrl) -> None:
    write_steps(make_run(run.path.parent, "night-2"), 5)
    async with Client(make_server(allow_changes=False)) as client:
        found = json.loads(await ask(client, "compare_several", runs=["night-1", "night-2"]))
        assert found == json.loads(hpcrl("compare", "night-1", "night-2", "--json")[1])
        assert [each["steps"] for each in found["runs"]] == [7, 5]
        assert "needs two runs or more" in await refused(client, "compare_several", runs=["night-1"])
        unknown = await refused(client, "compare_several", runs=["night-1", "night-2"], heldout="no-set")
        assert "no run has evaluated a set 'no-set'" in unknown


async def test_tools_that_change_something_are_there_only_when_allowed() -> None:
    async with Client(make_server(allow_changes=False)) as client:
        found = (await client.list_tools()).tools
        assert [tool.name for tool in found] == NAMES
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in found)
        assert await refused(client, "submit_run", recipe="quickstart") == "Unknown tool: submit_run"
    async with Client(make_server(allow_changes=True)) as client:
        found = (await client.list_tools()).tools
        assert [tool.name for tool in found] == [*NAMES, *(function.__name__ for function in CHANGING)]
        hints = {tool.name: tool.annotations for tool in found}
        assert [name for name, hint in hints.items() if hint and hint.destructive_hint] == ["cancel_run"]


async def test_metrics_are_bounded_and_thinned(run: RunDir) -> None:
    async with Client(make_server(allow_changes=False)) as client:
        document = json.loads(await ask(client, "show_steps", run="night-1", newest=2, every=3))
        assert (document["steps_in_all"], [step["step"] for step in document["steps"]]) == (7, [4, 7])
        assert "must be from 1 to 200" in await refused(client, "show_steps", run="night-1", newest=201)
        assert "must be 1 or more" in await refused(client, "show_steps", run="night-1", every=0)


async def test_a_long_list_keeps_its_newest_entries_and_stays_a_document(run: RunDir) -> None:
    write_steps(run, 150)
    async with Client(make_server(allow_changes=False)) as client:
        text = await ask(client, "show_steps", run="night-1", newest=150)
        document = json.loads(text)
        assert len(text) <= MAX_CHARACTERS
        assert document["left_out_for_length"] == 150 - len(document["steps"])
        assert document["steps"][-1]["step"] == 150
        assert document["steps_in_all"] == 150


async def test_a_log_is_cut_at_its_old_end_and_says_so(run: RunDir) -> None:
    lines = (f"line {number} {'x' * 400} \x1b[2J\n" for number in range(900))
    write_log(run, "".join(lines), role="trainer", attempt=write_status(run, RunState.FAILED))
    async with Client(make_server(allow_changes=False)) as client:
        text = await ask(client, "search_logs", run="night-1", role="trainer", lines=900)
        head, *lines = text.splitlines()
        assert head == f"[{900 - len(lines)} older lines do not fit; ask for less]"
        assert "line 899 " in json.loads(lines[-1])["line"]
        assert len(text) <= MAX_CHARACTERS
        # no control character of a log reaches the one who reads
        assert "\x1b" not in text
        assert len((await ask(client, "search_logs", run="night-1", grep="line 8[0-9]9 ")).splitlines()) == 10
        assert "has no role ghost" in await refused(client, "search_logs", run="night-1", role="ghost")


async def test_a_search_of_logs_ends(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = write_status(run, RunState.FAILED)
    write_log(run, f"-x- {'a' * 60}!\n", role="trainer", attempt=attempt)
    async with Client(make_server(allow_changes=False)) as client:
        found = await ask(client, "search_logs", run="night-1", grep="-x- a+!")
        assert [json.loads(line)["role"] for line in found.splitlines()] == ["trainer"]
        assert "is not a regular expression" in await refused(client, "search_logs", run="night-1", grep="(")
        monkeypatch.setattr(search_lines, "__kwdefaults__", {**search_lines.__kwdefaults__, "longest_s": 5.0})
        # it would take longer than the sun lasts
        said = await refused(client, "search_logs", run="night-1", grep="(a+)+$")
        assert "the search did not end within 5 s and was stopped" in said


async def test_what_bounds_a_step_is_explained_as_by_the_command(run: RunDir, hpcrl: Hpcrl) -> None:
    async with Client(make_server(allow_changes=False)) as client:
        found = json.loads(await ask(client, "explain_slow", run="night-1"))
        assert found == json.loads(hpcrl("why", "night-1", "--slow", "--json")[1])


async def test_a_recipe_is_checked_only_where_code_may_run(run: RunDir, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "extends: quickstart\nname: mine\nenvironments:\n  - {name: e, kind: custom, factory: 'no_such_package:E'}\n"
    )
    async with Client(make_server(allow_changes=False)) as client:
        assert await refused(client, "check_recipe", recipe=str(recipe)) == "Unknown tool: check_recipe"
        assert "no_such_package" not in await ask(client, "plan_run", recipe=str(recipe))
    async with Client(make_server(allow_changes=True)) as client:
        found = json.loads(await ask(client, "check_recipe", recipe=str(recipe)))
        assert not found["starts"]
        assert any("no_such_package" in problem for problem in found["problems"])


async def test_an_error_is_that_of_the_command_line(run: RunDir, hpcrl: Hpcrl) -> None:
    async with Client(make_server(allow_changes=True)) as client:
        code, _, said = hpcrl("status", "night-2")
        assert code == 2
        assert said.strip().removeprefix("hpcrl: ") in await refused(client, "show_status", run="night-2")
        assert "is not a state" in await refused(client, "show_runs", state="SLEEPING")
        problems = await refused(client, "submit_run", recipe="quickstart", overrides={"rollouts.group_size": 5})
        assert "rollouts.rollouts_per_step" in problems
    assert [path.name for path in run.path.parent.iterdir() if not path.name.startswith(".")] == ["night-1"]


async def test_a_plan_imports_nothing_that_a_recipe_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("open('was_imported', 'w')\nclass Env: ...\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: quickstart\nname: mine\nenvironments: [{name: own, kind: custom, factory: 'theirs:Env'}]\n"
    )
    async with Client(make_server(allow_changes=False)) as client:
        planned = json.loads(await ask(client, "plan_run", recipe=str(tmp_path / "mine.yaml")))
        assert {"trainer", "engine"} <= {group["role"] for group in planned["groups"]}
        large = json.loads(await ask(client, "plan_run", recipe="qwen3_30b_a3b", cluster="h200-28"))
        assert large["verdict"]["fits"]
        assert large["step_s"] > 0
        changed = {"rollouts.group_size": 5}
        assert "multiple" in await refused(client, "plan_run", recipe="quickstart", overrides=changed)
        configurations = json.loads(await ask(client, "list_configurations"))
        assert "quickstart" in configurations["recipes"]
        assert "local" in configurations["clusters"]
    assert not (tmp_path / "was_imported").exists()


@asynccontextmanager
async def command(*words: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "hpcrl", "mcp", *words], env={**os.environ})
    async with Client(parameters) as client:
        yield client


async def test_the_command_serves_on_its_standard_streams(run: RunDir) -> None:
    async with command() as client:
        assert json.loads(await ask(client, "show_runs"))["runs"][0]["name"] == "night-1"
        assert client.instructions is not None
        assert "changes nothing" in client.instructions


def test_it_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl", "mcp"],
        input="no message\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_the_skill_names_the_tools_and_commands_that_there_are(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("mcp", "--skill")
    assert (code, out) == (0, skill_text())
    assert out.startswith("---\nname: hpcrl\n")
    assert {name for name in NAMES if f"`{name}`" not in out} == set()
    assert "`RUN/metrics/*.jsonl`" in out

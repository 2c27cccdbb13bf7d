"""A run that an agent starts, ends and resumes by the tools of ``hpcrl mcp --allow-changes``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import HPCRL, SMALL_RUN, Lab
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from patience import wait_for

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    answer = await client.call_tool(tool, arguments)
    (content,) = answer.content
    assert not answer.is_error, content
    return json.loads(content.text)  # type: ignore[union-attr]


def served(lab: Lab) -> Client:
    return Client(StdioServerParameters(command=str(HPCRL), args=["mcp", "--allow-changes"], env=lab.env))


async def test_a_run_outlives_the_server_that_started_it(lab: Lab) -> None:
    settings = {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in SMALL_RUN)}
    settings |= {"model.path": str(lab.model), "trainer.steps": 100_000}
    async with served(lab) as client:
        started = await call(client, "submit_run", recipe="quickstart", name="night", overrides=settings)
    run = RunDir(lab.runs_root / "night")
    assert started["directory"] == str(run.path)
    wait_for(lambda: lab.json("status", "night")["state"] == "RUNNING", 120.0, "the run")
    async with served(lab) as client:
        assert (await call(client, "cancel_run", run="night"))["state"] == "CANCELLED"
        assert (await call(client, "explain_run", run="night"))["cause"]["kind"] == "cancelled"
        done = (await call(client, "show_steps", run="night"))["steps_in_all"]
        resumed = await call(client, "resume_run", run="night", overrides={"trainer.steps": done + 2})
        assert resumed["run"] == "night"
    lab.complete(run)
    assert lab.json("status", "night")["attempts"] == 2

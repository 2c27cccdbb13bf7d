"""The program of docs/examples/plain_text_agent: what it asks, and the patch that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from swe_lab import PYTHON

from hpcrl.swe.diffs import apply_diff, parse_diff
from hpcrl.swe.making.exercises import write_exercises
from hpcrl.swe.task import SweTask

AGENT = Path(__file__).parents[2] / "docs/examples/plain_text_agent/agent.py"


class Policy(HTTPServer):
    """Gives one reply, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.reply = ""
        self.asked: list[dict[str, Any]] = []


class Answering(BaseHTTPRequestHandler):
    server: Policy

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        assert self.headers["Authorization"] == "Bearer key"
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"choices": [{"message": {"content": self.server.reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def policy() -> Iterator[Policy]:
    with Policy() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweTask, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("smallest") / "set"
    task = write_exercises(directory, tasks=16, seed=0, tools=b"", python=PYTHON, wrong_modules=1)[0]
    return task, json.loads((directory / "rows.jsonl").read_text().splitlines()[0])


def printed(policy: Policy, row: dict[str, Any], reply: str) -> str:
    """Return what the program prints after a reply of the policy."""
    policy.reply = reply
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["id"]}]
    url = f"http://127.0.0.1:{policy.server_address[1]}/v1"
    done = subprocess.run(
        [sys.executable, str(AGENT)],
        input=json.dumps({"messages": messages, "row": {key: row[key] for key in ("prompt", "files")}}),
        env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "OPENAI_MODEL": "policy"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_the_policy_sees_the_function_and_the_assertion_and_not_the_answer(
    policy: Policy, made: tuple[SweTask, dict[str, Any]]
) -> None:
    task, row = made
    printed(policy, row, "")
    [asked] = policy.asked
    system, question = asked["messages"]
    path = row["prompt"].removeprefix("mend ")
    assert system == {"role": "system", "content": "Be brief."}
    assert row["files"][path] in question["content"]
    assert f"assert {path.removesuffix('.py')}." in question["content"]
    [right] = [line[1:] for line in task.solution.splitlines() if line.startswith("+    return")]
    assert right.strip() not in question["content"]


@pytest.mark.parametrize("form", ["{}", "It is:\n```python\n    {}\n```\nDone.", "def f(a):\n    {}\n    return 1"])
def test_the_first_line_of_a_reply_that_returns_becomes_the_patch(
    form: str, policy: Policy, made: tuple[SweTask, dict[str, Any]]
) -> None:
    task, row = made
    [right] = [line[1:].strip() for line in task.solution.splitlines() if line.startswith("+    return")]
    patch = printed(policy, row, form.format(right))
    path = row["prompt"].removeprefix("mend ")
    texts = {path: row["files"][path]}
    assert apply_diff(parse_diff(patch), texts) == apply_diff(parse_diff(task.solution), texts)


@pytest.mark.parametrize("reply", ["", "I do not know.", "returns a", "the same"])
def test_a_reply_without_such_a_line_changes_nothing(
    reply: str, policy: Policy, made: tuple[SweTask, dict[str, Any]]
) -> None:
    _, row = made
    if reply == "the same":
        reply = row["files"][row["prompt"].removeprefix("mend ")]
    assert printed(policy, row, reply) == ""

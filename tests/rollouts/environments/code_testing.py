"""Rewards by tests, for tests: replies with programs, settings, and whether sandboxes start here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from patience import patience

from hpcrl.config.rewards import CodeReward
from hpcrl.rollouts.environments.rewards.code_check import CodeCheck
from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap

SHARE: dict[str, Any] = {"score": "share", "memory_gib": 0.25, "timeout_s": 30.0 * patience()}


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def made(**settings: Any) -> CodeReward:
    return CodeReward.model_validate({"kind": "code", "test_timeout_s": 1.0 * patience(), **settings})


def score_of(check: CodeCheck, program: str, row: dict[str, Any]) -> float:
    return round(check.score(fenced(program), "", {"name": "", **row}), 3)


def skip_without_sandboxes() -> None:
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no /usr/bin/python3")

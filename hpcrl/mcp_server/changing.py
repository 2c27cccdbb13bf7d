"""Tools that start and end runs, or run what a recipe names. Only ``hpcrl mcp --allow-changes`` has them."""

from __future__ import annotations

import threading
from typing import Any

from hpcrl import api
from hpcrl.mcp_server.tool_answers import as_document
from hpcrl.runs.lenient import finite
from hpcrl.runs.observe import RunView

_ONE_AT_A_TIME = threading.Lock()
"""An agent may call several tools at once, and each runs in a thread."""


def check_recipe(recipe: str, cluster: str = "local", overrides: dict[str, Any] | None = None) -> str:
    """Check everything that a submit checks, and start nothing: every reason that prevents a start, with its place.

    `overrides` are changes of the recipe, for example {"trainer.steps": 10}. Interpreters, packages, environments and
    checkers that the recipe names are started or imported for it: that runs their code. Tools without that: plan_run.
    """
    with _ONE_AT_A_TIME:
        planned = api.plan(recipe, cluster, overrides or {}, programs=True)
    found = {"starts": planned.starts, "problems": planned.problems, "verdict": planned.verdict.document()}
    return as_document(finite(found))


def submit_run(recipe: str, cluster: str = "local", name: str = "", overrides: dict[str, Any] | None = None) -> str:
    """Start a run of a recipe, and return its name and directory at once.

    `overrides` are changes of the recipe, for example {"trainer.steps": 10}. Whatever prevents a start is an error with
    every reason, and nothing is written then.
    """
    with _ONE_AT_A_TIME:
        run = api.submit(recipe, cluster, overrides or {}, name=name or None)
    return as_document({"run": run.name, "directory": str(run.path), "state": run.status().state})


def resume_run(run: str, overrides: dict[str, Any] | None = None) -> str:
    """Start the next attempt of a run that has ended, from its newest good checkpoint."""
    with _ONE_AT_A_TIME:
        found = api.resume(run, overrides or {})
    return as_document({"run": found.name, "directory": str(found.path), "state": found.status().state})


def cancel_run(run: str) -> str:
    """Stop a run, and return its state when it has stopped. It keeps its checkpoints and can be resumed."""
    with _ONE_AT_A_TIME:
        found = api.Run(run)
        view: RunView = found.cancel()
    return as_document({"run": found.name, "state": view.state})


CHANGING = (check_recipe, submit_run, resume_run, cancel_run)

"""Evaluation of a run that trains, by its own engines: one request, which is repeated until the result is there."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from hpcrl.errors import RunDirError, UsageError
from hpcrl.network.credentials import Credentials
from hpcrl.network.http_body import read_body
from hpcrl.runs.observe import observe
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

_POLL_S = 5.0
_LIMIT_S = 30.0
_MAX_BYTES = 64 << 20
_OWN = "without --on-engines the evaluation is a run with engines of its own"


def evaluate_on_engines(
    run: RunDir, held_out: Mapping[str, Any], *, seed: int, on_wait: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Let a run evaluate the version that its engines serve now, and wait for the result.

    The run continues training meanwhile. An evaluation whose caller has gone ends by itself, and its result is in the
    events of the run all the same.

    Parameters
    ----------
    held_out:
        Prompts and samples, as `hpcrl.config.evaluation.EvaluationSetConfig` has them.
    seed:
        Seed of samples and intervals.
    on_wait:
        Called every few seconds.

    Raises
    ------
    UsageError
        The run does not train now, cannot be reached from here, or cannot evaluate now.
    """
    # the port of a run that has ended may be another program's, which would be sent the token
    if (state := observe(run).state) is not RunState.RUNNING:
        raise UsageError(f"{run.name} does not train now, its state is {state.value}\n    hint: {_OWN}")
    attempts = run.attempts()
    try:
        address = urlsplit(Endpoints.read(run, attempts[-1]).one("orchestrator"))
        headers = Credentials.of_run(run.path, attempts[-1]).headers
    except (IndexError, KeyError, OSError, RunDirError, ValueError) as error:
        raise UsageError(f"the engines of {run.name} cannot be found: {error}\n    hint: {_OWN}") from error
    query = urlencode({"set": json.dumps(held_out), "seed": seed, "wait_s": _POLL_S})
    path = f"/dock/evaluate/{secrets.token_hex(16)}?{query}"
    while True:
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_LIMIT_S)
        try:
            connection.request("POST", path, headers=headers)
            response = connection.getresponse()
            body = read_body(response, _MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UsageError(
                f"the orchestrator of {run.name} at {address.netloc} cannot be reached: {error}\n    hint: {_OWN}"
            ) from error
        finally:
            connection.close()
        if response.status == http.client.OK:
            break
        if response.status != http.client.NO_CONTENT:
            text = body.decode(errors="replace").strip()
            raise UsageError(f"{run.name} does not evaluate now: {text}\n    hint: {_OWN}")
        on_wait()
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"the answer of the orchestrator of {run.name} cannot be read: {error}") from error

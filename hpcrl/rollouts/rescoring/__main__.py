"""``python -m hpcrl.rollouts.rescoring``: a request on the standard input, a document on the standard output.

`hpcrl.cli.rescoring` calls it with the interpreter of the orchestrator, which has the tokenizer and the environments.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter

from hpcrl.config.rewards import RewardConfig
from hpcrl.dock.ledger.replay import Held
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.evaluation.audit import AuditedReply, audit_rewards
from hpcrl.evaluation.rescored import RescoredRollout, rescored_steps
from hpcrl.processes.daemon_threads import run_process
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.rescoring.rescorer import Rescorer
from hpcrl.rollouts.rescoring.stored import StoredReplies
from hpcrl.runs.lenient import finite
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import choose_rollouts, read_ledger

_AT_ONCE = 256
"""Number of rollouts whose replies are in memory at the same time."""
_MOST_REASONS = 8


class RescoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a computation of rewards.

    Attributes
    ----------
    run:
        Directory of the run.
    rewards:
        Configurations of checkers; empty: those of the run's recipe.
    environment, state, step:
        Filters of rollouts.
    audit:
        Audit the rewards as well.
    """

    run: str
    rewards: list[dict[str, Any]] = []
    environment: str | None = None
    state: str | None = None
    step: int | None = None
    audit: bool = False


def rescore(request: RescoreRequest) -> dict[str, Any]:
    """Compute rewards again.

    Returns
    -------
    dict
        ``steps`` and ``rollouts`` (see `hpcrl.evaluation.rescored`), ``unknown`` and ``failed``: how many by reason;
        with ``audit`` also ``audit``: by environment (see `hpcrl.evaluation.audit`).

    Raises
    ------
    HpcrlError
        An environment or checker cannot be made, or the run cannot be read.
    """
    run = RunDir(Path(request.run))
    recipe = run.recipe()
    rewards = TypeAdapter(list[RewardConfig]).validate_json(msgspec.json.encode(request.rewards))
    chosen = choose_rollouts(read_ledger(run), environment=request.environment, state=request.state, step=request.step)
    chat = recipe.model.chat
    renderer = Renderer.of_model(Path(recipe.model.path), chat_format=chat.format, variables=chat.variables)
    names = {held.entry.environment for held in chosen}
    rescorer = Rescorer(recipe, StoredReplies(run, renderer), names=sorted(names), rewards=rewards)
    scored, audited = run_process(_score(rescorer, chosen))
    document: dict[str, Any] = {
        "steps": msgspec.to_builtins(rescored_steps(scored)),
        "unknown": dict(Counter(each.unknown for each in scored if each.unknown).most_common()),
        "failed": dict(Counter(_first_line(each.failed) for each in scored if each.failed).most_common(_MOST_REASONS)),
        "rollouts": [{"id": each.id, **msgspec.to_builtins(each)} for each in scored],
    }
    if request.audit:
        document["audit"] = {
            name: msgspec.to_builtins(audit_rewards(replies, rescorer.kinds.get(name, {})))
            for name, replies in sorted(audited.items())
        }
    return document


async def _score(
    rescorer: Rescorer, chosen: Sequence[Held]
) -> tuple[list[RescoredRollout], dict[str, list[AuditedReply]]]:
    scored: list[RescoredRollout] = []
    audited: dict[str, list[AuditedReply]] = {}
    try:
        for begin in range(0, len(chosen), _AT_ONCE):
            part = [(held, held.state.value) for held in chosen[begin : begin + _AT_ONCE]]
            for rollout, reply in await rescorer.score(part):
                scored.append(rollout)
                if reply is not None:
                    audited.setdefault(rollout.environment, []).append(reply)
    finally:
        await rescorer.aclose()
    return scored, audited


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def main() -> None:
    """Answer one request; an error in it is part of the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=RescoreRequest)
    answer: dict[str, Any]
    try:
        answer = rescore(request)
    except ConfigError as error:
        answer = {"findings": [{"key": f.key, "what": f.what, "hint": f.hint} for f in error.findings]}
    except HpcrlError as error:
        answer = {"error": str(error)}
    except (OSError, ValueError) as error:  # the model of the run is gone, or cannot be read
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.buffer.write(msgspec.json.encode(finite(answer)) + b"\n")


if __name__ == "__main__":
    main()

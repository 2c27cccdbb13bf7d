"""Calls to the policy from an environment in a process of its own, and the answers."""

from __future__ import annotations

import contextlib

from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import Policy


async def answered(
    call: int, message: wire.FromChild, policy: Policy, opened: contextlib.AsyncExitStack
) -> wire.ToChild | None:
    """Return the answer to what a rollout asks of the policy; None where it asks for none."""
    if isinstance(message, wire.Close):
        await opened.aclose()
        return None
    assert isinstance(message, wire.Say | wire.Open)
    try:
        if isinstance(message, wire.Open):
            endpoint = await opened.enter_async_context(policy.endpoint())
            return wire.Opened(call, endpoint.url, endpoint.key, endpoint.model)
        if not message.anew and message.within is None:
            return wire.Said.of(call, await policy.reply(message.messages))
        return wire.Said.of(call, await policy.reply(message.messages, anew=message.anew, within=message.within))
    except (ValueError, NotImplementedError) as error:
        return wire.Refused(call, str(error))

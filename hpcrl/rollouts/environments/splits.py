"""Check that held-out tasks of an environment are not among its training tasks.

Otherwise held-out rewards would be meaningless.
"""

from __future__ import annotations

import threading

import msgspec

from hpcrl.rollouts.environments.base import Environment, Split

_LOOKED_AT = 32
"""Number of compared tasks of each split."""
_LONGEST_S = 5.0
"""Maximum time in seconds for prompts to be compared; the result is only a note."""


def shared_tasks(environment: Environment) -> str:
    """Return a note that held-out prompts are training prompts as well; empty where that is not found."""
    seen: dict[Split, list[bytes]] = {"train": [], "heldout": []}
    # in a thread, which can be abandoned: a prompt may take arbitrarily long
    looking = threading.Thread(target=_look, args=(environment, seen), daemon=True)
    looking.start()
    looking.join(_LONGEST_S)
    train, held_out = set(seen["train"]), list(seen["heldout"])
    shared = sum(each in train for each in held_out)
    if not shared:
        return ""
    return (
        f"{shared} of the first {len(held_out)} held-out prompts are training prompts as well: "
        "its held-out reward is that of tasks it was trained on"
    )


def _look(environment: Environment, seen: dict[Split, list[bytes]]) -> None:
    """Collect prompts of both splits, one after the other."""
    try:
        for index in range(_LOOKED_AT):
            for split, found in seen.items():
                messages = environment.prompt(split, index).messages
                found.append(msgspec.json.encode([dict(message) for message in messages]))
    except Exception:  # noqa: BLE001 - foreign code: that it fails is found where its prompts are needed
        return

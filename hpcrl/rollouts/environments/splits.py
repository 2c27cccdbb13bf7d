"""Whether held-out tasks of an environment are tasks of its training: then a held-out reward says nothing new."""

from __future__ import annotations

import threading

import msgspec

from hpcrl.rollouts.environments.base import Environment, Split

__all__ = ["shared_tasks"]

_LOOKED_AT = 32
"""Tasks of each split that are compared."""
_LONGEST_S = 5.0
"""Prompts that take longer are not looked at: this is a note, and no reason to wait."""


def shared_tasks(environment: Environment) -> str:
    """Say that held-out prompts are training prompts as well; empty where they are not, or where that is not seen."""
    seen: dict[Split, list[bytes]] = {"train": [], "heldout": []}
    # a prompt may take as long as it likes, and a thread can be left behind
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

"""Rewards of a user's own, good and bad."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any


def shared_words(reply: str, answer: str, row: dict[str, Any], *, bonus: float = 0.0) -> float:
    wanted = {*answer.split()}
    return min(1.0, len(wanted & {*reply.split()}) / len(wanted) + bonus * row["level"])


async def slowly(reply: str, answer: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0.01)
    return 0.5


def obedient(reply: str, answer: str, row: dict[str, Any]) -> Any:
    """Do what the reply says."""
    order, _, value = reply.partition(" ")
    match order:
        case "give":
            return {"nan": float("nan"), "none": None, "text": "1", "two": 2, "half": 0.5, "true": True}[value]
        case "raise":
            raise ZeroDivisionError("no tests were found")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "hang":
            child = subprocess.Popen(["sleep", "600"])
            print(f"child {child.pid}", flush=True)
            with open(value, "w") as stream:
                stream.write(str(child.pid))
            time.sleep(600)
        case "pid":
            return float(os.getpid())
    return 0.0


NUMBER = 1

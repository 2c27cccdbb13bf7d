"""Entries of a ledger of rollouts for its tests: only what a test is about differs."""

from __future__ import annotations

from typing import Any

from hpcrl.dock.ledger.entries import Begin, Finished, PayloadPlace

NOWHERE = PayloadPlace("000001-000001.columns", 0, 1, "")


def finished(group: int, member: int, *, version: int = 0, last: int | None = None, place: Any = NOWHERE) -> Finished:
    return Finished(
        group=group,
        member=member,
        environment="words",
        prompt_index=5,
        reward=1.0,
        tokens=8,
        sampled_tokens=4,
        first_version=version,
        last_version=version if last is None else last,
        ended_s=1.0,
        payload=place,
    )


def begin(restored: int = 0, attempt: int = 1) -> Begin:
    return Begin(attempt=attempt, restored=restored, time_s=0.0, believed={})

"""JSON with any damage, by a seed: for tests of what reads it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any


def values(rng: random.Random, old: Any) -> Any:
    number = rng.choice([0, 1, -1, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(2**63), 1e308, -0.5, 3])
    others: list[Any] = [None, True, "", "x" * 3000, "\0", "../..", "v000001", "int64", [], {}, [1], {"a": 1}, [[]] * 3]
    if isinstance(old, int) and rng.random() < 0.5:
        return old + rng.choice([-1, 1, 8, -8, 4096])
    if isinstance(old, list) and rng.random() < 0.5:
        return [*old, *old, number][rng.randrange(2) :]
    return rng.choice([number, *others])


def places(document: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*way, key)
        yield from places(value, (*way, key))


def damaged(rng: random.Random, text: bytes) -> bytes:
    """One of: fields with other values, without some, with others; bits that are flipped; a part; nesting."""
    kind = rng.random()
    if kind < 0.15:
        data = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if kind < 0.2:
        return text[: rng.randrange(len(text))]
    if kind < 0.22:
        return b'{"format_version":2,"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    document = copy.deepcopy(json.loads(text))
    for _ in range(rng.randint(1, 3)):
        way = rng.choice(list(places(document)))
        place = document
        for key in way[:-1]:
            place = place[key]
        if isinstance(place, dict) and rng.random() < 0.2:
            place[rng.choice(["new", "", "../x", "a\0", "t.0"])] = place.pop(way[-1])
        elif rng.random() < 0.15:
            del place[way[-1]]
        else:
            place[way[-1]] = values(rng, place[way[-1]])
    return json.dumps(document).encode()

"""How old a group that runs is: by the oldest first token of all its members, those that have finished as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.rollouts.sampling.scheduler import _Running


def of(*versions: int | None) -> list[Any]:
    return [SimpleNamespace(first_version=version) for version in versions]


@pytest.mark.parametrize(
    ("talking", "finished", "version"),
    [
        ((), (), None),
        ((None, None), (), None),
        ((5, 3, None, 4), (), 3),
        ((5, None), (2, 6), 2),
        ((1,), (2,), 1),
        ((0, 7), (), 0),
    ],
)
def test_the_oldest_first_token_counts(
    talking: tuple[int | None, ...], finished: tuple[int, ...], version: int | None
) -> None:
    none = cast(Any, None)
    running = _Running(none, none, none, conversations=of(*talking), rollouts=of(*finished))
    assert running.version == version

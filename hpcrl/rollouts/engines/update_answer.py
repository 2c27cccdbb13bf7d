"""Check an engine's answer to a request to load a version, before the version counts as served."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hpcrl.rollouts.engines.errors import EngineProtocolError

_MAX_REASON = 1 << 16


class _Skipped(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=0)]
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


class _UpdateAnswer(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET
    skipped: list[_Skipped] = []


def check_update_answer(engine: str, answer: dict[str, Any], *, asked: int) -> dict[str, Any]:
    """Return the answer of ``/update_weights`` to a request for version ``asked``, unchanged.

    Raises
    ------
    EngineProtocolError
        It is damaged, or names another version than ``asked``.
    """
    try:
        found = msgspec.convert(answer, _UpdateAnswer)
        if found.version is not msgspec.UNSET and found.version > asked:
            raise ValueError(f"it has loaded version {found.version} instead of {asked}")
    except (ValueError, RecursionError) as error:
        raise EngineProtocolError(f"{engine}: its answer to a weight update cannot be used: {error}") from error
    return answer

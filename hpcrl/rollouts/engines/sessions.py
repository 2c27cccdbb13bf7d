"""The rollouts of one group on one engine, and their move to another engine."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.rollouts.engines.engine import Engine

__all__ = ["EngineSession"]


class EngineSession:
    """The rollouts of one group: they stay on one engine, where their common prefix is.

    Attributes
    ----------
    key:
        Sent as ``x-session-id``, for routers.
    """

    def __init__(self, least_loaded: Callable[[Engine | None], Engine], key: str, rollouts: int) -> None:
        """Choose an engine by ``least_loaded``, which is told of the engine that failed (None: of none)."""
        self.key, self._least_loaded, self._rollouts = key, least_loaded, rollouts
        self.engine = least_loaded(None)
        self.engine.assign(rollouts)

    def move_from(self, failed: Engine) -> None:
        """Go to another engine, unless another rollout of the group has done so already."""
        if self.engine is failed:
            failed.assign(-self._rollouts)
            self.engine = self._least_loaded(failed)
            self.engine.assign(self._rollouts)

    def leave(self) -> None:
        """One rollout has ended."""
        self._rollouts -= 1
        self.engine.assign(-1)

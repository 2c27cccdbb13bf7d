"""Sessions: the rollouts of one group on one engine, and their move to another engine."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.rollouts.engines.engine import Engine


class EngineSession:
    """Rollouts of one group: they stay on one engine, which caches their common prefix.

    Attributes
    ----------
    key:
        Sent as ``x-session-id``, for routers.
    """

    def __init__(self, least_loaded: Callable[[Engine | None], Engine], key: str, rollouts: int) -> None:
        """Choose an engine by ``least_loaded``, whose argument is the engine that failed (None: none did)."""
        self.key, self._least_loaded, self._rollouts = key, least_loaded, rollouts
        self.engine = least_loaded(None)
        self.engine.assign(rollouts)

    def move_from(self, failed: Engine) -> None:
        """Move to another engine, unless another rollout of the group has done so already."""
        if self.engine is failed:
            failed.assign(-self._rollouts)
            self.engine = self._least_loaded(failed)
            self.engine.assign(self._rollouts)

    def leave(self) -> None:
        """Remove one rollout that has ended."""
        self._rollouts -= 1
        self.engine.assign(-1)

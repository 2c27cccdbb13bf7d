"""Counts answers that cannot be used, by engine: one may be a flipped bit, several are an engine that is broken."""

from __future__ import annotations

import time

from hpcrl.rollouts.engines.engine import Engine

__all__ = ["PATIENCE_S", "SHUN_S", "Patience", "UnusableAnswers"]

_MAX_PROMPTS = 4
_WINDOW_S = 600.0
"""An engine that gives unusable answers to so many prompts within this time is started again. Answers to one prompt
count once: it may be the prompt that no engine can answer."""
SHUN_S = 10.0
"""How long nothing is sent to such an engine in any case: the supervisor needs some seconds to end its process, which
says until then that it is healthy."""
PATIENCE_S = 120.0
"""How long a request is made again and again where all that it gets cannot be used. Engines are started again
meanwhile, which may help."""


class UnusableAnswers:
    """The unusable answers of the last minutes."""

    def __init__(self) -> None:
        self._times: dict[Engine, dict[str, float]] = {}

    def note(self, engine: Engine, prompt: str) -> int:
        """Count an answer to a prompt; return how many prompts there were when these are too many, else 0.

        The count then begins anew.
        """
        now = time.monotonic()
        times = {key: at for key, at in self._times.get(engine, {}).items() if at >= now - _WINDOW_S}
        times[prompt] = now
        self._times[engine] = times
        if len(times) < _MAX_PROMPTS:
            return 0
        del self._times[engine]
        return len(times)

    def forget(self, engine: Engine) -> None:
        """An engine has left."""
        self._times.pop(engine, None)


class Patience:
    """The time that a request has from its first unusable answer on."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def lasts(self) -> bool:
        """Return whether to make the request again; the first call starts the clock."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s < PATIENCE_S

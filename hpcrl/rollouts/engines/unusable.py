"""Counts answers that cannot be used, by engine: one may be a flipped bit, several are an engine that is broken."""

from __future__ import annotations

import time

from hpcrl.rollouts.engines.engine import Engine

_MAX_PROMPTS = 4
_WINDOW_S = 600.0
"""Time in seconds within which unusable answers to several prompts cause a restart of an engine. Answers to one prompt
count once: it may be a prompt that no engine can answer."""
SHUN_S = 10.0
"""Minimum time in seconds for which such an engine gets no requests: the supervisor needs some seconds to end its
process, which reports to be healthy until then."""
PATIENCE_S = 120.0
"""Maximum time in seconds for which a request is repeated while all its answers are unusable. Restarts of engines in
this time may help."""


class UnusableAnswers:
    """Unusable answers of the last minutes, by engine."""

    def __init__(self) -> None:
        self._times: dict[Engine, dict[str, float]] = {}

    def note(self, engine: Engine, prompt: str) -> int:
        """Count an answer to a prompt; return how many prompts there were when these are too many, else 0.

        The count then restarts at 0.
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
        """Forget the counts of an engine that has left."""
        self._times.pop(engine, None)


class Patience:
    """Time limit of a request, from its first unusable answer on."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def lasts(self) -> bool:
        """Return whether to make the request again; the first call starts the clock."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s < PATIENCE_S

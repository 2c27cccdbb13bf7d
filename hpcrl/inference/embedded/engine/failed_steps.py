"""Handles a step that failed, or gave numbers that are not finite: only the request that caused it fails.

`hpcrl.inference.embedded.engine.suspects` tracks suspected requests; here requests are ended and requeued.
"""

from __future__ import annotations

from hpcrl.inference.embedded.engine.outputs import OutputCollector
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.scheduler import Scheduler
from hpcrl.inference.embedded.engine.suspects import Suspects


class FailedSteps:
    """Ends the requests that make steps fail. Used on the model thread only."""

    def __init__(self, scheduler: Scheduler, rows: Rows, outputs: OutputCollector) -> None:
        self._scheduler, self._rows, self._outputs = scheduler, rows, outputs
        self._suspects = Suspects()

    @property
    def alone(self) -> EngineRequest | None:
        """Return the request that has to run alone in the next step; None if all may run."""
        return self._suspects.current

    def isolate(self, error: Exception) -> bool:
        """Fail the one request of a failed step, or suspect all of several.

        Returns
        -------
        bool
            False where nothing was done: too many steps failed for any one request to be the reason.
        """
        suspects = list(self._scheduler.requests_running())
        if self._suspects.failed() or not suspects:
            return False
        if len(suspects) > 1:
            self._scheduler.preempt_all()
            self._suspects.begin(suspects)
        else:
            self._suspects.found()
            self._outputs.fail(suspects[0], error)
        return True

    def step_worked(self, alone: EngineRequest | None) -> None:
        """Note a step that did not fail.

        A request that ran ``alone`` in it may run with others once it has shown that it works.
        """
        if alone is not None and self._suspects.passes(self._rows.known_tokens(alone)):
            self._scheduler.put_back(alone)

    def token_sampled(self) -> None:
        """Note that a token was sampled."""
        self._suspects.worked()

    def end_broken(self, requests: list[EngineRequest]) -> None:
        """End the sequence for which the model gives no numbers; of several in a step, find out which that is.

        Zero times NaN is NaN: layers that compute more than they use carry it from one sequence of a step to others.

        Raises
        ------
        ArithmeticError
            Several failed one after the other: the engine is broken.
        """
        error = ArithmeticError(
            "the engine is broken: logits of its model are not finite, because its weights are not, or overflow"
        )
        for request in requests:
            self._scheduler.distrust(request)
        if len(requests) == 1:
            self._suspects.found()
            self._outputs.fail(requests[0], error)
        else:
            self._scheduler.preempt_all()
            self._suspects.begin(requests)
        if self._suspects.failed():
            raise error

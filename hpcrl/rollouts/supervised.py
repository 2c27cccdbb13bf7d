"""Interface to the supervisor that the orchestrator needs: restarts of engines and of a router, and their times."""

from __future__ import annotations

import time
from collections.abc import Collection

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.runs.clocks import own_node
from hpcrl.runs.role import Complaint, RoleContext, write_left_out
from hpcrl.runs.status import RunStatus

_ROUTER = "router", 0


class Supervised:
    """Interface to the supervisor of the other parts of an attempt."""

    def __init__(self, context: RoleContext) -> None:
        self._run, self._attempt = context.run, context.attempt

    def restart_engine(self, engine: Engine, why: str) -> None:
        """Ask for another process of an engine; ``why`` ends a sentence that begins with the replica.

        The router, which stands for the engines behind it, is one of them here.
        """
        if engine.name == _ROUTER[0]:
            self.restart_router(why)
            return
        role, _, replica = engine.name.rpartition("-")
        self._restart(role, int(replica), why)

    def replace_engine(self, engine: Engine, why: str) -> None:
        """Ask for another process of an engine that computes with wrong weights, as `restart_engine`."""
        role, _, replica = engine.name.rpartition("-")
        self._restart(role, int(replica), why, wrong_weights=True)

    def restart_router(self, why: str) -> None:
        """Ask for another process of the router, as `restart_engine`."""
        self._restart(*_ROUTER, why)

    def leave_out(self, engines: Collection[str]) -> None:
        """Record the engines that the next router is started without (OSError if refused)."""
        write_left_out(self._run, self._attempt, engines)

    def restart_worker(self, replica: int, why: str) -> None:
        """Ask for another process of a worker of environments, as `restart_engine`."""
        self._restart("env", replica, why)

    def router_ready_s(self) -> float | None:
        """Return since when the router's present process is ready (`RunStatus.ready_since`)."""
        return RunStatus.ready_since(self._run, self._attempt, *_ROUTER)

    def _restart(self, role: str, replica: int, why: str, *, wrong_weights: bool = False) -> None:
        complaint = Complaint(
            time_s=time.time(),
            role=role,
            replica=replica,
            message=why,
            node=own_node(),
            wrong_weights=wrong_weights,
        )
        complaint.write(self._run, self._attempt)

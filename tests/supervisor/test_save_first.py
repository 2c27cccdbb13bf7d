"""The checkpoint before the end of an attempt that lost the node of an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from supervisor_testing import create

from hpcrl.config.layout import AttemptPolicy
from hpcrl.config.plan import Role
from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.role import save_answer_path, save_request_path
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.save_first import save_first
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

READY, FAILED = ComponentState.READY, ComponentState.FAILED


class LostEngine:
    """An attempt in which engine 0 has lost its node."""

    def __init__(self, root: Path, *, spares: bool = True, saves: bool = True) -> None:
        self.run = create(root, replicas=2, attempts=AttemptPolicy(signal_lead_s=600, saves=saves))
        self.attempt = self.run.start_attempt()
        self.board = StatusWriter(self.run, run_id="r", attempt=self.attempt)
        self.board.nodes = object() if spares else None  # type: ignore[assignment]
        self.state = AttemptState(self.board)
        plan = self.run.plan()
        self.components = [
            Component(plan.group(role), i, address=Address("127.0.0.1", 1), log="log", on_change=lambda _: None)
            for role, i in ((Role.ENGINE, 0), (Role.ENGINE, 1), (Role.TRAINER, 0))
        ]
        for component in self.components[1:]:
            component.state = READY

    async def save(self, kind: CauseKind = CauseKind.NODE_FAIL, lost: int = 0) -> None:
        cause = Cause(kind=kind, time_s=1.0, message="engine 0 was lost")
        await save_first(
            self.run,
            self.run.plan(),
            cause,
            component=self.components[lost],
            components=self.components,
            state=self.state,
            board=self.board,
        )

    async def answered(self, step: int) -> None:
        """The trainer: it saves when it is asked to."""
        while not save_request_path(self.run, self.attempt).exists():
            await asyncio.sleep(0.01)
        save_answer_path(self.run, self.attempt).write_bytes(msgspec.json.encode({"step": step}))

    def saved(self) -> list[int | None]:
        assert reports.flush(30.0, directory=self.run.path)
        return [event.data["step"] for event in read_events(self.run, kind="supervisor.saved")]


async def test_a_trainer_that_works_saves_first(tmp_path: Path) -> None:
    lost = LostEngine(tmp_path)
    await asyncio.gather(lost.save(), lost.answered(17))
    assert lost.saved() == [17]
    lost.board.close()


async def test_the_end_of_the_trainer_is_the_end_of_the_wait(tmp_path: Path) -> None:
    lost = LostEngine(tmp_path)
    waiting = asyncio.create_task(lost.save())
    while not save_request_path(lost.run, lost.attempt).exists():
        await asyncio.sleep(0.01)
    lost.state.fail(Cause(kind=CauseKind.EXIT, time_s=2.0, message="the trainer ended"))
    await asyncio.wait_for(waiting, 30)
    assert lost.saved() == [None]
    lost.board.close()


@pytest.mark.parametrize(
    "case", ["no spare nodes", "a probe", "not its node", "no other engine", "trainer starts", "the trainer's node"]
)
async def test_otherwise_none_is_asked(case: str, tmp_path: Path) -> None:
    lost = LostEngine(tmp_path, spares=case != "no spare nodes", saves=case != "a probe")
    if case == "no other engine":
        lost.components[1].state = FAILED
    if case == "trainer starts":
        lost.components[2].state = ComponentState.STARTING
    kind = CauseKind.EXIT if case == "not its node" else CauseKind.NODE_FAIL
    await asyncio.wait_for(lost.save(kind, lost=2 if case == "the trainer's node" else 0), 30)
    assert lost.saved() == []
    assert not save_request_path(lost.run, lost.attempt).exists()
    lost.board.close()

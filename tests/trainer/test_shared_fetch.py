"""Which trainers have their ranks share what they fetch: those with context-parallel ranks on one node."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from trainer_testing import Rollouts, StubDock, make_recipe, run_ranks, start_attempt, write_model_dir, write_recipe

from hpcrl.config.recipe import Recipe
from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.wire import MicroBatch, ReferencedShard, Sample, encode_shard
from hpcrl.runs.events import read_events
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.loop import _sharing, train

STEPS, COUNT = 2, 6


def recipe_of(memory: Path | None, *, cp: int = 2, **warehouse: Any) -> Recipe:
    recipe = make_recipe(Path("model"), steps=STEPS, parallelism={"cp": cp})
    settings = {"directory": None if memory is None else str(memory), **warehouse}
    config = recipe.rollouts.warehouse.model_copy(update=settings)
    return recipe.model_copy(update={"rollouts": recipe.rollouts.model_copy(update={"warehouse": config})})


@pytest.mark.parametrize(
    ("cp", "ranks_of_node", "backend", "shared"),
    [
        (2, "8", "embedded", True),
        (4, "2", "embedded", True),
        (1, "8", "embedded", False),  # each rank has rollouts of its own
        (2, "1", "embedded", False),  # the others of its group are on other nodes
        (2, "", "embedded", False),  # nobody has started several
        (2, "8", "mooncake", False),
    ],
)
def test_ranks_share_where_a_node_has_several_of_one_group(
    monkeypatch: pytest.MonkeyPatch, cp: int, ranks_of_node: str, backend: str, shared: bool
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_of_node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_node)
    assert (_sharing(recipe_of(Path("memory"), cp=cp, backend=backend)) is not None) == shared
    assert _sharing(recipe_of(None, cp=cp, backend=backend)) is None


def test_what_is_shared_lies_where_the_recipe_says_and_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (tmp_path / "memory").mkdir()
    place = PayloadWriter(tmp_path, 1).write([[bytes(1 << 20)]])[0]
    for limit_gib, fits in ((1.5 / 1024, True), (0.5 / 1024, False)):
        sharing = _sharing(recipe_of(tmp_path / "memory", limit_gib=limit_gib))
        assert sharing is not None
        blocks = sharing.of(Location("/elsewhere/warehouse"), "token", 1)
        assert blocks is not None
        assert blocks.directory.parent == tmp_path / "memory"
        if fits:
            assert blocks.read(place, lambda place, memory: None).block.nbytes == 1 << 20
        else:
            with pytest.raises(OSError, match="would take more than"):
                blocks.read(place, lambda place, memory: None)
        sharing.close()


class ReferringDock(StubDock):
    """Hands out rollouts by reference: columns are on disk, and in the memory of a node that cannot be reached."""

    def __init__(self, directory: Path) -> None:
        super().__init__(rollouts_per_step=COUNT)
        directory.mkdir()
        self._directory, self._made = directory, dict[int, list[Sample]]()
        self._writer, self._lock = PayloadWriter(directory, 1), threading.Lock()

    def encoded(self, step: int, rank: int, world_size: int) -> bytes:
        whole = Rollouts(step, count=self.rollouts_per_step)
        with self._lock:  # ranks ask at the same time
            if step not in self._made:
                self._made[step] = [self._stored(step, i, rollout) for i, rollout in enumerate(whole.rollouts)]
        samples = self._made[step][rank::world_size]
        shard = ReferencedShard(
            step=step,
            rank=rank,
            world_size=world_size,
            micro_batches=[samples[::2], samples[1::2]],
            stats=whole.shard(rank, world_size).stats,
            location=Location("/elsewhere/warehouse"),
            payload_dir=str(self._directory),
        )
        return encode_shard(shard)

    def _stored(self, step: int, member: int, rollout: MicroBatch) -> Sample:
        arrays = {
            "token_ids": rollout.token_ids,
            "sampled": rollout.loss_mask,
            "logprobs": rollout.logprobs,
            "versions": rollout.versions,
        }
        place = self._writer.write([encode_columns(b"", arrays)])[0]
        return Sample(step, member, len(rollout.token_ids), float(rollout.advantages.max()), place)


def rank_train(rank: int, run: Path, attempt: int, ranks_of_node: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", ranks_of_node)
        train(RoleContext(RunDir(run), attempt=attempt, role="trainer", replica=0, rank=rank))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks_of_node", "times"), [("2", 1), ("1", 2)])
def test_context_parallel_ranks_of_a_node_read_each_rollout_once(
    tmp_path: Path, ranks_of_node: str, times: int
) -> None:
    """The whole trainer: its two ranks on one node, or each on a node of its own."""
    model_dir, memory, run = write_model_dir(tmp_path / "model"), tmp_path / "memory", RunDir(tmp_path / "run")
    memory.mkdir()
    recipe = recipe_of(memory)
    write_recipe(run, recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(model_dir)})}))
    with ReferringDock(tmp_path / "payload").serving() as dock:
        run_ranks(2, rank_train, run.path, start_attempt(run, dock).attempt, ranks_of_node)
    read = [event.data["rollouts"] for event in read_events(run) if event.kind == "rollouts.read_from_disk"]
    assert sum(read) == times * STEPS * COUNT
    assert list(memory.iterdir()) == []

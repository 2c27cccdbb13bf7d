"""What the planner knows of Muon: the matrices of the real models, their state, and the time of their iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_times_trainer import BATCH, GLM5, SHAPE, rates

from hpcrl.config.load import load_recipe
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.settings import TrainerMemory, checkpoint_term
from hpcrl.planning.memory.trainer import trainer_moments
from hpcrl.planning.muon import exchanged_parameters, muon_matrices
from hpcrl.planning.times.trainer import trainer_step


def terms(moment: str, **changes: Any) -> dict[str, int]:
    settings: dict[str, Any] = {"ranks": 96, "micro_batch_tokens": 131072, "cp": 4, "ep": 8, "muon": True}
    (ledger,) = (x for x in trainer_moments(GLM5, TrainerMemory(**{**settings, **changes})) if x.name == moment)
    return {term.name: term.value for term in ledger.terms}


def test_matrices_have_one_moment_and_the_rest_two() -> None:
    matrices = muon_matrices(GLM5).parameters
    # all but embedding, head, routers and what small there is
    assert 0.99 < matrices / GLM5.num_parameters() < 1.0
    adamw, muon = (terms("optimizer", muon=on)["optimizer state"] for on in (False, True))
    assert adamw - muon == pytest.approx(4 * matrices / 96, abs=1)
    saved = [
        checkpoint_term(GLM5, TrainerMemory(ranks=96, micro_batch_tokens=1, saves_aside=True, muon=on))
        for on in (False, True)
    ]
    assert saved[0].value - saved[1].value == pytest.approx(4 * matrices / 96, abs=1)


def test_whole_matrices_are_there_in_the_update_alone() -> None:
    # queries of all heads: 64 x 256 x 2048
    assert muon_matrices(GLM5).largest >= 64 * 256 * 2048
    assert terms("optimizer")["matrices of Muon"] == 5 * max(128 << 20, 2 * muon_matrices(GLM5).largest)
    assert "matrices of Muon" not in terms("optimizer", muon=False)
    assert "matrices of Muon" not in terms("logits")


def test_only_what_is_cut_is_exchanged() -> None:
    found = muon_matrices(GLM5)
    assert exchanged_parameters(GLM5, shards=1, ep=1) == (0, 0)
    # without expert parallelism, and where ranks have whole experts, these stay
    assert exchanged_parameters(GLM5, shards=8, ep=1) == (found.parameters - found.of_experts, 0)
    assert exchanged_parameters(GLM5, shards=64, ep=8)[1] == 0
    # 32 experts over 12 ranks
    assert exchanged_parameters(GLM5, shards=96, ep=8)[1] == pytest.approx(found.of_experts)


def test_the_step_takes_longer_by_iteration_and_exchange() -> None:
    plain, muon = (trainer_step(GLM5, replace(SHAPE, muon=on), BATCH, rates()) for on in (False, True))
    own = {term.name: term.value for term in muon.terms}
    more = own["optimizer.newton_schulz"] + own["optimizer.exchange"]
    assert plain.seconds is not None
    assert muon.seconds == pytest.approx(plain.seconds + more)
    flops = muon_matrices(GLM5).operations / 96
    assert own["optimizer.newton_schulz"] > flops / 989e12
    alone = trainer_step(
        GLM5, replace(SHAPE, muon=True, nodes=1, gpus_per_node=1, context_parallel=1, expert_parallel=1), BATCH, rates()
    )
    assert "optimizer.exchange" not in {term.name for term in alone.terms}


def test_the_recipe_says_it() -> None:
    recipe = load_recipe("quickstart", ("trainer.optimizer.kind=muon",)).value
    assert trainer_memory(recipe, device="cuda").muon
    assert not trainer_memory(load_recipe("quickstart", ()).value, device="cuda").muon

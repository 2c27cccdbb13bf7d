"""Gradients that are not finite: who is to blame, and what becomes of the step, its version and the run."""

import math
import re

import numpy as np
import pytest
import torch
from test_loop import events, run_steps, train_ranks
from trainer_testing import Rollouts, StubDock, make_recipe, run_ranks, start_attempt, write_model_dir, write_recipe

from hpcrl.config.trainer import NonFiniteConfig
from hpcrl.errors import RunFailedError
from hpcrl.modeling.blocks import local_part
from hpcrl.models.arch import load_arch
from hpcrl.runs.cause import from_record
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import sealed_path
from hpcrl.trainer.loop import train
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.nonfinite import NonFiniteGradientError, SkippedSteps, skipped_before
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

SKIP = {"action": "skip", "max_in_a_row": 2}
#: the optimizer's state in host memory stays as it was, too, and the head that finds the tokens is computed in pieces
MEMORY = {"optimizer_offload": True, "lm_head_chunk_tokens": 3, "activation_checkpointing": "full"}


#: what leaves the output of the embedding without a gradient
FROZEN_BELOW = {
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "frozen embedding": {"freeze": ["model.embed_tokens.weight"]},
    "frozen first layer": {"freeze": ["model.embed_tokens.weight", "model.layers.0.*"]},
    "head alone": {"freeze": ["model.*"]},
}


def poisoned(rollouts, *numbers, value=math.nan):
    """The engine said ``value`` for one token of each of these rollouts."""
    for number in numbers:
        rollout = rollouts.rollouts[number]
        rollout.logprobs[np.flatnonzero(rollout.loss_mask)[0]] = value
    return rollouts


class PoisonedDock(StubDock):
    """Rollout 3 of some steps is not finite: with two ranks it is one of the second."""

    steps = ()

    def shard(self, step, rank, world_size):
        rollouts = Rollouts(step, count=self.rollouts_per_step)
        return (poisoned(rollouts, 3) if step in self.steps else rollouts).shard(rank, world_size)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("nonfinite") / "model")


@pytest.fixture
def dock():
    with PoisonedDock().serving() as dock:
        yield dock


def hashes(run, version):
    return {
        name: record.xxh3_128 for name, record in HandoffStore(run.weights_dir).open(version).manifest.tensors.items()
    }


def go(run, model_dir, dock, steps, **trainer):
    write_recipe(run, make_recipe(model_dir, steps=steps, **trainer))
    train(start_attempt(run, dock))


def test_the_run_ends_and_names_the_rollout(tmp_path, model_dir, dock):
    dock.steps, run = (2,), RunDir(tmp_path / "run")
    with pytest.raises(RunFailedError) as error:
        go(run, model_dir, dock, 3)
    words = str(error.value)
    # what `hpcrl why` says of it: every line, and not where in our code it was found
    start_attempt(run, dock).record_failure(error.value)
    (record,) = FailureRecord.read_all(run, run.attempts()[-1])
    cause = from_record(record)
    assert cause.message == "trainer 0 failed: the gradient norm of step 2 is nan; the weights were left as they are"
    assert "\n".join(cause.details) in words
    assert any("embed_tokens" in line for line in cause.details)
    assert any("group 2 member 3" in line for line in cause.details)
    assert any("hint: check the engine's log" in line for line in cause.details)
    assert cause.traceback == ""
    assert "the gradient norm of step 2 is nan" in words
    assert "group 2 member 3 (the engine's log-probability of 1 tokens is not finite)\n" in words
    assert words.count("member") == 1
    assert "trainer.nonfinite.action: skip" in words
    assert HandoffStore(run.weights_dir).versions() == [0, 1]
    assert [record.step for record in read_metrics(run)] == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_has_a_version_with_the_weights_before_it(tmp_path, model_dir, dock, ranks):
    dock.steps, run = (2,), RunDir(tmp_path / "run")
    if ranks == 1:
        go(run, model_dir, dock, 4, nonfinite=SKIP)
    else:
        write_recipe(run, make_recipe(model_dir, steps=4, nonfinite=SKIP, parallelism={"ep": 2}))
        train_ranks(run, dock, 2)
    records = read_metrics(run)
    assert [record.skipped for record in records] == [False, True, False, False]
    assert records[1].nonfinite_tokens == 1
    assert (records[1].grad_norm, records[1].learning_rate) == (0.0, 0.0)
    assert all(math.isfinite(value) for r in records for value in (r.loss, r.entropy, r.mismatch_kl, r.ess))
    (skipped,) = events(run, "trainer.step_skipped")
    assert (skipped["step"], skipped["in_a_row"]) == (2, 1)
    assert "group 2 member 3 (the engine's" in skipped["what"]
    assert "embed_tokens" in skipped["what"]
    versions = [hashes(run, version) for version in range(5)]
    assert versions[1] == versions[2]
    assert versions[2] != versions[3] != versions[4]


def test_the_limit_of_skipped_steps_survives_a_restart(tmp_path, model_dir, dock):
    dock.steps, run = (3, 4, 5), RunDir(tmp_path / "run")
    go(run, model_dir, dock, 4, nonfinite=SKIP)
    assert [record.skipped for record in read_metrics(run)] == [False, False, True, True]
    with pytest.raises(RunFailedError, match="2 steps in a row were skipped already") as error:
        go(run, model_dir, dock, 6, nonfinite=SKIP)
    assert "group 5 member 3" in str(error.value)
    dock.steps = ()
    run_steps(run, model_dir, dock, 6)


def same(some, others):
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


def explain(rank, model_dir, weight=None, broken=(), **trainer):
    """What one step finds, with a poisoned weight or rollouts; weights and optimizer stay as they were."""
    with distributed(
        timeout_s=120, parallelism=make_recipe(model_dir, steps=2, **trainer).trainer.parallelism
    ) as parallel:
        recipe = make_recipe(model_dir, steps=3, **trainer)
        data = parallel.data

        def start():
            return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)

        def step(policy, number, *rollouts):
            policy.forward_backward(poisoned(Rollouts(number), *rollouts).shard(data.rank, data.size))
            return policy.optimizer_step(number)

        def weights(policy):
            return [local_part(p.detach()).clone() for p in policy.model.parameters()]

        def moments(policy):
            return [local_part(t).clone() for state in policy.optimizer.state.values() for t in state.values()]

        policy = start()
        step(policy, 1)
        if weight is not None and rank == 0:
            with torch.no_grad():
                local_part(policy.model.get_parameter(weight)).flatten()[:1] = math.inf
        before = weights(policy), moments(policy)
        with pytest.raises(NonFiniteGradientError) as error:
            step(policy, 2, *broken)
        assert same(weights(policy), before[0])
        assert same(moments(policy), before[1])
        assert all(p.grad is None for p in policy.model.parameters())
        if weight is None:
            # the next step is as if nothing had been
            other = start()
            for policy_, numbers in ((policy, (3,)), (other, (1, 3))):
                for number in numbers:
                    assert math.isfinite(step(policy_, number)[0])
            assert same(weights(policy), weights(other))
        else:
            with pytest.raises(RunFailedError, match="weights that are not finite"):
                SkippedSteps(NonFiniteConfig(action="skip")).skip(error.value)
        return error.value.found


@pytest.mark.parametrize("memory", [{}, MEMORY], ids=["plain", "memory tools"])
def test_a_poisoned_weight_is_named_and_not_skipped(model_dir, memory):
    name = "layers.0.self_attn.q_proj.weight"
    found = explain(0, model_dir, weight=name, memory=memory)
    assert found.weights == [name]
    # an infinite weight of attention spoils every rollout
    assert len(found.rollouts) == 6
    assert all("own pass" in each for each in found.rollouts)


@pytest.mark.parametrize(
    ("mesh", "trainer"),
    [
        ({"ep": 2}, {}),
        ({"cp": 2}, {}),
        ({"cp": 2, "cp_scheme": "ring"}, {}),
        ({"ep": 2}, {"memory": MEMORY}),
        ({"ep": 2}, {**FROZEN_BELOW["adapters"], "memory": MEMORY}),
        ({"cp": 2}, FROZEN_BELOW["frozen embedding"]),
    ],
)
def test_ranks_find_the_same(model_dir, mesh, trainer):
    found = run_ranks(2, explain, model_dir, broken=(1, 4), parallelism=mesh, **trainer)
    assert found[0] == found[1]
    assert sorted(each.split(" (")[0] for each in found[0].rollouts) == ["group 2 member 1", "group 2 member 4"]
    assert found[0].weights == []


def test_a_weight_of_one_rank_is_named_on_all(model_dir):
    name = "layers.1.mlp.experts.down_proj"
    found = run_ranks(2, explain, model_dir, weight=name, parallelism={"ep": 2})
    assert found[0] == found[1]
    assert found[0].weights == [name]
    # of the rollouts those that had a token for the expert
    assert found[0].rollouts


@pytest.mark.parametrize("frozen", FROZEN_BELOW)
def test_rollouts_are_named_where_the_embedding_needs_no_gradient(model_dir, frozen):
    found = explain(0, model_dir, broken=(1, 4), **FROZEN_BELOW[frozen])
    reason = "the engine's log-probability of 1 tokens is not finite"
    # in the order of the micro-batches: rollouts 0, 2, 4 and 1, 3, 5
    assert found.rollouts == [f"group 2 member {member} ({reason})" for member in (4, 1)]
    words = str(NonFiniteGradientError(2, math.nan, found))
    assert f"    rollouts: group 2 member 4 ({reason}); " in words
    assert "hint: check the engine's log" in words


def found_in(model_dir, spoil, **trainer):
    """The words about a step whose rollouts ``spoil`` has changed."""
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(
            make_recipe(model_dir, steps=1, **trainer), load_arch(model_dir), parallel, model_dir=model_dir
        )
        rollouts = Rollouts(1)
        spoil(rollouts, policy)
        tokens = policy.forward_backward(rollouts.shard()).reduce(parallel.world)
        with pytest.raises(NonFiniteGradientError) as error:
            policy.optimizer_step(1, nonfinite_tokens=tokens.nonfinite_tokens)
    return str(error.value)


def test_the_cause_names_what_was_not_finite_first_and_the_hint_fits(model_dir):
    def rewards(rollouts, policy):
        rollouts.rollouts[2].advantages[rollouts.rollouts[2].loss_mask != 0] = math.nan

    def engine(rollouts, policy):
        poisoned(rollouts, 2)

    def both(rollouts, policy):
        rewards(rollouts, policy)
        poisoned(rollouts, 3)

    def own(rollouts, policy):
        # behind attention: kernels of some processors make a finite number of scores that are not finite
        with torch.no_grad():
            local_part(policy.model.get_parameter("norm.weight")).flatten()[:1] = math.inf

    words = found_in(model_dir, rewards)
    assert "it began with: advantages, which are made of the environment's rewards\n" in words
    assert "group 1 member 2 (its advantage is not finite)" in words
    assert "hint: check the rewards of these rollouts (hpcrl rollouts show RUN GROUP/MEMBER)" in words
    assert "learning_rate" not in words
    words = found_in(model_dir, engine)
    assert "it began with: log-probabilities that the engine gave\n" in words
    assert "learning_rate" not in words
    words = found_in(model_dir, both)
    assert "rewards; log-probabilities that the engine gave\n" in words
    assert "check the rewards" in words
    assert "check the engine's log" in words
    words = found_in(model_dir, own)
    assert re.search(r"it began with: log-probabilities of \d+ tokens in the trainer's own forward pass\n", words)
    assert "hint: resume from a checkpoint before the weights were lost" in words


def test_an_input_without_a_part_in_the_loss_is_not_a_cause(model_dir):
    """Its gradient was looked at and is finite: the rollout is not named although a number of it is not."""

    def one_of_two(rollouts, policy):
        poisoned(rollouts, 2)
        own = rollouts.rollouts[3]
        # a prompt has no advantage, whatever stands in its place
        own.advantages[np.flatnonzero(own.loss_mask == 0)[0]] = math.nan

    words = found_in(model_dir, one_of_two)
    assert "group 1 member 2 (the engine's log-probability" in words
    assert "member 3" not in words
    # where no gradient was looked at, the input is all that is known
    assert "group 1 member 3 (its advantage is not finite)" in found_in(
        model_dir, one_of_two, **FROZEN_BELOW["head alone"]
    )


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({}, "rollouts: none alone; their sum is too large"),
        *((frozen, "rollouts: unknown; ") for frozen in FROZEN_BELOW.values()),
    ],
    ids=["all is trained", *FROZEN_BELOW],
)
def test_what_was_not_found_out_is_not_called_none(model_dir, trainer, words):
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=1, **trainer)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        policy.forward_backward(Rollouts(1).shard())
        *_, last = (p for p in policy.model.parameters() if p.requires_grad)
        local_part(last.grad).flatten()[0] = math.inf
        with pytest.raises(NonFiniteGradientError) as error:
            policy.optimizer_step(1)
    assert words in str(error.value)
    assert "it began with: gradients: rewards and log-probabilities are finite\n" in str(error.value)


def test_a_damaged_file_of_records_does_not_keep_a_run_from_going_on(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.metrics_dir.mkdir()
    damaged = sealed_path(run.metrics_dir / "0001.jsonl")
    damaged.write_bytes(b"no gzip, and long enough for its head and its end")
    assert skipped_before(run, 5) == 0
    (warning,) = caplog.messages
    assert warning.startswith(f"skipped steps are counted from 0: {damaged} is damaged")

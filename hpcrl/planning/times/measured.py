"""The loop from what a run measured: for machines whose hardware no profile describes, such as a laptop."""

from __future__ import annotations

from hpcrl.config.recipe import Recipe
from hpcrl.planning.calibration.calibration_file import Measured
from hpcrl.planning.ledger import Term
from hpcrl.planning.times.loop import LoopEstimate, LoopInputs, ServedRate, steady_state
from hpcrl.planning.times.terms import TimeTable
from hpcrl.planning.times.workload import RolloutPace, Workload


def measured_trainer(recipe: Recipe, measured: Measured, workload: Workload) -> TimeTable:
    """Return the trainer's step from measured seconds a token, times the tokens of a batch, divided among its ranks."""
    tokens = recipe.rollouts.rollouts_per_step * workload.mean("tokens")
    ranks = measured.trainer_ranks / recipe.trainer.ranks
    every = recipe.checkpoint.every_steps
    save = measured.checkpoint_s / every if every else 0.0
    source = f"run {measured.run}"
    return TimeTable(
        "trainer step",
        (
            Term(
                "measured.train",
                tokens * measured.train_s_per_token * ranks,
                "tokens of a batch * measured seconds a token * measured ranks / ranks",
                {"tokens": tokens, "seconds a token": measured.train_s_per_token, "source": source},
            ),
            Term("measured.optimizer", measured.optimizer_s, "median", {"source": source}),
            Term("measured.publish", measured.publish_s, "median", {"source": source}),
            Term("measured.other", measured.other_s, "median", {"source": source}),
            Term("measured.checkpoint", save, "median / steps between checkpoints", {"every": every}),
        ),
    )


def measured_loop(recipe: Recipe, measured: Measured, workload: Workload) -> LoopEstimate:
    """Return the steady state with engines that sample as fast as measured, shared by all rollouts in flight."""
    trainer = measured_trainer(recipe, measured, workload)
    sampled = workload.mean("sampled")
    rate = measured.sampled_tokens_per_s * recipe.engine.replicas / measured.engines / sampled
    unserved = workload.durations(RolloutPace(0.0, 0.0, 0.0))

    def serve(in_flight: float) -> ServedRate:
        # in addition to their own waiting, rollouts take the rest of Little's law
        token_s = max(0.0, in_flight / rate - unserved.mean) / sampled
        durations = workload.durations(RolloutPace(token_s, 0.0, 0.0))
        ending = in_flight / durations.mean if durations.mean > 0 else rate
        return ServedRate(durations, min(rate, ending), in_flight, token_s, "decode" if token_s else "waiting")

    update_s = measured.update_s
    return steady_state(
        LoopInputs.of(recipe, serve, trainer_s=trainer.known_seconds, handoff_s=update_s, load_s=update_s)
    )

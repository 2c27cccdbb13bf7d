"""Whole simulations: what must hold always, and what can be worked out by hand."""

from __future__ import annotations

import pytest
from scenes import LONG_TAIL, constant, durations, local, recipe, scenario

from hpcrl.config.load import load_cluster
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.simulation import Durations, Failures, Simulation, SimulationResult, make_scenario, simulate
from hpcrl.simulation.inputs.durations import SharingDurations
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.simulated_host import Host, SerialProcess

HARD = (
    "rollouts.max_in_flight=24",
    "engine.max_num_seqs=12",
    "evaluation.every_steps=3",
    "rollouts.zero_variance=drop",
)
HARD_ENGINE = {"step_base_s": 0.005, "step_per_sequence_s": 0.0002, "prefill_per_token_s": 0.0001, "kv_tokens": 600}


def accounted(result: SimulationResult) -> bool:
    return result.started == sum(result.outcomes.values()) + result.unfinished


def hard(*settings: str, seed: int = 0, failures: Failures | None = None) -> SimulationResult:
    return simulate(
        scenario(
            *HARD,
            *settings,
            seed=seed,
            failures=failures,
            environments=LONG_TAIL,
            engine=HARD_ENGINE,
            failed_share=0.05,
            zero_variance_share=0.2,
        )
    )


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_rollout_ends_once_within_the_bounds(bound: int, seed: int) -> None:
    result = hard(f"rollouts.max_off_policy_steps={bound}", seed=seed)
    assert result.steps > 5
    assert accounted(result)
    assert result.staleness.maximum <= bound
    assert sum(result.staleness.histogram.values()) > 0
    assert result.engine.kv_peak <= 1 + 1e-6
    assert result.unfinished <= 24 + (bound + 2) * result.rollouts_per_step
    assert result.outcomes["dropped_zero_variance"] > 0
    assert result.outcomes["dropped_environment"] > 0
    engine = result.engine
    assert engine.busy + engine.frozen + engine.idle + engine.down == pytest.approx(1.0, abs=1e-6)
    assert sum(result.phases.values()) == pytest.approx(1.0)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    assert hard() == hard()
    assert hard() != hard(seed=5)


def test_synchronous_steps_are_the_sum_of_their_phases() -> None:
    """Update, 100 tokens, judge, train: one after the other, every time."""
    result = simulate(scenario("rollouts.max_off_policy_steps=0", "rollouts.max_in_flight=16"))
    load, decode, judge, train = 0.5, 100 * 0.01, 1.0, 2.0
    assert result.step_s.p50 == pytest.approx(load + decode + judge + train, rel=0.01)
    assert result.step_s.maximum == pytest.approx(result.step_s.p50, rel=0.01)
    assert result.phases["wait_batch"] == pytest.approx((load + decode + judge) / 4.5, rel=0.01)
    assert result.staleness.maximum == 0
    assert result.dropped_share == 0


def test_asynchronous_steps_take_what_the_slower_side_takes() -> None:
    slow_trainer = simulate(scenario("rollouts.max_in_flight=64", trainer={"forward_backward_base_s": 9.5}))
    assert slow_trainer.step_s.p50 == pytest.approx(10.0, rel=0.01)
    assert slow_trainer.phases["wait_batch"] < 0.05
    # 16 rollouts in flight and in a step, each 2 s: 30 steps a minute at most
    slow_rollouts = simulate(
        scenario("rollouts.max_in_flight=16", trainer={"forward_backward_base_s": 0.0}, handoff={"load_s": constant(0)})
    )
    assert slow_rollouts.steps_per_minute < 30
    assert slow_rollouts.phases["wait_batch"] > 0.5


def test_staleness_costs_a_synchronous_loop_its_tail() -> None:
    bounds = [hard(f"rollouts.max_off_policy_steps={bound}").steps_per_minute for bound in (0, 4)]
    assert bounds[1] > 1.5 * bounds[0]


def test_more_turns_reuse_their_kv() -> None:
    """Without a limit a later turn computes only what was said since."""
    environments = {
        "*": {
            "turns": constant(4),
            "prompt_tokens": constant(100),
            "sampled_tokens": constant(1),
            "tool_s": constant(1.0),
            "said_tokens": constant(1),
        }
    }
    engine = {"step_base_s": 0.001, "prefill_per_token_s": 0.001}
    few = "rollouts.max_in_flight=8"
    wide = simulate(scenario(few, environments=environments, engine=engine))
    tight = simulate(scenario(few, environments=environments, engine={**engine, "kv_tokens": 270}))
    assert wide.rollout_s.p50 == pytest.approx(3.0, rel=0.5)
    assert tight.rollout_s.p50 > 1.1 * wide.rollout_s.p50


def test_failures_go_back_to_the_checkpoint() -> None:
    failures = Failures(mtbf_h=0.02, requeue_s=10.0)
    result = hard("checkpoint.every_steps=5", failures=failures)
    without = hard("checkpoint.every_steps=5")
    assert accounted(result)
    assert result.failures.count > 0
    assert 0 < result.failures.lost_steps <= result.failures.count * 6
    assert result.outcomes["lost_failure"] > 0
    assert result.failures.down_s <= result.failures.count * 10.0
    assert result.engine.down == pytest.approx(result.failures.down_s / result.simulated_s)
    assert result.steps < without.steps
    assert result.goodput.share < without.goodput.share
    # kept steps are a row without gaps
    simulation = Simulation(scenario(*HARD, "checkpoint.every_steps=5", failures=failures, environments=LONG_TAIL))
    simulation.run()
    assert [step.step for step in simulation.tally.steps] == list(range(1, len(simulation.tally.steps) + 1))


def test_as_many_failures_of_a_job_as_it_has_spare_nodes_wait_in_no_queue() -> None:
    without = hard("checkpoint.every_steps=5", failures=Failures(mtbf_h=0.02, requeue_s=10.0)).failures
    assert without.replaced == 0
    spared = hard("checkpoint.every_steps=5", failures=Failures(mtbf_h=0.02, requeue_s=10.0, spares=1)).failures
    # one is replaced, the next is requeued into a job that has its spare node again
    assert spared.replaced == (spared.count + 1) // 2 > 0
    assert spared.down_s == pytest.approx(10.0 * (spared.count - spared.replaced), abs=10.0)
    many = hard("checkpoint.every_steps=5", failures=Failures(mtbf_h=0.02, requeue_s=10.0, spares=1000)).failures
    assert (many.replaced, many.down_s) == (many.count, 0.0)


def test_a_run_without_checkpoints_starts_over() -> None:
    result = hard(failures=Failures(mtbf_h=0.02, requeue_s=0.0))
    assert result.checkpoints == 0
    assert accounted(result)
    assert result.failures.lost_s == pytest.approx(
        sum(failure.lost_s for failure in _simulated(Failures(mtbf_h=0.02, requeue_s=0.0)).tally.failures)
    )


def _simulated(failures: Failures) -> Simulation:
    simulation = Simulation(
        scenario(
            *HARD,
            failures=failures,
            environments=LONG_TAIL,
            engine=HARD_ENGINE,
            failed_share=0.05,
            zero_variance_share=0.2,
        )
    )
    simulation.run()
    return simulation


def test_a_recorded_trace_is_replayed() -> None:
    """Each rollout is one of those recorded, so it takes as long as that one."""
    trace = [
        {"turns": [[0.0, 10, 50], [2.0, 5, 50]], "judge_s": 1.0},
        {"turns": [[0.0, 10, 100]], "judge_s": 4.0},
    ]
    result = simulate(scenario(environments={"*": {"trace": trace}}, handoff={"load_s": constant(0.0)}))
    # both say 100 tokens in 1 s: 1 + 2 + 1, and 1 + 4
    assert result.rollout_s.p10 == pytest.approx(4.0, rel=0.02)
    assert result.rollout_s.p90 == pytest.approx(5.0, rel=0.02)
    assert result.rollout_s.mean == pytest.approx(4.5, rel=0.05)


def test_tool_slots_queue_calls() -> None:
    environments = {
        "*": {
            "turns": constant(2),
            "prompt_tokens": constant(1),
            "sampled_tokens": constant(1),
            "tool_s": constant(1.0),
            "tool_slots": 4,
        }
    }
    result = simulate(scenario("rollouts.max_off_policy_steps=0", environments=environments))
    # two environments with 4 slots each, 16 calls of 1 s
    assert result.step_s.mean >= 16 / 8


def test_shared_cpus_slow_both_sides() -> None:
    free = simulate(scenario())
    shared = simulate(scenario(sharing={"cpus": 1}))
    plenty = simulate(scenario(sharing={"cpus": 64}))
    assert shared.steps_per_minute < 0.9 * free.steps_per_minute
    # the trainer takes 2 s alone, and longer beside an engine that works
    assert shared.phases["forward_backward"] * shared.step_s.mean > 1.5
    assert plenty.steps_per_minute == pytest.approx(free.steps_per_minute, rel=0.02)


def test_shared_cpus_are_shared_equally() -> None:
    clock, done = Clock(), []
    host = Host(clock, SharingDurations(cpus=2), 1)
    for name, at_s, seconds in (("a", 0.0, 3.0), ("b", 0.0, 1.0), ("c", 1.0, 1.0), ("d", 1.0, 9.0)):
        clock.at(
            at_s, lambda job: host.run(job[1], lambda ended: done.append((ended, clock.now)), job[0]), (name, seconds)
        )
    clock.run(100.0)
    # until 1 two of them at full speed (b is done), then three on two CPUs: c takes 1.5 s; then a and d at full speed
    assert done == [("b", 1.0), ("c", 2.5), ("a", 3.5), ("d", 10.5)]


def test_a_worker_does_one_thing_after_the_other() -> None:
    clock, done = Clock(), []
    worker = SerialProcess(Host(clock, SharingDurations(cpus=8), 1))
    for name in "abc":
        worker.run(1.0, lambda ended: done.append((ended, clock.now)), name)
    clock.run(100.0)
    assert done == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_a_version_is_written_during_the_next_step() -> None:
    """2 s of work and 1 s of copying; writing hides behind both until it is longer than they are."""
    fast = {"engine": {"step_base_s": 1e-4}, "sharing": {}}
    beside = simulate(scenario(handoff={"publish_s": constant(1.0), "write_s": constant(1.5)}, **fast))
    assert beside.step_s.p50 == pytest.approx(3.0, rel=0.05)
    late = simulate(scenario(handoff={"publish_s": constant(1.0), "write_s": constant(6.0)}, **fast))
    assert late.step_s.p50 == pytest.approx(7.0, rel=0.05)
    assert late.phases["publish"] == pytest.approx(5 / 7, rel=0.05)


def test_a_synchronous_step_waits_for_the_whole_hand_off() -> None:
    none, some = (
        simulate(scenario("rollouts.max_off_policy_steps=0", handoff=change))
        for change in ({}, {"write_s": constant(1.0), "read_s": constant(2.0)})
    )
    assert some.step_s.p50 == pytest.approx(none.step_s.p50 + 3.0, rel=0.02)
    assert some.engine.frozen < none.engine.frozen


def test_a_checkpoint_counts_when_it_is_written() -> None:
    def after(**changes: object) -> Simulation:
        simulation = Simulation(scenario("checkpoint.every_steps=1", days=0.0005, trainer=changes))
        simulation.run()
        return simulation

    at_once, slow = after(), after(checkpoint_write_s=constant(6.0))
    assert at_once.trainer.checkpoint.step == at_once.trainer.step
    assert slow.trainer.checkpoint.step < slow.trainer.step
    # the next save waits for the one before
    assert slow.trainer.step < at_once.trainer.step


def test_nodes_scale_every_role() -> None:
    one, ten = (simulate(scenario(*HARD, nodes=nodes, environments=LONG_TAIL)) for nodes in (2, 20))
    assert (ten.trainer_nodes, ten.engine_nodes, ten.engines) == (10, 10, 10)
    assert ten.rollouts_per_step == 10 * one.rollouts_per_step
    assert ten.steps_per_minute == pytest.approx(one.steps_per_minute, rel=0.15)
    assert ten.engine.sampled_tokens_per_s == pytest.approx(10 * one.engine.sampled_tokens_per_s, rel=0.15)


def test_nodes_of_workers_of_environments_are_nodes_of_the_run() -> None:
    site = load_cluster("devcluster").value
    shape = recipe("environment_workers={count: 4, per_node: 2}")
    own = make_scenario(shape, site, durations(), days=0.002).size
    assert (own.nodes, own.trainer_nodes, own.engine_nodes, own.env_nodes, own.trainer_share) == (4, 1, 1, 2, 0.5)
    twice = make_scenario(shape, site, durations(), days=0.002, nodes=8)
    assert (twice.size.trainer_nodes, twice.size.engine_nodes, twice.size.env_nodes) == (2, 2, 4)
    shown = simulate(twice)
    assert (shown.nodes, shown.env_nodes) == (8, 4)
    with pytest.raises(UsageError, match=r"need 4 nodes \(1 for the trainer, 1 for engines, 2 for environments\)"):
        make_scenario(shape, site, durations(), days=0.002, nodes=5)
    beside = recipe("environment_workers={count: 4, placement: trainer_node}")
    assert make_scenario(beside, site, durations(), days=0.002).size.env_nodes == 0


def test_a_shared_node_counts_once() -> None:
    shape = ("trainer.ranks=2", "engine.placement=shared_node")
    site = load_cluster("devcluster").value
    shared = make_scenario(recipe(*shape), site, durations(), days=0.002).size
    assert (shared.nodes, shared.trainer_nodes, shared.engine_nodes, shared.gpus) == (1, 1, 1, 8)
    assert shared.trainer_share == 2 / 8
    apart = make_scenario(recipe("trainer.ranks=2"), site, durations(), days=0.002).size
    assert (apart.nodes, apart.gpus, apart.trainer_share) == (2, 16, 0.5)
    with pytest.raises(UsageError, match="which has one size"):
        make_scenario(recipe(*shape), site, durations(), days=0.002, nodes=4)
    with pytest.raises(UsageError, match="devices of their own"):
        make_scenario(recipe("engine.placement=shared_gpus"), site, durations(), days=0.002)


def test_a_sample_of_the_engines_says_the_same() -> None:
    whole = simulate(scenario(*HARD, nodes=20, environments=LONG_TAIL, sample=0))
    part = simulate(scenario(*HARD, nodes=20, environments=LONG_TAIL, sample=2))
    assert (part.engines, part.engines_simulated, part.thinning) == (10, 2, 5.0)
    assert part.steps_per_minute == pytest.approx(whole.steps_per_minute, rel=0.1)
    assert part.tokens_per_step == pytest.approx(whole.tokens_per_step, rel=0.1)
    assert part.engine.busy == pytest.approx(whole.engine.busy, abs=0.05)


def test_merged_turns_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [[0.3, 40, 20], *([[0.5, 10, 20]] * 9)]
    trace = {"*": {"trace": [{"turns": turns[:count], "judge_s": 0.5} for count in range(3, 11)]}}
    each = simulate(scenario(environments=trace))
    monkeypatch.setattr("hpcrl.simulation.inputs.scenario._MOST_VISITS", 300)
    merged = simulate(scenario(environments=trace, sample=None))
    assert (each.merged_turns, merged.thinning) == (1, 1.0)
    assert merged.merged_turns > 1
    assert merged.steps_per_minute == pytest.approx(each.steps_per_minute, rel=0.05)
    assert merged.tokens_per_step == pytest.approx(each.tokens_per_step, rel=0.05)
    assert merged.rollout_s.p50 == pytest.approx(each.rollout_s.p50, rel=0.1)


def test_a_synchronous_sample_is_warned_about() -> None:
    result = simulate(scenario("rollouts.max_off_policy_steps=0", nodes=20, sample=2))
    assert "waits for the slowest" in result.warnings[0]


def test_figures_of_the_start_alone_are_warned_about() -> None:
    few, many = (simulate(scenario(f"trainer.steps={steps}")) for steps in (3, 200))
    assert "all of them are of the start" in few.warnings[0]
    assert many.warnings == ()


def test_prefill_engines_take_the_prompts() -> None:
    swe: Recipe = recipe("engine.prefill={replicas: 2, nodes: 1}", "engine.decode={replicas: 1, nodes: 1}")
    durations = scenario(engine={"step_base_s": 0.01, "prefill_per_token_s": 0.01}).durations
    result = simulate(make_scenario(swe, local(), durations, days=0.002))
    assert result.engine_nodes == 3
    assert result.engine.prefill_busy > 0.1
    assert accounted(result)


def test_the_recipes_last_step_ends_it() -> None:
    result = simulate(scenario("trainer.steps=5"))
    assert result.steps == 5
    assert result.simulated_s < 60
    assert result.checkpoints == 1


def test_sequences_end_at_the_context_length() -> None:
    result = simulate(scenario("engine.max_model_len=64"))
    assert result.tokens_per_step == 16 * 64


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ((), {"environments": {"swe": LONG_TAIL["*"]}}, "environment 'reverse'"),
        ((), {"engine": {"kv_tokens": 100}}, "engine.max_model_len"),
    ],
)
def test_durations_that_do_not_fit_are_refused(settings: tuple[str, ...], changes: object, message: str) -> None:
    assert isinstance(changes, dict)
    with pytest.raises(UsageError, match=message):
        scenario(*settings, **changes)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 2 nodes"):
        scenario(nodes=1)
    with pytest.raises(UsageError, match="--days"):
        scenario(days=0.0)


def test_the_document_is_json() -> None:
    result = hard()
    assert SimulationResult.model_validate_json(result.model_dump_json()) == result
    assert isinstance(Durations.model_validate(scenario().durations.model_dump(mode="json")), Durations)


def test_engines_that_decode_keep_the_limits_of_their_side() -> None:
    sides = ("engine.prefill={replicas: 1, nodes: 1}", "engine.decode={replicas: 1, nodes: 1, max_num_seqs: 3}")

    def most_running(*settings: str) -> float:
        simulation = Simulation(scenario(*settings))
        simulation.run()
        return max(sample.running for sample in simulation.tally.kv)

    assert most_running(*sides) == 3
    assert most_running() > 3


@pytest.mark.parametrize("days", [float("nan"), float("inf"), 0.0, -1.0, 367.0])
def test_times_that_no_run_has_are_refused(days: float) -> None:
    with pytest.raises(UsageError, match=r"--days .*above 0, up to 366"):
        scenario(days=days)


def test_a_size_that_whole_replicas_cannot_have_is_refused_with_those_that_they_can() -> None:
    wide = ("trainer.nodes=12", "engine.prefill={replicas: 4, nodes: 2}", "engine.decode={replicas: 1, nodes: 8}")
    with pytest.raises(
        UsageError, match=r"(?s)need 14 nodes \(4 for the trainer, 10 for engines\).*--nodes 24"
    ) as caught:
        scenario(*wide, nodes=10)
    assert "10" in str(caught.value)
    for nodes in (24, 28, 56):
        assert scenario(*wide, nodes=nodes).size.nodes == nodes
    # a little beside it is simulated, and said by the command
    assert scenario(*wide, nodes=29).size.nodes == 28
    with pytest.raises(UsageError, match="up to 1,000,000 are simulated"):
        scenario(*wide, nodes=10**8)


def test_of_very_many_nodes_a_sample_is_simulated_however_short_the_time() -> None:
    short = scenario(days=1e-4, nodes=500_000, sample=None)
    assert short.thinning > 1
    assert short.max_in_flight < 1_000_000


def test_a_side_waits_what_a_step_takes_longer_than_it_alone() -> None:
    # 16 rollouts of 2 s, all in flight at once, and a trainer of 2 s: engines alone need about 2 s for a step
    slow = simulate(scenario(days=0.01, trainer={"forward_backward_base_s": 7.5}))
    assert slow.step_s.mean == pytest.approx(8.0, rel=0.05)
    assert slow.engines_alone_s is not None
    assert slow.engines_wait == pytest.approx(1 - slow.engines_alone_s / slow.step_s.mean)
    # engines with as much to do and a slower trainer need as long alone, and wait for longer
    slower = simulate(scenario(days=0.01, trainer={"forward_backward_base_s": 15.5}))
    assert slower.engines_alone_s == pytest.approx(slow.engines_alone_s, rel=0.1)
    assert slower.engines_wait is not None
    assert slower.engines_wait > slow.engines_wait > 0.3
    # without a trainer to speak of, nobody waits for it
    fast = simulate(scenario(days=0.01, trainer={"forward_backward_base_s": 0.001, "optimizer_s": constant(0.0)}))
    assert fast.engines_wait == pytest.approx(0.0, abs=0.05)
    assert fast.phases["wait_batch"] > 0.9


def test_without_a_step_the_share_of_waiting_is_unknown() -> None:
    assert simulate(scenario(days=1e-6)).engines_wait is None
    few = simulate(scenario(days=0.00015))
    assert 0 < few.steps < 8
    assert few.engines_wait is None

"""A simulation from start to end: attempts one after the other, each until its node failure."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hpcrl.config.engine_shape import step_limits
from hpcrl.config.plan import Role
from hpcrl.planning.distributions import drawer
from hpcrl.simulation.inputs.scenario import Scenario
from hpcrl.simulation.inputs.workload import TrajectoryDraws
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.engine import EngineCosts, SimulatedEngine
from hpcrl.simulation.loop.records import Outcome
from hpcrl.simulation.loop.simulated_fleet import Fleet, PrefillPool
from hpcrl.simulation.loop.simulated_host import Host
from hpcrl.simulation.loop.simulated_orchestrator import SimulatedOrchestrator
from hpcrl.simulation.loop.tally import KvSample, LostTime, Tally
from hpcrl.simulation.loop.trainer import Checkpoint, SimulatedTrainer

_KV_SAMPLES = 400


class Simulation:
    """One simulated run, with its attempts.

    Attributes
    ----------
    tally:
        Counts.
    busy_s, frozen_s:
        Engine-seconds over all attempts, with work and frozen by weight updates.
    down_s:
        Seconds between a failure and the next attempt's first rollout.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Prepare the first attempt."""
        self.scenario, self.clock, self.tally = scenario, Clock(), Tally()
        self.busy_s = self.frozen_s = self.down_s = self.kv_token_s = self.kv_peak = 0.0
        self.prefill_busy_s = 0.0
        self.said_tokens = self.preemptions = 0
        # a separate random stream for each source: a failure leaves the trajectories unchanged
        self._failure_rng = Random(f"{scenario.seed}-failures")
        self._rng = Random(f"{scenario.seed}-loop")
        self._workload = TrajectoryDraws(scenario.recipe, scenario.durations, Random(f"{scenario.seed}-workload"))
        self._restart_s = drawer(scenario.durations.trainer.restart_s, self._failure_rng)
        self._read_s = drawer(scenario.durations.handoff.read_s, self._rng)
        self._load_s = drawer(scenario.durations.handoff.load_s, self._rng)
        self._spares = scenario.failures.spares
        self._next_group = 0
        self._evaluated: set[int] = set()
        self._build(Checkpoint(0, 0.0, []))

    def run(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Simulate until the horizon, or the recipe's last step.

        ``progress`` is called with the share of the time that is over.
        """
        self._progress = progress
        self._begin(None)
        self._interval_s = self.scenario.horizon_s / _KV_SAMPLES
        self.clock.at(0.0, self._observe)
        self._plan_failure()
        self.clock.run(self.scenario.horizon_s)
        self._close()

    @property
    def unfinished(self) -> int:
        """Return the number of started rollouts that have not ended."""
        return self.orchestrator.unfinished

    # -- attempts

    def _build(self, checkpoint: Checkpoint) -> None:
        scenario, clock, engine = self.scenario, self.clock, self.scenario.durations.engine
        config = scenario.recipe.engine
        # with separate engines for prompts, the engines simulated token by token decode
        limits = step_limits(config, Role.DECODE)
        host = Host(clock, scenario.durations.sharing, scenario.size.scale / scenario.thinning)
        self.trainer = SimulatedTrainer(
            clock, scenario, self.tally, self._rng, checkpoint=checkpoint, host=host, finished=self._finish
        )
        self.orchestrator = SimulatedOrchestrator(
            clock,
            scenario,
            self._workload,
            self.tally,
            self._rng,
            step=checkpoint.step,
            finished=checkpoint.finished,
            next_index=self._next_group,
            host=host,
            batch_ready=self.trainer.batch_ready,
        )
        pool = None
        if scenario.prefill_engines:
            pool = PrefillPool(
                clock,
                servers=scenario.prefill_engines,
                per_token_s=engine.prefill_per_token_s,
                per_request_s=engine.prefill_request_s,
            )
        costs = EngineCosts(
            base_s=engine.step_base_s,
            per_sequence_s=engine.step_per_sequence_s,
            per_kv_token_s=engine.step_per_kv_token_s,
            prefill_per_token_s=engine.prefill_per_token_s,
            max_num_seqs=limits.max_num_seqs * engine.ranks,
            batch_tokens=limits.max_num_batched_tokens * engine.ranks,
            kv_tokens=float("inf") if engine.kv_tokens is None else float(engine.kv_tokens),
        )
        engines = [
            SimulatedEngine(
                index,
                clock,
                costs,
                replied=self.orchestrator.replied,
                first_token=self.orchestrator.first_token,
                works=host.engine_works if host.shared else None,
            )
            for index in range(scenario.engines)
        ]
        self.pool = pool
        self.fleet = Fleet(
            clock,
            engines,
            read_s=self._read_s,
            load_s=self._load_s,
            host=host,
            pause=config.pause == "keep",
            served=self._served,
            ungate=self.orchestrator.ungate,
            prefill=pool,
            version=checkpoint.step,
        )
        self.orchestrator.attach(self.fleet)
        host.attach(self.fleet.set_speed)

    def _begin(self, _: object) -> None:
        """Begin rollouts and training, with an exact evaluation where the recipe wants one."""
        step = self.trainer.step
        if self._evaluation_due(step):
            self.fleet.hold(lambda: self.orchestrator.evaluate(self.fleet.unhold))
        self.orchestrator.admit()
        self.trainer.start(self.orchestrator, self.fleet)

    def _served(self, version: int) -> None:
        self.orchestrator.serve(version)
        if self._evaluation_due(version) and not self.orchestrator.evaluating:
            self.orchestrator.evaluate(lambda: None)

    def _evaluation_due(self, version: int) -> bool:
        every = self.scenario.recipe.evaluation.every_steps
        wanted = version == 0 or (every > 0 and version % every == 0)
        if not wanted or version in self._evaluated:
            return False
        self._evaluated.add(version)
        return True

    def _finish(self) -> None:
        self.clock.stopped = True

    # -- failures

    def _plan_failure(self) -> None:
        mtbf_h = self.scenario.failures.mtbf_h
        if mtbf_h is not None:
            rate = self.scenario.size.nodes / (mtbf_h * 3600.0)
            self.clock.after(self._failure_rng.expovariate(rate), self._fail)

    def _fail(self, _: object) -> None:
        """Fail a node: the attempt ends, and the next one begins at the last checkpoint."""
        now, checkpoint = self.clock.now, self.trainer.checkpoint
        failures = self.scenario.failures
        # a requeued job has all of its spare nodes again
        replaced = self._spares > 0
        self._spares = self._spares - 1 if replaced else failures.spares
        down_s = (0.0 if replaced else failures.requeue_s) + self._restart_s()
        lost_steps = self.trainer.step - checkpoint.step
        self.tally.failures.append(LostTime(now, lost_steps, now - checkpoint.time_s, down_s, replaced))
        self._close()
        self.orchestrator.lose()
        for group in [group for groups in self.trainer.consumed.values() for group in groups]:
            self.tally.end_group(group, Outcome.LOST_FAILURE)
        for group in checkpoint.finished:
            self.tally.end_group(group, None)
        self.tally.steps = [step for step in self.tally.steps if step.step <= checkpoint.step]
        self.clock.forget()
        self._next_group = self.orchestrator.next_index
        self._build(checkpoint)
        self.down_s += min(down_s, self.scenario.horizon_s - now)
        self.clock.after(down_s, self._restart)
        self.clock.after(self._interval_s, self._observe)

    def _restart(self, _: object) -> None:
        self._begin(None)
        self._plan_failure()

    # -- measurements

    def _close(self) -> None:
        """Add up what the engines of this attempt measured."""
        for engine in self.fleet.engines:
            engine.settle()
            self.busy_s += engine.busy_s
            self.frozen_s += engine.frozen_s
            self.kv_token_s += engine.kv_token_s
            self.kv_peak = max(self.kv_peak, engine.kv_peak)
            self.said_tokens += engine.said_tokens
            self.preemptions += engine.preemptions
        if self.pool is not None:
            self.prefill_busy_s += self.pool.busy_s

    def _observe(self, _: object) -> None:
        self._progress(self.clock.now / self.scenario.horizon_s)
        capacity, engines = self.scenario.durations.engine.kv_tokens, self.fleet.engines
        used = [engine.kv_in_use / capacity if capacity else engine.kv_in_use for engine in engines]
        count = len(engines)
        self.tally.kv.append(
            KvSample(
                time_s=self.clock.now,
                mean=sum(used) / count,
                highest=max(used),
                running=sum(engine.running for engine in engines) / count,
                waiting=sum(engine.waiting for engine in engines) / count,
            )
        )
        self.clock.after(self._interval_s, self._observe)

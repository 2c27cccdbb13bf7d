"""Sets of held-out prompts: which version of which set is due, what is sampled, and what an event says of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from harness import make_recipe, make_run
from test_evaluation import NOTHING_BEFORE, Plays, Pool, Updater, raised

from hpcrl.config.sampling import EvaluationSampling
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.reporting import reports
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.evaluation import Evaluator, evaluated_sets, held_out_sets
from hpcrl.rollouts.sampling.held_out import HeldOutSet
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.run_progress import read_set_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.failures import set_words


class SomeSamples(Plays):
    """An environment whose rollouts end by prompt and by how often the prompt was asked."""

    def __init__(self, name: str, ends: list[list[Any]]) -> None:
        super().__init__(name, [])
        self._left = [list(each) for each in ends]

    async def rollout(self, prompt: Any, policy: Any) -> Any:
        self._ends = {prompt.data: self._left[prompt.data].pop(0)}  # type: ignore[assignment]
        return await super().rollout(prompt, policy)


class SetScene:
    """Sets of a recipe over environments of a test."""

    def __init__(self, run: RunDir, environments: list[Plays], sets: list[dict[str, Any]], **evaluation: Any) -> None:
        self.run, self.pool, self.updater = run, Pool(), Updater()
        self.asked: list[EvaluationSampling] = []
        words = [{"name": each.name, "kind": "words"} for each in environments]
        given = {"every_steps": 2, "prompts": 2, "sets": sets, **evaluation}
        self.recipe = make_recipe(run.path.parent / "model", environments=words, evaluation=given)
        self.environments = environments
        self.events = EventWriter(run, attempt=1, writer="orchestrator")

    def sampler(self, sampling: EvaluationSampling) -> Sampler:
        self.asked.append(sampling)
        return Sampler(
            cast(Any, self.pool),
            Renderer(ChatTokenizer(self.run.path.parent / "model")),
            temperature=sampling.temperature,
            sampling=sampling.beside(self.recipe.rollouts.sampling),
            max_model_len=256,
        )

    def sets(self, up_to: int = 0) -> list[HeldOutSet]:
        environments = cast(Any, self.environments)
        return held_out_sets(self.run, self.recipe, environments, sampler_of=self.sampler, up_to=up_to)

    def evaluator(self) -> Evaluator:
        return Evaluator(
            recipe=self.recipe,
            environments=cast(Any, self.environments),
            sampler=self.sampler(self.recipe.evaluation.sampling),
            updater=cast(Any, self.updater),
            events=self.events,
            done=NOTHING_BEFORE,
            sets=self.sets(),
        )

    def said(self) -> list[dict[str, Any]]:
        assert reports.flush(30.0, directory=self.run.path)
        return [event.data for event in read_events(self.run, kind="evaluation.set")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    yield make_run(tmp_path)
    assert reports.flush(30.0, directory=tmp_path)


SAMPLED = {
    "name": "hard",
    "environments": ["b"],
    "prompts": 2,
    "samples": 4,
    "sampling": {"temperature": 0.7, "top_p": 0.9},
}


async def test_an_event_says_what_the_samples_come_to(run: RunDir) -> None:
    b = SomeSamples("b", [[1.0, 0.0, 0.0, raised()], [0.5, 1.0, 1.0, 1.0]])
    scene = SetScene(run, [Plays("a", [1.0, 1.0]), b], [SAMPLED])
    (each,) = scene.sets()
    await each.evaluate(4, due=2, events=scene.events)
    (said,) = scene.said()
    assert scene.asked == [EvaluationSampling(temperature=0.7, top_p=0.9)]
    assert (said["temperature"], said["sampling"]["top_p"], said["sampling"]["top_k"]) == (0.7, 0.9, 0)
    assert {key: said[key] for key in ("set", "version", "last_version", "due", "samples_per_prompt")} == {
        "set": "hard",
        "version": 4,
        "last_version": 4,
        "due": 2,
        "samples_per_prompt": 4,
    }
    assert (said["prompts"], said["samples"], said["failed"], said["truncated"], said["passed"]) == (2, 8, 1, 0, 4)
    assert said["mean"]["value"] == pytest.approx((0.25 + 0.875) / 2)
    assert said["mean"]["low"] < said["mean"]["value"] < said["mean"]["high"]
    assert said["pass_at"]["1"]["value"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert said["pass_at"]["4"]["value"] == 1.0
    assert list(said["by_env"]) == ["b"]
    assert said["by_env"]["b"]["mean"] == said["mean"]
    assert (said["failed_by_env"], said["failures"]) == ({"b": 1}, "zero")
    # each sample has a session and a seed of its own; the first has that of an evaluation with one sample
    assert len(set(scene.pool.seeds)) == 8
    assert stable_hash("turn", stable_hash("heldout", "b", 1), 0) in scene.pool.seeds
    assert stable_hash("turn", stable_hash("heldout", "b", 1, 3), 0) in scene.pool.seeds
    assert sorted(scene.pool.sessions)[:3] == ["heldout-b-0", "heldout-b-0-1", "heldout-b-0-2"]
    (shown,) = read_set_evaluations(run)
    words = set_words(shown)
    assert words.startswith("reward 0.562 [")
    assert words.endswith("1 failed, counted as 0")
    assert "of 2 prompts x 4, pass@1 0.500 [" in words


async def test_failed_samples_may_be_left_out(run: RunDir) -> None:
    b = SomeSamples("b", [[raised()] * 4, [1.0, 1.0, 1.0, raised()]])
    scene = SetScene(run, [Plays("a", [1.0]), b], [SAMPLED], failures="exclude")
    await scene.sets()[0].evaluate(4, due=4, events=scene.events)
    (said,) = scene.said()
    assert (said["mean"]["value"], said["mean"]["prompts"], said["failed"]) == (1.0, 1, 5)
    assert said["mean"]["low"] is None
    assert said["pass_at"]["4"] == {"value": None, "low": None, "high": None, "prompts": 0}
    assert "pass@4 -" in set_words(read_set_evaluations(run)[0])


def prompts_of(each: HeldOutSet) -> dict[str, int]:
    """How many prompts of which environment a set asks."""
    return dict(Counter(task.environment.name for task in each.tasks))


async def test_a_benchmark_is_asked_where_it_is_named(run: RunDir) -> None:
    sets: list[dict[str, Any]] = [
        {"name": "benchmark", "environments": ["b"], "prompts": 3},
        {"name": "both", "environments": ["a", "b"], "prompts": 6},
        {"name": "others", "prompts": 5},
    ]
    scene = SetScene(run, [Plays("a", [1.0] * 2), Plays("b", []), Plays("c", [0.0] * 2)], sets, prompts=4)
    weights = {"a": 1.0, "b": 0.0, "c": 1.0}
    environments = tuple(each.model_copy(update={"weight": weights[each.name]}) for each in scene.recipe.environments)
    scene.recipe = scene.recipe.model_copy(update={"environments": environments})
    evaluator = scene.evaluator()
    benchmark, both, others = (each for each, _ in evaluator.take_sets(0))
    assert prompts_of(benchmark) == {"b": 3}
    assert prompts_of(both) == {"a": 3, "b": 3}
    assert prompts_of(others) == {"a": 3, "c": 2}
    await evaluator.evaluate(0, due=0, exactly=True)
    assert reports.flush(30.0, directory=run.path)
    (said,) = (event.data for event in read_events(run, kind="evaluation"))
    assert said["counted_by_env"] == {"a": 2, "c": 2}


async def test_a_set_in_which_nothing_finishes_ends_nothing(run: RunDir) -> None:
    scene = SetScene(run, [Plays("a", [1.0]), Plays("b", [raised(), raised()])], [{**SAMPLED, "samples": 1}])
    await scene.sets()[0].evaluate(4, due=4, events=scene.events)
    assert scene.said()[0]["mean"]["value"] == 0.0
    assert scene.said()[0]["first_failure"]["what"] == "KeyError: 'x'"


def test_each_set_has_its_interval(run: RunDir) -> None:
    sets = [{"name": "often", "every_steps": 1}, {"name": "rare", "every_steps": 4}, {"name": "as-others"}]
    evaluator = SetScene(run, [Plays("a", [])], [*sets, {"name": "ends", "every_steps": 0}]).evaluator()

    def due(version: int, *, last: bool = False) -> dict[str, int]:
        return {each.name: version for each, version in evaluator.take_sets(version, last=last)}

    assert due(0) == {"often": 0, "rare": 0, "as-others": 0, "ends": 0}
    assert due(1) == {"often": 1}
    assert due(3) == {"often": 3, "as-others": 2}
    # engines skipped 4
    assert due(5) == {"often": 5, "rare": 4, "as-others": 4}
    assert due(6, last=True) == {"often": 6, "rare": 6, "as-others": 6, "ends": 6}
    assert due(6, last=True) == {}


async def test_the_last_version_is_not_evaluated_twice(run: RunDir) -> None:
    scene = SetScene(run, [Plays("a", [1.0])], [{"name": "more", "prompts": 1, "every_steps": 3}])
    (more,) = scene.sets()
    due = more.take(4)
    assert due == 3
    last = more.take(4, last=True)
    assert last == 4
    await more.evaluate(4, due=due, events=scene.events)
    await more.evaluate(4, due=last, events=scene.events)
    assert [(said["version"], said["due"]) for said in scene.said()] == [(4, 3)]


async def test_sets_are_evaluated_with_the_others_while_updates_are_held(run: RunDir) -> None:
    scene = SetScene(run, [Plays("a", [1.0, 1.0])], [{"name": "more", "prompts": 2}])
    evaluator = scene.evaluator()
    await evaluator.evaluate(4, due=4, exactly=True, sets=evaluator.take_sets(4))
    assert scene.updater.times == 1
    assert len(scene.said()) == 1
    # alone, where nothing else is due
    await evaluator.evaluate(6, due=None, exactly=False, sets=evaluator.take_sets(6))
    assert [said["due"] for said in scene.said()] == [4, 6]
    assert len(list(read_events(run, kind="evaluation"))) == 1


def test_what_earlier_attempts_evaluated_of_a_set_is_not_due(run: RunDir) -> None:
    events = EventWriter(run, attempt=1, writer="orchestrator")
    for said in (
        {"set": "more", "version": 0, "due": 0},
        {"set": "more", "version": 5, "due": 4},
        {"set": "more", "version": 8, "due": 8},
        {"set": 3, "version": 0, "due": 0},
        {"set": "other", "version": "none", "due": 0},
    ):
        events.emit("evaluation.set", **said)
    events.close()
    assert evaluated_sets(run, up_to=6) == {"more": frozenset({0, 4})}
    scene = SetScene(run, [Plays("a", [])], [{"name": "more"}, {"name": "other"}])
    more, other = scene.sets(up_to=6)
    assert [more.take(version) for version in (0, 4, 6)] == [None, None, 6]
    assert other.take(0) == 0


async def test_concurrency_is_limited_by_rollouts_in_flight(run: RunDir) -> None:
    most = running = 0

    class Counting(Plays):
        async def rollout(self, prompt: Any, policy: Any) -> Any:
            nonlocal most, running
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)  # an engine takes time
            try:
                return await super().rollout(prompt, policy)
            finally:
                running -= 1

    scene = SetScene(run, [Counting("a", [1.0] * 9)], [{"name": "wide", "prompts": 9}])
    scene.recipe = scene.recipe.model_copy(
        update={"rollouts": scene.recipe.rollouts.model_copy(update={"max_in_flight": 4})}
    )
    await scene.sets()[0].evaluate(4, due=4, events=scene.events)
    assert most == 4

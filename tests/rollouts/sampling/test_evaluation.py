"""Which version is evaluated when, and what an evaluation says of what finished and of what failed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from harness import make_recipe, make_run

from hpcrl.errors import EnvironmentFailedError, HpcrlError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.reporting import reports
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import EnvironmentRaisedError, Outcome, Prompt
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.evaluation import Evaluator, PastEvaluations, evaluated_versions
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir

NOTHING_BEFORE = PastEvaluations()


class Pool:
    """Engines that answer each request with one token of a version."""

    def __init__(self) -> None:
        self.versions = [4]
        self.seeds: list[int] = []
        self.left = 0
        self.sessions: list[str] = []

    def session(self, name: str) -> Any:
        self.sessions.append(name)
        return SimpleNamespace(leave=self.leave, engine=SimpleNamespace(name="engine-0", incarnation=0))

    def leave(self) -> None:
        self.left += 1

    async def generate(self, session: Any, tokens: Any, params: Any, **_: Any) -> Any:
        version = self.versions[len(self.seeds) % len(self.versions)]
        self.seeds.append(params.seed)
        return SimpleNamespace(
            token_ids=np.asarray([9], np.int32),
            logprobs=np.asarray([-0.5], np.float32),
            versions=np.asarray([version], np.int32),
            finish_reason="stop",
            experts=None,
        )


class Plays:
    """An environment whose held-out rollouts end as a test says, by their index."""

    def __init__(self, name: str, ends: Sequence[float | Exception], *, silent: bool = False) -> None:
        self.name, self._ends, self._silent = name, ends, silent

    def prompt(self, split: str, index: int) -> Any:
        assert split == "heldout"
        return Prompt(split="heldout", index=index, messages=({"role": "user", "content": "hello"},), data=index)

    async def rollout(self, prompt: Any, policy: Any) -> Outcome:
        if not self._silent:
            await policy.reply(prompt.messages)
        end = self._ends[prompt.data]
        if isinstance(end, Exception):
            raise end
        return Outcome(reward=end, parts={"exact": end / 2} if end else {})


class Updater:
    """Says whether updates were held."""

    def __init__(self) -> None:
        self.times = 0

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        self.times += 1
        yield


class Scene:
    """An evaluator over environments of a test."""

    def __init__(self, run: RunDir, environments: Sequence[Plays], *, prompts: int, failures: str = "exclude") -> None:
        self.run, self.pool, self.updater = run, Pool(), Updater()
        words = [{"name": each.name, "kind": "words"} for each in environments]
        evaluation = {"every_steps": 2, "prompts": prompts, "failures": failures}
        self.recipe = make_recipe(run.path.parent / "model", environments=words, evaluation=evaluation)
        self.events = EventWriter(run, attempt=1, writer="orchestrator")
        sampler = Sampler(
            cast(Any, self.pool),
            Renderer(ChatTokenizer(run.path.parent / "model")),
            temperature=0.0,
            sampling=self.recipe.rollouts.sampling,
            max_model_len=256,
        )
        self._parts: dict[str, Any] = {
            "recipe": self.recipe,
            "environments": environments,
            "sampler": sampler,
            "updater": cast(WeightUpdater, self.updater),
            "events": self.events,
        }
        self.evaluator = self.new()

    def new(self, done: PastEvaluations = NOTHING_BEFORE) -> Evaluator:
        return Evaluator(done=done, **self._parts)

    def said(self) -> list[dict[str, Any]]:
        assert reports.flush(30.0, directory=self.run.path)
        return [event.data for event in read_events(self.run, kind="evaluation")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    yield make_run(tmp_path)
    assert reports.flush(30.0, directory=tmp_path)


def raised() -> EnvironmentRaisedError:
    return EnvironmentRaisedError("'b' raised KeyError\n  shop.py:3", what="KeyError: 'x'", where="shop.py:3 in tool")


@pytest.mark.parametrize(
    ("failures", "rewards"), [("exclude", [1.0, 3.0, 2.0]), ("zero", [1.0, 3.0, 2.0, 0.0, 0.0, 0.0])]
)
async def test_an_event_says_what_finished_and_what_failed_by_environment(
    run: RunDir, failures: str, rewards: list[float]
) -> None:
    a = Plays("a", [1.0, raised(), 3.0])
    b = Plays("b", [EngineError("no engine"), raised(), 2.0])
    scene = Scene(run, [a, b], prompts=6, failures=failures)
    await scene.evaluator.evaluate(4, due=4, exactly=True)
    (said,) = scene.said()
    zeros = [0.0] if failures == "zero" else []
    of_a, of_b = [1.0, 3.0, *zeros], [2.0, *zeros, *zeros]
    first = said.pop("first_failure")
    assert (first["environment"], first["what"], first["where"]) == ("a", "KeyError: 'x'", "shop.py:3 in tool")
    assert said.pop("seconds") >= 0.0
    assert said == {
        "version": 4,
        "last_version": 4,
        "due": 4,
        "reward": pytest.approx(sum(rewards) / len(rewards)),
        "by_env": {"a": pytest.approx(sum(of_a) / len(of_a)), "b": pytest.approx(sum(of_b) / len(of_b))},
        "parts": {"a/exact": 1.0, "b/exact": 1.0},
        "prompts": 3,
        "failed": 3,
        "counted": len(rewards),
        "counted_by_env": {"a": len(of_a), "b": len(of_b)},
        "counted_by_part": {"a/exact": 2, "b/exact": 1},
        "failures": failures,
        "failed_by_env": {"a": 1, "b": 2},
        "failed_by_cause": {"raised": 2, "engine": 1},
    }
    # each prompt has a session and a seed of its own, the same in every run, and gives its engine back
    assert sorted(scene.pool.sessions) == [f"heldout-{name}-{index}" for name in "ab" for index in range(3)]
    wanted = [stable_hash("turn", stable_hash("heldout", name, index), 0) for name in "ab" for index in range(3)]
    assert sorted(scene.pool.seeds) == sorted(wanted)
    assert scene.pool.left == 6


@pytest.mark.parametrize("exactly", [True, False])
async def test_updates_are_held_where_every_token_is_to_be_of_one_version(run: RunDir, exactly: bool) -> None:
    scene = Scene(run, [Plays("a", [1.0, 1.0])], prompts=2)
    assert not scene.evaluator.busy
    await scene.evaluator.evaluate(4, due=4, exactly=exactly)
    assert scene.updater.times == (1 if exactly else 0)
    # a version that was evaluated exactly is not evaluated again, whatever came due
    await scene.evaluator.evaluate(4, due=2, exactly=exactly)
    assert len(scene.said()) == 1
    assert "first_failure" in scene.said()[0]
    assert scene.said()[0]["first_failure"] is None


async def test_an_evaluation_with_tokens_of_two_versions_is_none_of_either(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [1.0, 1.0])], prompts=2)
    scene.pool.versions = [4, 5]
    await scene.evaluator.evaluate(4, due=4, exactly=False)
    await scene.evaluator.evaluate(4, due=4, exactly=False)
    assert [(said["version"], said["last_version"]) for said in scene.said()] == [(4, 5), (4, 5)]


@pytest.mark.parametrize(
    ("version", "due", "words"), [(5, 4, ["engines skipped version 4: it is evaluated at version 5"]), (4, 4, [])]
)
async def test_a_version_that_engines_skipped_is_reported(
    run: RunDir, version: int, due: int, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(run, [Plays("a", [1.0])], prompts=1)
    scene.pool.versions = [version]
    with caplog.at_level(logging.WARNING, logger="hpcrl.rollouts.sampling.evaluation"):
        await scene.evaluator.evaluate(version, due=due, exactly=False)
    assert [record.getMessage() for record in caplog.records] == words
    assert [(said["version"], said["due"]) for said in scene.said()] == [(version, due)]


def test_what_is_due_is_taken_once(run: RunDir) -> None:
    evaluator = Scene(run, [Plays("a", [1.0])], prompts=1).evaluator
    # before there is another the first is due; then every second, at once or when engines come to it
    assert [evaluator.take(version) for version in (0, 0, 1, 2, 2, 3, 5, 5, 8)] == [
        0,
        None,
        None,
        2,
        None,
        None,
        4,
        None,
        8,
    ]


def test_what_earlier_attempts_evaluated_is_not_due(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [1.0])], prompts=1)
    evaluator = scene.new(PastEvaluations(exact=frozenset({4}), due=frozenset({0, 4})))
    assert [evaluator.take(version) for version in (0, 4, 5, 6)] == [None, None, None, 6]


def test_a_recipe_without_evaluations_has_the_first_alone(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [1.0])], prompts=1)
    scene._parts["recipe"] = make_recipe(
        run.path.parent / "model",
        environments=[{"name": "a", "kind": "words"}],
        evaluation={"every_steps": 0, "prompts": 1},
    )
    evaluator = scene.new()
    assert [evaluator.take(version) for version in (0, 1, 2, 64)] == [0, None, None, None]


async def test_where_nothing_finished_the_environments_own_words_end_the_run(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [TimeoutError("slow"), raised()])], prompts=2)
    with pytest.raises(EnvironmentFailedError) as caught:
        await scene.evaluator.evaluate(4, due=4, exactly=True)
    what = "none of the 2 rollouts that evaluate version 4 was finished"
    assert str(caught.value) == f"'b' raised KeyError ({what})\n  shop.py:3"
    scene = Scene(run, [Plays("a", [TimeoutError("slow"), EngineError("away")])], prompts=2)
    with pytest.raises(HpcrlError) as other:
        await scene.evaluator.evaluate(4, due=4, exactly=True)
    assert str(other.value) == f"{what}; the first: TimeoutError: slow"
    assert scene.said() == []


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("failures", ["zero", "exclude"])
async def test_a_later_evaluation_in_which_nothing_finishes_does_not_end_the_run(
    run: RunDir, failures: str, before: bool
) -> None:
    """One was made before, by this attempt or by an earlier one."""
    ends: list[float | Exception] = [1.0, 3.0]
    scene = Scene(run, [Plays("a", ends)], prompts=2, failures=failures)
    evaluator = scene.new(PastEvaluations(frozenset({0}), frozenset({0}))) if before else scene.evaluator
    if not before:
        await evaluator.evaluate(2, due=2, exactly=True)
        assert scene.said().pop()["reward"] == 2.0
    ends[:] = [raised(), EngineError("no engine")]
    await evaluator.evaluate(6, due=4, exactly=False)
    kind = "evaluation" if failures == "zero" else "evaluation.none_finished"
    assert reports.flush(30.0, directory=run.path)
    event = [event for event in read_events(run) if event.kind.startswith("evaluation")][-1]
    told = event.data
    assert event.kind == kind
    assert (told["version"], told["due"], told["failed"]) == (6, 4, 2)
    assert told["first_failure"]["what"] == "KeyError: 'x'"
    assert told["failed_by_env"] == {"a": 2}
    assert told.get("reward", "none") == (0.0 if failures == "zero" else "none")
    if failures == "zero":
        assert (told["prompts"], told["counted"], told["last_version"]) == (0, 2, 6)
    # nothing was sampled of this version: it may be evaluated again
    ends[:] = [1.0, 3.0]
    scene.pool.versions = [6]
    await evaluator.evaluate(6, due=6, exactly=True)
    assert scene.said()[-1]["reward"] == 2.0


async def test_a_rollout_without_a_reply_has_failed(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [1.0]), Plays("b", [1.0], silent=True)], prompts=2)
    await scene.evaluator.evaluate(4, due=4, exactly=True)
    (said,) = scene.said()
    assert (said["failed_by_env"], said["failed_by_cause"]) == ({"b": 1}, {"no_room": 1})


async def test_an_error_of_hpcrl_is_not_a_failed_rollout(run: RunDir) -> None:
    scene = Scene(run, [Plays("a", [HpcrlError("the run is over")])], prompts=1)
    with pytest.raises(HpcrlError, match="the run is over"):
        await scene.evaluator.evaluate(4, due=4, exactly=True)
    assert scene.pool.left == 1


def test_only_evaluations_of_this_past_count(run: RunDir) -> None:
    """An inexact one of the version that engines begin with is made again; later ones were abandoned."""
    events = EventWriter(run, attempt=1, writer="orchestrator")
    for said in (
        {"version": 0, "last_version": 0},
        {"version": 2, "last_version": 3, "due": 2},
        {"version": 5, "last_version": 5, "due": 4},
        {"version": 6, "last_version": 7, "due": 6},
        {"version": 8, "last_version": 8, "due": 8},
        {"version": "none"},
    ):
        events.emit("evaluation", **said)
    events.close()
    assert evaluated_versions(run, up_to=6) == PastEvaluations(frozenset({0, 5}), frozenset({0, 2, 4}))
    assert evaluated_versions(run, up_to=7) == PastEvaluations(frozenset({0, 5}), frozenset({0, 2, 4, 6}))
    assert evaluated_versions(run, up_to=8).exact == frozenset({0, 5, 8})

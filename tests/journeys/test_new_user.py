"""A new user on one machine: looks around, brings tasks of their own, errs, runs, looks back, cleans up."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_for
from screens import Journey

from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = '''\
"""My first tasks: say what you like, and get half a point."""

from hpcrl.rollouts.environments import Outcome, Prompt


class Polite:
    name = "polite"

    def __init__(self, reward=0.5):
        self.reward = reward

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": "abc"},))

    async def rollout(self, prompt, policy):
        await policy.reply(prompt.messages)
        return Outcome(reward=self.reward)

    def demonstration(self, prompt, *, correct, rng):
        return [{"role": "assistant", "content": "yes" if correct else "no"}]


class Rude(Polite):
    async def rollout(self, prompt, policy):
        raise KeyError("judge")
'''
RECIPE = """\
extends: quickstart
name: polite
model: {path: model}
environments:
  - {name: polite, kind: custom, factory: "my_tasks:Polite", args: {reward: 0.5}}
rollouts: {rollouts_per_step: 8, group_size: 4, max_in_flight: 16}
evaluation: {every_steps: 0, prompts: 8}
trainer: {steps: 2}
checkpoint: {every_steps: 1}
"""


@pytest.fixture
def ada(tmp_path: Path, small_model: Path) -> Journey:
    """A new user who works in a directory of a home of her own, with a start model that a colleague has made."""
    journey = Journey(tmp_path / "ada")
    (journey.home / "demo").mkdir()
    (journey.home / "demo/model").symlink_to(small_model)
    journey.cwd = journey.home / "demo"
    journey.env["PYTHONPATH"] = str(journey.cwd)
    return journey


def wait_end(run: RunDir) -> None:
    assert run.record_path.is_file(), "the submit before did not make it"
    wait_for(lambda: observe(run).state.ended, 120.0, f"the end of {run.name}")


def look_around(ada: Journey) -> None:
    # not how many rules there are: that changes with each new one
    ada.type("hpcrl --version")
    ada.type("hpcrl recipe ls | cut -c1-60")
    ada.type("hpcrl recipe check quickstart | cut -d'(' -f1")
    ada.type("hpcrl plan quickstrat")
    ada.type("hpcrl plan quickstart | grep -v ^SKIPPED")
    ada.type("hpcrl submit quickstart --name first")
    ada.type("hpcrl ls")


def bring_tasks(ada: Journey) -> None:
    ada.write("my_tasks.py", TASKS)
    ada.write("mine.yaml", RECIPE.replace("my_tasks:Polite", "my_task:Polite"))
    ada.type("hpcrl recipe check mine.yaml")
    ada.write("mine.yaml", RECIPE.replace("reward: 0.5", "rewards: 0.5"))
    ada.type("hpcrl submit mine.yaml --name first")
    ada.write("mine.yaml", RECIPE)
    ada.type("hpcrl recipe check mine.yaml | cut -d'(' -f1")
    ada.type("hpcrl env try mine.yaml --task 3")


def run_and_look(ada: Journey, run: RunDir) -> None:
    ada.type("hpcrl submit mine.yaml --name first --set steps=3")
    ada.type("hpcrl submit mine.yaml --name first")
    wait_end(run)
    ada.say("the run ends")
    ada.go(ada.home / "elsewhere")
    ada.type("hpcrl status first | head -1")
    ada.type("hpcrl ls")
    ada.type("hpcrl ls --state failed")
    ada.type("hpcrl why first")
    ada.type("hpcrl logs first --role trainr")
    ada.type("hpcrl checkpoint ls first | cut -c1-40")
    ada.type("hpcrl shell first --role trainer")
    ada.type("hpcrl cancel first")
    ada.type("hpcrl resume first")
    ada.type("hpcrl status frist")


def fail_and_clean_up(ada: Journey, run: RunDir) -> None:
    ada.go(ada.home / "demo")
    ada.type("hpcrl submit mine.yaml --name first")
    ada.type("hpcrl submit mine.yaml --name second --set environments.0.factory=my_tasks:Rude -c locl")
    ada.type(
        "hpcrl submit mine.yaml --name second --set environments.0.factory=my_tasks:Rude --set environments.0.args={}"
    )
    wait_end(run)
    ada.say("the run ends")
    ada.type("hpcrl ls")
    ada.type("hpcrl why second")
    ada.type("mv my_tasks.py mine.py")
    ada.type("hpcrl resume second")
    # sizes are those of logs: the last words count
    ada.type("hpcrl rm second 2>&1 | tail -n 1 | cut -d: -f2", answer="n\n")
    ada.type("hpcrl rm second 2>&1 | tail -n 1 | cut -d: -f2", answer="y\n")
    ada.type("hpcrl rm first --yes 2>&1 < /dev/null | tail -n 1")
    ada.type("hpcrl ls")


def test_a_new_user_goes_from_the_first_look_to_the_last_run(ada: Journey) -> None:
    runs = ada.home / "demo/runs"
    look_around(ada)
    bring_tasks(ada)
    run_and_look(ada, RunDir(runs / "first"))
    fail_and_clean_up(ada, RunDir(runs / "second"))
    assert not (runs / "first").exists()
    ada.compare("new_user")


BOB = 65534
"""Number of another user."""


@pytest.fixture
def street() -> Iterator[Path]:
    """A directory that everybody may enter, unlike those of pytest."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    path = Path(tempfile.mkdtemp(prefix="hpcrl-street-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_another_user_can_neither_look_into_a_run_nor_end_it(street: Path) -> None:
    ada, bob = Journey(street / "ada", PROBE_HOLD_S="60"), Journey(street / "bob")
    os.chown(bob.home, BOB, BOB)
    run = RunDir(ada.home / "runs/mine")
    for person in (ada, bob):
        person.names |= {str(street): "STREET"}
    ada.type("hpcrl submit quickstart --name mine --set job.payload=probe --set model.path=none")
    wait_for(lambda: observe(run).state is RunState.RUNNING, 60.0, "a run that runs")
    for command in ("status", "shell", "cancel --yes", "rm --yes"):
        bob.type(f"hpcrl {command} {run.path}", user=BOB)
    bob.type("hpcrl ls", user=BOB)
    assert observe(run).state is RunState.RUNNING
    ada.type("hpcrl cancel mine --yes")
    bob.compare("another_user")

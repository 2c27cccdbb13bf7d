"""The accounting, walked at random beside a plain model of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hpcrl.rollouts.core.staleness import StalenessAccount


@dataclass
class Model:
    """A run in which every group is a list entry: version of its first token."""

    groups_per_step: int
    bound: int
    account: StalenessAccount
    trainer: int = 0
    trained: int = 0
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.account.start()
        self.running.append(self.account.version)

    def end(self, rng: random.Random) -> None:
        version = self.running.pop(rng.randrange(len(self.running)))
        if version < self.account.oldest_usable or rng.random() < 0.2:
            self.account.drop_running()
        else:
            self.account.finish()
            self.waiting.append(version)

    def consume(self) -> None:
        self.waiting.sort()
        chosen, self.waiting = self.waiting[: self.groups_per_step], self.waiting[self.groups_per_step :]
        self.consumed += [self.trainer - version for version in chosen]
        self.account.consume()
        self.trainer += 1
        oldest = self.account.oldest_usable
        for version in [v for v in self.waiting if v < oldest]:
            self.waiting.remove(version)
            self.account.drop_waiting()
        for version in [v for v in self.running if v < oldest]:
            self.running.remove(version)
            self.account.drop_running()

    def train(self) -> None:
        self.trained += 1
        self.account.settle(self.trained)

    def check(self) -> None:
        account = self.account
        assert account.takes_ahead == (self.trained < self.trainer)
        assert (account.running, account.waiting, account.step) == (
            len(self.running),
            len(self.waiting),
            self.trainer,
        )
        assert all(0 <= staleness <= self.bound for staleness in self.consumed)
        assert all(version >= account.oldest_usable for version in [*self.waiting, *self.running])
        # the meaning of the rule: never more groups than the steps that may still use them can take
        last_step = account.version + self.bound + 1
        assert len(self.waiting) + len(self.running) <= (last_step - account.step) * self.groups_per_step
        if not self.running and not account.batch_ready and account.version == account.step:
            assert account.may_start, "deadlock"


@pytest.mark.parametrize("seed", range(60))
def test_random_walks_keep_the_bound_and_never_get_stuck(seed: int) -> None:
    rng = random.Random(seed)
    groups_per_step, bound = rng.randint(1, 4), rng.randint(0, 4)
    account = StalenessAccount(
        groups_per_step=groups_per_step, max_off_policy_steps=bound, ready_batches=rng.randint(1, 3)
    )
    model = Model(groups_per_step, bound, account)
    for _ in range(600):
        moves = []
        if account.may_start:
            moves.append(model.start)
        if model.running:
            moves.append(lambda: model.end(rng))
        # one step may be taken while the one before it is trained
        if account.batch_ready and model.trainer <= model.trained + 1:
            moves.append(model.consume)
        if model.trained < model.trainer:
            moves.append(model.train)
        if account.version < model.trained:
            moves.append(lambda: account.serve(rng.randint(account.version + 1, model.trained)))
        assert moves, "deadlock"
        rng.choice(moves)()
        model.check()
    assert model.trainer > 0


def test_synchronous_admission_is_exactly_one_step() -> None:
    account = StalenessAccount(groups_per_step=3, max_off_policy_steps=0)
    for step in range(4):
        started = 0
        while account.capacity > 0:
            account.start()
            started += 1
        assert started == 3
        for _ in range(3):
            account.finish()
        account.consume()
        assert account.capacity == 0
        account.settle(step + 1)
        account.serve(step + 1)


@pytest.mark.parametrize("ready_batches", [1, 2])
def test_nothing_starts_while_enough_batches_wait(ready_batches: int) -> None:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=4, ready_batches=ready_batches)
    for _ in range(2 * ready_batches):
        assert account.may_start
        account.start()
        account.finish()
    assert account.capacity > 0
    assert not account.may_start
    account.consume()
    assert account.may_start
    for _ in range(2):
        account.start()
        account.finish()
    # taken while the step before is trained, a batch still waits for the trainer
    account.consume()
    assert account.takes_ahead
    assert not account.may_start
    account.settle(1)
    assert account.may_start


def test_a_dropped_group_makes_room_for_another() -> None:
    account = StalenessAccount(groups_per_step=2, max_off_policy_steps=0)
    account.start()
    account.start()
    assert account.capacity == 0
    account.drop_running()
    assert account.capacity == 1
    account.finish()
    account.drop_waiting()
    assert account.capacity == 2


def test_accounting_restarts_at_the_restored_step() -> None:
    account = StalenessAccount(groups_per_step=4, max_off_policy_steps=1, step=10, waiting=3)
    assert account.version == 10
    assert account.capacity == 2 * 4 - 3
    assert account.oldest_usable == 9


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="groups_per_step=0"):
        StalenessAccount(groups_per_step=0, max_off_policy_steps=0)

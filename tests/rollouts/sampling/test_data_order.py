"""Draws of a run are a function of its seed: what a resume, and a simulation, must find again."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from harness import make_recipe

from hpcrl.rollouts.core.seeding import stable_fraction, stable_hash
from hpcrl.rollouts.environments import build_environments, data_order
from hpcrl.rollouts.environments.data_order import DataOrder, GroupTask, heldout_shares


def drawn(*parts: str) -> int:
    """The half of XXH3's 64 bits that numbers with a sign hold, of parts with their types."""
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode()) // 2


def test_a_draw_depends_on_all_parts_and_on_what_kind_they_are() -> None:
    assert stable_hash("rollout", 7, 3) == drawn("str:rollout", "int:7", "int:3")
    assert len({stable_hash(1, 23), stable_hash(12, 3), stable_hash("1", 23), stable_hash(123), stable_hash()}) == 5
    assert stable_hash(-5) == drawn("int:-5")


def test_draws_fill_the_numbers_without_a_sign() -> None:
    numbers = [stable_hash("x", i) for i in range(4000)]
    assert all(0 <= number < 2**63 for number in numbers)
    assert max(numbers) > 0.99 * 2**63
    assert min(numbers) < 0.01 * 2**63
    fractions = [stable_fraction("x", i) for i in range(4000)]
    assert fractions == [number / 2**63 for number in numbers]


def order_of(tmp_path: Path, *weights: float) -> DataOrder:
    names = "abcdef"[: len(weights)]
    environments = [{"name": n, "kind": "words", "weight": w} for n, w in zip(names, weights, strict=True)]
    recipe = make_recipe(tmp_path, environments=environments)
    assert recipe.seed == 7
    return DataOrder(recipe, build_environments(recipe))


def test_a_group_has_the_prompt_and_the_environment_of_its_own_draws(tmp_path: Path) -> None:
    order = order_of(tmp_path, 1.0, 2.0, 1.0)
    for index in range(100):
        task = order.task(index)
        share = drawn("str:environment", "int:7", f"int:{index}") / 2**63
        assert task.environment.name == ("a" if share < 0.25 else "b" if share < 0.75 else "c")
        assert task.prompt_index == drawn("str:prompt", "int:7", f"int:{index}") % 2**31
        assert task.index == index
        assert order.rollout_seed(index, 3) == drawn("str:rollout", "int:7", f"int:{index}", "int:3")


@pytest.mark.parametrize(("draw", "name"), [(0.0, "a"), (0.2499, "a"), (0.25, "b"), (0.9999, "b"), (1.0, "b")])
def test_bounds_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: float, name: str) -> None:
    """Sums of weights may be a little below one: what is drawn above them is of the last."""
    monkeypatch.setattr(data_order, "stable_fraction", lambda *parts: draw)
    assert order_of(tmp_path, 1.0, 3.0).task(0).environment.name == name
    # one that is not trained on is never drawn, also where it is the first or the last
    assert order_of(tmp_path, 1.0, 3.0, 0.0).task(0).environment.name == name
    assert order_of(tmp_path, 0.0, 1.0, 3.0).task(0).environment.name == {"a": "b", "b": "c"}[name]


def test_a_group_is_dealt_again_as_it_was_where_its_environment_is_still_there(tmp_path: Path) -> None:
    order = order_of(tmp_path, 1.0, 3.0)
    again = order.again(5, "b", 99)
    assert isinstance(again, GroupTask)
    assert (again.index, again.environment.name, again.prompt_index) == (5, "b", 99)
    assert order.again(5, "gone", 99) is None
    assert (order.has("a"), order.has("gone")) == (True, False)


@pytest.mark.parametrize(
    ("weights", "prompts", "shares"),
    [
        ([1.0], 5, [5]),
        ([1.0, 1.0, 1.0], 10, [4, 3, 3]),
        ([5.0, 3.0, 2.0], 7, [4, 2, 1]),
        ([2.0, 3.0, 5.0], 7, [1, 2, 4]),
        # at least one each, also where that is more than there should be
        ([100.0, 1.0, 1.0], 10, [9, 1, 1]),
        ([1.0, 1.0, 1.0], 2, [1, 1, 1]),
        ([1e-9, 1.0], 8, [1, 7]),
    ],
)
def test_held_out_prompts_are_shared_out_by_weight(weights: list[float], prompts: int, shares: list[int]) -> None:
    assert heldout_shares(weights, prompts) == shares

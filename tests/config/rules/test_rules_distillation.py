"""Rules about a teacher: what cannot be compared with it, and what would lose what it says."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.distillation import DISTILLATION_RULES
from hpcrl.config.rules.table import RULES, check_rules
from hpcrl.errors import ConfigError

TEACHER = "algorithm.distillation={teacher: {url: 'http://node7:8000'}}"


def check(*settings: str) -> None:
    check_rules(load_recipe("quickstart", settings), load_cluster("local"))


def test_a_teacher_is_allowed() -> None:
    check(TEACHER)
    assert set(DISTILLATION_RULES) <= set(RULES)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("rollouts.sampling.temperature=0.7", "rollouts.sampling.temperature"),
        ("rollouts.zero_variance=drop", "rollouts.zero_variance"),
    ],
)
def test_what_does_not_go_with_a_teacher(setting: str, key: str) -> None:
    check(setting)
    with pytest.raises(ConfigError) as caught:
        check(TEACHER, setting)
    (found,) = [finding for finding in caught.value.findings if finding.what.endswith("[teacher-compares]")]
    assert found.key == key
    assert found.hint

"""A sandbox that is larger than its node, or than its worker, is refused before the queue."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError

SWE = "environments=[{{name: swe, kind: swe, tasks: t, memory_gib: {}}}]"
HARNESS = "environments=[{{name: own, kind: harness, path: t, command: ['true'], sandbox: {{memory_gib: {}}}}}]"
CODE = "environments=[{{name: code, kind: dataset, path: t, rewards: [{{kind: code, memory_gib: {}}}]}}]"
WORKERS = "environment_workers={count: 2, cpus: 2, memory_gib: 1}"


def findings(*settings: str) -> list[tuple[str, str]]:
    """Key and message of each conflict of the rule, on nodes of 1.9 GiB."""
    try:
        check_rules(load_recipe("quickstart", settings), load_cluster("devcluster"))
    except ConfigError as error:
        return [(f.key, f.what) for f in error.findings if "[sandbox-fits-node]" in f.what]
    return []


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        (SWE, "environments.0.memory_gib"),
        (HARNESS, "environments.0.sandbox.memory_gib"),
        (CODE, "environments.0.rewards.0.memory_gib"),
    ],
)
def test_a_sandbox_larger_than_its_node_is_refused(environment: str, key: str) -> None:
    [(found, what)] = findings(environment.format(2))
    assert found == key
    assert "one sandbox may use 2 GiB, and the trainer's first node has 1.9" in what
    assert findings(environment.format(1.9)) == []


def test_a_sandbox_larger_than_its_worker_is_refused() -> None:
    assert findings(SWE.format(1), WORKERS) == []
    [(key, what)] = findings(SWE.format(1.5), WORKERS)
    assert (key, "a worker of environments has 1" in what) == ("environments.0.memory_gib", True)


def test_a_sandbox_larger_than_the_limit_of_all_is_refused() -> None:
    assert findings(SWE.format(1), "rollouts.sandboxes_gib=1") == []
    [(key, what)] = findings(SWE.format(1.5), "rollouts.sandboxes_gib=1.25")
    assert key == "environments.0.memory_gib"
    assert "one sandbox may use 1.5 GiB, and rollouts.sandboxes_gib has 1.25" in what
    # workers with memory of their own have equal parts
    workers = "environment_workers={count: 2, per_node: 2, cpus: 1, memory_gib: 0.9}"
    [(_, what)] = findings(SWE.format(0.8), workers, "rollouts.sandboxes_gib=1.5")
    assert "rollouts.sandboxes_gib has 0.75" in what


def test_a_probe_has_no_sandboxes() -> None:
    assert findings(SWE.format(2), "job.payload=probe") == []

"""A whole run that replays the engines' experts: with the same weights the trainer would choose the same ones."""

from __future__ import annotations

import pytest
from lab import SMALL_RUN, Lab, steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_trainer_and_engine_choose_the_same_experts(lab: Lab) -> None:
    run = lab.submit("routes", *SMALL_RUN, "trainer.steps=4", "trainer.router_replay=true", follow=True)
    records = steps(run)
    assert list(records) == [1, 2, 3, 4]
    for record in records.values():
        assert record.routing_mismatch is not None
        # of each rollout all rows are there but the last, over all turns
        rollouts = run.recipe().rollouts.rollouts_per_step
        assert record.tokens - record.routed_tokens == rollouts
        assert record.replayed_share == pytest.approx(record.routed_tokens / record.tokens)
        assert record.unknown_routing == pytest.approx({"last": rollouts / record.tokens})
    # the policy moves, so tokens of older versions may differ
    fresh = [r.routing_mismatch_by_lag["0"] for r in records.values() if "0" in r.routing_mismatch_by_lag]
    assert fresh
    assert max(fresh) < 1e-3
    assert "routes" in lab.hpcrl("status", run.name).stdout

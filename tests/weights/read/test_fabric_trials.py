"""Faults at random transfers of the fabric (the full count is in tests/campaigns/fabric_kills.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fabric_trials import FAULTS, FabricTrials

pytest.importorskip("mooncake.engine", reason="the extra store is not installed")


def test_no_fault_at_any_transfer_serves_a_wrong_byte(tmp_path: Path) -> None:
    trials = FabricTrials(tmp_path, seed=1)
    try:
        for _ in range(40):
            trials.trial()
        trials.kill()
        trials.kill()
    finally:
        trials.close()
    assert trials.problems == []
    assert trials.counts["trials"] == 42
    assert trials.counts["announced"] > 5
    assert trials.counts["none: share"] == trials.counts["none: older"] == 0
    helped = {kind for kind in FAULTS if trials.counts[f"{kind}: share"] + trials.counts[f"{kind}: older"]}
    assert {"byte", "header", "overwrite", "mixed", "unregister"} & helped, "no fault had an effect"

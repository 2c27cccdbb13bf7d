"""Manifests of checkpoints with any damage: an entry that is passed over, and the next older one is taken."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_json import damaged
from ledger_testing import save

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.checkpoints.ledger import MANIFEST, expected_save_s
from hpcrl.errors import CheckpointError


def fuzz(root: Path, rng: random.Random, goes_on: Callable[[], bool]) -> int:
    whole = [save(root, step) for step in (1, 2)]
    ledger, path, done = CheckpointLedger(root), whole[1].path / MANIFEST, 0
    good = path.read_bytes()
    while goes_on():
        text = damaged(rng, good)
        path.write_bytes(text)
        try:
            choice = ledger.newest_verified()
            assert ledger.steps() == [1, 2]
            assert choice.entry is not None
            # the files are those of the step, whatever else was changed
            state = choice.entry.orchestrator_state()
            assert state == f"rollouts {choice.entry.step}".encode()
            assert 1 in ledger.whole_steps(2)
            assert 0.0 <= (expected_save_s(ledger) or 0.0) < 1e9
        except Exception as error:
            raise AssertionError(f"{error!r} for {text[:1500]!r}") from error
        done += 1
    return done


def test_damaged_manifests_are_passed_over(tmp_path: Path) -> None:
    left = iter(range(100))
    assert fuzz(tmp_path, random.Random(2), lambda: next(left, None) is not None) == 100


@pytest.mark.campaign
def test_damaged_manifests_for_a_while(tmp_path: Path) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", time.time_ns()))
    end = time.monotonic() + 20.0
    print(f"HPCRL_FUZZ_SEED={seed}: {fuzz(tmp_path, random.Random(seed), lambda: time.monotonic() < end)} manifests")


@pytest.mark.parametrize("name", ["step-000009", "step-0000002"])
def test_a_copy_of_an_entry_under_another_number_is_none(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    ledger = CheckpointLedger(tmp_path)
    choice = ledger.newest_verified()
    assert choice.entry is not None
    assert choice.entry.step == 2
    if name == "step-000009":
        with pytest.raises(CheckpointError, match="not joint"):
            ledger.open(9)
    else:
        assert ledger.steps() == [1, 2]

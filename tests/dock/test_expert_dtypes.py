"""The dtype of expert numbers: the last number of a model's experts fits, and not one byte more is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcrl.dock.ledger.entries import ledger_files
from hpcrl.dock.routes import exact_dtype


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_the_last_expert_just_fits(experts: int, dtype: type) -> None:
    found = exact_dtype(experts)
    assert found == dtype
    assert np.iinfo(found).max >= experts - 1


def test_a_run_without_a_ledger_has_no_files_of_one(tmp_path: Path) -> None:
    assert ledger_files(tmp_path / "ledger") == []

"""What nodes do together while they look around: one writes to the shared filesystem, another one reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.sites import node_check
from hpcrl.sites.node_facts import DiskRates, write_rates


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "write_rates", lambda path: write_rates(path, size=1 << 20))


def measured(directory: Path, nodes: int) -> list[tuple[DiskRates, str]]:
    with ThreadPoolExecutor(nodes) as pool:
        return list(pool.map(lambda index: node_check._measure_disk(directory, index, nodes), range(nodes)))


def test_the_second_node_writes_and_the_first_reads(tmp_path: Path) -> None:
    (first, _), (second, _), third = measured(tmp_path, 3)
    assert (first.write_gb_s, first.read_gb_s is None) == (None, False)
    assert (second.write_gb_s is None, second.small_write_s is None, second.read_gb_s) == (False, False, None)
    assert third == (DiskRates(), "")


def test_one_node_does_both(tmp_path: Path) -> None:
    ((rates, problem),) = measured(tmp_path, 1)
    assert None not in (rates.write_gb_s, rates.read_gb_s, rates.small_write_s)
    assert problem == ""


def test_a_full_disk_is_reported_by_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "write_rates", lambda path: DiskRates())
    (_, problem), (_, quiet) = measured(tmp_path, 2)
    assert (problem, quiet) == ("there is little room left", "")


def test_a_write_that_fails_is_unknown(tmp_path: Path) -> None:
    rates, problem = node_check._measure_disk(tmp_path / "gone", 0, 1)
    assert rates == DiskRates()
    assert "No such file" in problem


def test_a_writer_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "_LAG_LIMIT_S", 0.2)
    assert node_check._measure_disk(tmp_path, 0, 2) == (DiskRates(), "the other node did not write in time")

"""Rows of experts that others computed: found by salt and prefix, and gone with the KV that they describe."""

from __future__ import annotations

import numpy as np
import pytest
from routed_rows_testing import LAYERS, POOLED, WIDTH, experts_of, rows_from

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows

OPENING = list(range(20, 31))
"""Two blocks of four tokens, and three more."""


def store_of(*, limit_bytes: int = 1 << 20) -> KnownRows:
    return KnownRows(Counters(), block=4, limit_bytes=limit_bytes, keep_versions=1)


def counted(store: KnownRows) -> tuple[int, int, int]:
    counters = store.counters
    return counters.rows_answer, counters.rows_shared_prefix, counters.rows_unknown


def test_rows_of_a_fetched_prefix_are_those_of_who_computed_it() -> None:
    store = store_of()
    rows_from(store, OPENING)
    assert counted(store) == (13, 0, 0)
    routes = rows_from(store, OPENING, fetched=8)
    assert routes.known.tolist() == [True] * 13 + [False]
    assert (routes.experts[:13] == experts_of([*OPENING, 40, 41])).all()
    assert counted(store) == (13 + 5, 8, 0)


def test_rows_that_an_engine_has_are_not_those_of_another_pass() -> None:
    """Two passes of one block may differ; the row of this engine counts, and the first pass stays what others get."""
    store = store_of()
    rows_from(store, OPENING)
    # the fetched prefix ends within a block
    own = rows_from(store, OPENING, fetched=6, shift=1)
    assert (own.experts[:6] == experts_of(OPENING)[:6]).all()
    assert (own.experts[6:11] == experts_of(OPENING, shift=1)[6:]).all()
    other = rows_from(store, OPENING, fetched=8)
    assert (other.experts[:8] == experts_of(OPENING)[:8]).all()


def test_a_conversation_learns_until_its_end() -> None:
    """Who computed the prompt may answer later."""
    store, given = store_of(), experts_of([*OPENING, 40])
    given[:8] = 0
    rows = RoutedExpertsRows(POOLED, store)
    rows.add(12, given, opening=(3, OPENING))
    rows_from(store, OPENING)
    routes = rows.aligned(13)
    assert routes is not None
    assert routes.known[:12].all()
    assert (routes.experts[:12] == experts_of([*OPENING, 40])).all()


@pytest.mark.parametrize(
    ("tokens", "salt", "unknown"),
    [
        (OPENING, 4, 8),  # other weights
        ([*OPENING[:6], 99, *OPENING[7:]], 3, 4),  # another second block
        ([99, *OPENING[1:]], 3, 8),  # the same block behind another one is another prefix
    ],
)
def test_other_prefixes_and_salts_stay_unknown(tokens: list[int], salt: int, unknown: int) -> None:
    store = store_of()
    rows_from(store, OPENING)
    routes = rows_from(store, tokens, fetched=8, salt=salt)
    assert int((~routes.known[:13]).sum()) == unknown
    assert counted(store) == (13 + 5, 8 - unknown, unknown)


def test_rows_die_with_the_kv_that_they_describe() -> None:
    """Versions that nobody trains on any more go, and above the limit the blocks that were not used for longest."""
    block = 4 * LAYERS * WIDTH
    store = store_of()
    rows_from(store, OPENING, salt=3)
    rows_from(store, OPENING, salt=4)
    assert store.bytes == 4 * block
    rows_from(store, OPENING, salt=5)
    assert store.bytes == 4 * block
    assert not rows_from(store, OPENING, salt=3, fetched=8).known[:8].any()
    assert rows_from(store, OPENING, salt=4, fetched=8).known[:8].all()
    small = store_of(limit_bytes=2 * block)
    rows_from(small, OPENING[:4])
    rows_from(small, OPENING[4:8])
    rows_from(small, OPENING[:4], fetched=4)  # used
    rows_from(small, [7, 7, 7, 7])
    assert small.bytes == 2 * block
    assert rows_from(small, OPENING[:4], fetched=4).known[:4].all()
    assert not rows_from(small, OPENING[4:8], fetched=4).known[:4].any()


def test_what_a_thread_has_prepared_is_kept_as_the_store_is_by_then() -> None:
    """Two answers are gone through at once: the block of the first that arrives stays, and old salts are too late."""
    store = store_of()
    first, second = experts_of(OPENING), experts_of(OPENING, shift=1)
    known = np.ones(len(OPENING), np.bool_)
    early, late = (store.blocks_of(3, OPENING, rows, known) for rows in (first, second))
    assert store.bytes == 0, "nothing is changed before the event loop says so"
    store.keep(3, early)
    store.keep(3, late)
    assert [rows is None for _, rows in store.blocks_of(3, OPENING, first, known)] == [True, True]
    wanted = np.zeros_like(first), np.zeros(len(OPENING), np.bool_)
    filled = store.fill(3, OPENING, *wanted)
    assert [count for _, count in filled] == [4, 4]
    assert (wanted[0][:8] == first[:8]).all()
    store.keep(5, [])
    assert store.bytes == 0
    store.keep(3, late)
    assert store.bytes == 0
    store.used(name for name, _ in filled)  # they have gone meanwhile


@pytest.mark.parametrize(("keep", "unknown"), [(True, 12), (False, 0)])
def test_without_experts_of_an_engine_all_rows_but_the_last_are_unknown(keep: bool, unknown: int) -> None:
    """Who does not want to know misses none; and nobody counts where there is no store."""
    settings = POOLED if keep else POOLED.unkept()
    store = store_of()
    assert RoutedExpertsRows(settings, store).aligned(13) is None
    assert counted(store) == (0, 0, unknown)
    assert RoutedExpertsRows(settings).aligned(13) is None


def test_without_a_store_a_conversation_has_rows_of_its_own_answers() -> None:
    rows = RoutedExpertsRows(POOLED)
    given = experts_of(OPENING)
    given[:4] = 0
    rows.add(11, given, opening=(3, OPENING))
    routes = rows.aligned(12)
    assert routes is not None
    assert routes.known.tolist() == [False] * 4 + [True] * 7 + [False]
    assert (routes.experts[4:11] == given[4:]).all()
    assert rows.nbytes == given.nbytes

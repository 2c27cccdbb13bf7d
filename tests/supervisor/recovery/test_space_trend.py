"""When a filesystem will be full, as far as its past says."""

from __future__ import annotations

import pytest

from hpcrl.supervisor.recovery.space_watch import SpaceTrend


def seen(*looks: tuple[float, int]) -> SpaceTrend:
    trend = SpaceTrend()
    for now, left in looks:
        trend.see(now, left)
    return trend


def test_what_shrinks_evenly_is_full_when_it_has_shrunk_to_nothing() -> None:
    """100 a second, as the best of either half of the time says."""
    trend = seen(*((now, 100_000 - 100 * now) for now in range(0, 400, 10)))
    found = trend.full_in_s()
    assert found is not None
    full_s, span_s = found
    assert span_s == 390.0
    # what is left after 390 s goes at this rate; the halves are one look of ten seconds apart at their edges
    assert full_s == pytest.approx((100_000 - 39_000) / 100, rel=0.06)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0.0, 90), (10.0, 60), (20.0, 30)], id="three looks are no trend"),
        pytest.param([(float(now), 1000) for now in range(9)], id="nothing is used"),
        pytest.param([(float(now), 1000 + now) for now in range(9)], id="it grows"),
        pytest.param([(5.0, 1000 - number) for number in range(9)], id="all in one moment"),
        # what is cleared again and again is not on its way to nothing
        pytest.param([(float(now), 1000 - 90 * (now % 10)) for now in range(40)], id="it comes back"),
        # an hour and more away
        pytest.param([(float(now), 100_000 - now) for now in range(0, 1800, 60)], id="too far away"),
        # more than four times as far as the past goes
        pytest.param([(float(now), 1000 - 10 * now) for now in range(0, 18, 2)], id="too little is known"),
    ],
)
def test_what_is_not_a_trend(looks: list[tuple[float, int]]) -> None:
    assert seen(*looks).full_in_s() is None


def test_only_the_last_half_hour_counts() -> None:
    steady = [(float(now), 50_000) for now in range(0, 3600, 60)]
    falling = [(3600.0 + now, 50_000 - 10 * now) for now in range(0, 1860, 60)]
    found = seen(*steady, *falling).full_in_s()
    assert found is not None
    assert found[1] <= 1800.0
    assert found[0] == pytest.approx((50_000 - 18_000) / 10, rel=0.08)


def test_both_halves_of_the_past_have_their_share() -> None:
    """What was left at the least in the second half, below that of the first, in half of the time: 400 in 30 s."""
    assert seen(*((10.0 * n, 1000 - 100 * n) for n in range(7))).full_in_s() == pytest.approx((30.0, 60.0))

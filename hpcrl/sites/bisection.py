"""Find bad nodes and bad pairs of nodes with few tries of groups. Pure: a group of nodes works or it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Faults(NamedTuple):
    """Causes of failing groups.

    Attributes
    ----------
    nodes:
        Nodes that fail alone, or with more than one other node.
    pairs:
        Two nodes that fail together, while each works with others, or where there are no others.
    groups:
        Larger groups that fail, while each pair of them that was tried works.
    sound:
        Nodes that work together.
    open:
        Nodes of which nothing is known, because tries or time were used up.
    """

    nodes: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    sound: tuple[str, ...] = ()
    open: tuple[str, ...] = ()


class _SpentError(Exception):
    """No more groups may be tried."""


class _Search:
    def __init__(self, works: Callable[[tuple[str, ...]], bool], most: int, may_go_on: Callable[[], bool]) -> None:
        self._works, self._left, self._may_go_on = works, most, may_go_on
        self._known: dict[frozenset[str], bool] = {}

    def works(self, group: Sequence[str]) -> bool:
        """Try a group, or take what is known: a part of a working group works, a whole with a failing part fails."""
        wanted = frozenset(group)
        for tried, good in self._known.items():
            if (good and wanted <= tried) or (not good and wanted >= tried):
                return good
        if not self._left or not self._may_go_on():
            raise _SpentError
        self._left -= 1
        self._known[wanted] = self._works(tuple(group))
        return self._known[wanted]

    def first_failing(self, sound: Sequence[str], more: Sequence[str]) -> int:
        """Return the smallest count of ``more`` that fails together with ``sound``; all of them are known to fail."""
        low, high = 0, len(more)
        while high - low > 1:
            middle = (low + high) // 2
            if self.works([*sound, *more[:middle]]):
                low = middle
            else:
                high = middle
        return high


def find_faults(
    nodes: Sequence[str],
    works: Callable[[tuple[str, ...]], bool],
    *,
    most: int = 64,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Faults:
    """Try groups of nodes until the failing ones are known; a sound set takes one try.

    Groups grow from a sound one: the smallest number of further nodes that makes it fail ends in a node that takes part
    in a fault, and its partner is found among the sound ones in the same way, by halves. A fault among n nodes takes
    some ``2 log2(n) + 3`` tries.

    Parameters
    ----------
    works:
        Returns whether a group works. A group that contains a failing one is taken to fail.
    most:
        Maximum tries.
    may_go_on:
        Asked before each try; False: time is over.
    """
    search = _Search(works, most, may_go_on)
    bad: list[str] = []
    pairs: list[tuple[str, str]] = []
    groups: list[tuple[str, ...]] = []
    sound: list[str] = []
    left = list(nodes)
    try:
        while left and not search.works([*sound, *left]):
            count = search.first_failing(sound, left)
            joined, node, rest = [*sound, *left[: count - 1]], left[count - 1], left[count:]
            if not search.works([node]):
                bad.append(node)
                sound, left = joined, rest
                continue
            partner_at = search.first_failing([node], joined)
            partner = joined[partner_at - 1]
            if partner_at > 1 and search.works([node, partner]):
                groups.append((*joined[:partner_at], node))
                sound, left = joined, rest
                continue
            blamed = _blamed(search, node, partner, [n for n in joined if n != partner], rest)
            if not blamed:
                pairs.append((partner, node))
            bad += blamed
            sound = [n for n in joined if n not in blamed]
            left = [node, *rest] if blamed == [partner] else rest
        return Faults(tuple(bad), tuple(pairs), tuple(groups), (*sound, *left))
    except _SpentError:
        known = {*bad, *sound, *(n for pair in pairs for n in pair), *(n for group in groups for n in group)}
        return Faults(
            tuple(bad), tuple(pairs), tuple(groups), tuple(sound), tuple(node for node in nodes if node not in known)
        )


def _blamed(search: _Search, node: str, partner: str, others: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return which of two nodes that fail together are bad; empty where it is the pair.

    Parameters
    ----------
    others:
        Nodes that work with the partner.
    rest:
        Nodes of which nothing is known.
    """
    if others:
        return [] if search.works([node, *others]) else [node]
    fail_with_both = []
    for third in rest:
        first, second = search.works([node, third]), search.works([partner, third])
        if first and second:
            return []
        if first != second:
            return [partner] if first else [node]
        fail_with_both.append(third)
        # where two other nodes work with each other, they are not the cause
        if any(search.works([other, third]) for other in fail_with_both[:-1]):
            return [partner, node]
    return []

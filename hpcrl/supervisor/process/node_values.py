"""Fills values of a role's command and environment that only its node knows: its rank in the replica, and its disk.

Standard library only, as the guard, which fills it in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrl.compile_caches import COMPILE_CACHES
from hpcrl.storage.trusted_paths import check_parent, make_private

_NODE_RANK = re.compile(r"\{(?:(\d+)-)?node_rank(?:\*(\d+))?\}")


def fill_node_rank(part: str, node_rank: int, hosts: Sequence[str] = ()) -> str:
    """Replace ``{node_rank}`` and ``{node_rank*N}`` in one word of a command, and ``{node_host}`` by this node's.

    ``{M-node_rank*N}`` is what is left of the number ``M``.
    """
    if hosts:
        part = part.replace("{node_host}", hosts[node_rank])

    def filled(match: re.Match[str]) -> str:
        value = node_rank * int(match[2] or 1)
        return str(value if match[1] is None else int(match[1]) - value)

    return _NODE_RANK.sub(filled, part)


def fill_node(
    env: Mapping[str, str], node_rank: int, *, hosts: Sequence[str], interfaces: Sequence[str]
) -> dict[str, str]:
    """Return variables whose whole value is ``{node_host}`` or ``{node_interface}``, filled for this node.

    Where the supervisor does not know it the variable is left out: the library chooses.
    """
    known = {"{node_host}": hosts, "{node_interface}": interfaces}
    filled = {}
    for name, value in env.items():
        if value not in known:
            filled[name] = value
        elif known[value]:
            filled[name] = known[value][node_rank]
    return filled


def own_caches(env: Mapping[str, str], scratch: str) -> None:
    """Make compile caches below ``scratch``, on the node's disk, private: their contents are loaded as code.

    Raises
    ------
    OSError
        Another user owns the directory of the run on that disk, or can change or replace it.
    """
    for cache in (env[name] for name in COMPILE_CACHES if env.get(name)):
        if scratch and cache != scratch and Path(cache).is_relative_to(scratch):
            Path(scratch).mkdir(parents=True, exist_ok=True)
            check_parent(Path(scratch))
            make_private(Path(scratch, Path(cache).relative_to(scratch).parts[0]))

"""What earlier versions wrote into a run's profile, in today's form: old runs can be looked at and resumed."""

from __future__ import annotations

from typing import Any

__all__ = ["cluster_of_today"]


def cluster_of_today(tree: Any) -> Any:
    """A resolved profile as it would be written today; what is no mapping is given back as it is."""
    for partition in _mapping(tree, "partitions").values():
        _mapping(partition, "node").pop("scratch_gb_s", None)
    return tree


def _mapping(tree: Any, key: str) -> dict[str, Any]:
    found = tree.get(key) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}

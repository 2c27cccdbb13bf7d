"""Metrics of KV that moves, where two connectors work together: vLLM 0.32 ends the server over one that has none.

`MultiConnector` hands what its connectors have counted to their metrics in the server, and asserts that each has some.
`MooncakeConnector`, between prefill and decode, counts but has none: together with the pool's connector every server
would end at its first transfer. Here counts without a metric are left out. No torch is imported.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_hpcrl_leaves_out"


def leave_out_uncounted() -> None:
    """Change vLLM's metrics of several connectors, once; an unknown version is left unchanged."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (  # noqa: PLC0415
            MultiKVConnectorPromMetrics,
        )
    except ImportError:
        return
    original = MultiKVConnectorPromMetrics.observe
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        known = getattr(self, "_prom_metrics", transfer_stats_data)
        shown = {name: stats for name, stats in transfer_stats_data.items() if name in known}
        original(self, shown, engine_idx)

    setattr(observe, _MARK, True)
    MultiKVConnectorPromMetrics.observe = observe

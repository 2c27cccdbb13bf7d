"""The entry point ``vllm.general_plugins``: vLLM calls `register` in each of its processes.

The weight transfer engine is vLLM's own extension point. Changed everywhere is what becomes of rows of experts that an
engine does not know: they are marked (`hpcrl.inference.vllm.experts`); KV that cannot be fetched is computed after some
tries (`hpcrl.inference.vllm.fetches`); and what no metric shows ends no server
(`hpcrl.inference.vllm.connector_metrics`). The corrections of `hpcrl.inference.vllm.cpu`
are applied only to the CPU build. Servers that no run of hpcrl started are left as they are.
"""

from __future__ import annotations

import os

from hpcrl.inference.vllm.connector_metrics import leave_out_uncounted
from hpcrl.inference.vllm.experts import allow_beside_transfer, mark_unknown_rows
from hpcrl.inference.vllm.fetches import limit_fetches

ENABLE_VARIABLE = "HPCRL_VLLM_PLUGIN"
"""Set to 1 by the plan for engines; without it the plugin does nothing."""
TRANSFER_BACKEND = "hpcrl"
"""``--weight-transfer-config '{"backend": "hpcrl"}'``."""


def register() -> None:
    """Add hpcrl's weight transfer engine, the corrections that all builds need, and on CPU those of that build.

    May be called more than once.

    Raises
    ------
    RuntimeError
        The CPU build has an unchecked version.
    """
    if os.environ.get(ENABLE_VARIABLE) != "1":
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "hpcrl.inference.vllm.weights", "HandoffTransferEngine"
        )
    mark_unknown_rows()
    allow_beside_transfer()
    limit_fetches()
    leave_out_uncounted()
    if current_platform.is_cpu():
        from hpcrl.inference.vllm.cpu import apply_corrections  # noqa: PLC0415

        apply_corrections()

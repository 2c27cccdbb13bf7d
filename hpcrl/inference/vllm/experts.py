"""Marks missing rows of experts of KV from elsewhere, for which vLLM 0.32 ends the engine, or does not start.

vLLM keeps the experts of a block of tokens together with its own KV. A block whose KV was fetched (pool, host) has none
in this engine; a request for them ends the whole engine, and so does one whose fetched prefix ends within a block. Here
unknown rows are zero in all layers. No router makes such a row, because a token's experts differ (so a model with one
expert per token is refused with such KV), and a reader of the answer recognises them.

Between prefill and decode vLLM refuses to return experts at all, because the decode engine has none of the prompt's.
Marks say so, and `hpcrl.inference.vllm.routed_experts_middleware` has the others.

Only what would have ended the engine goes another way; everything else is vLLM's own code. No torch is imported.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_hpcrl_marks"


def mark_unknown_rows() -> None:
    """Change vLLM's two classes that hold rows, once; a version without them is left alone.

    It has nothing to mark: what such a version returns is checked by who reads it.
    """
    try:
        from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer  # noqa: PLC0415
        from vllm.distributed.aux_output_connector.store import BlockObjectStore, BlockObjectStoreError  # noqa: PLC0415
    except ImportError:
        return
    if hasattr(BlockObjectStore, _MARK):
        return
    get, capture = BlockObjectStore.get_concatenated, RoutedExpertsBuffer.capture

    @functools.wraps(get)
    def get_concatenated(self: Any, keys: list[str]) -> bytes:
        try:
            return get(self, keys)
        except BlockObjectStoreError:
            return b"".join(get(self, [key]) if key in self._lru else bytes(self.object_nbytes) for key in keys)

    @functools.wraps(capture)
    def capture_within_a_block(self: Any, request_id: Any, token_start: int, rows: Any) -> Any:
        before = token_start % self.block_size
        if before and request_id not in self._requests:
            tail = self._tail(request_id, token_start - before)
            self._rows[tail.slot, :before] = 0
            tail.length = before
        return capture(self, request_id, token_start, rows)

    BlockObjectStore.get_concatenated, RoutedExpertsBuffer.capture = get_concatenated, capture_within_a_block
    setattr(BlockObjectStore, _MARK, True)


def allow_beside_transfer() -> None:
    """Let engines return experts with a connector between prefill and decode, once; all else is still checked."""
    from vllm.config import VllmConfig  # noqa: PLC0415

    check = VllmConfig._verify_aux_output_compatibility
    if hasattr(check, _MARK):
        return

    @functools.wraps(check)
    def verify(self: Any) -> None:
        transfer, self.kv_transfer_config = self.kv_transfer_config, None
        try:
            check(self)
        finally:
            self.kv_transfer_config = transfer

    setattr(verify, _MARK, True)
    VllmConfig._verify_aux_output_compatibility = verify

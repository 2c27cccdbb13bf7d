"""Limits the tries to fetch KV for one request: vLLM 0.32 repeats them as long as it is reported to exist.

A pool, a host's memory or a prefill engine may say that it has a prefix and not be able to give it, for minutes: the
engine that owns the memory died and is still listed, a disk is broken. With ``kv_load_failure_policy: recompute`` vLLM
looks again then, finds the prefix again and fails again, until the request's deadline. Here a request whose first
block could not be fetched `TRIES` times is one that reads no prefix cache: the engine computes its whole prompt.

No torch is imported.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

TRIES = 2
"""Maximum fetches for one request. The second has a new lease if the first one's ended meanwhile."""
_MARK = "_hpcrl_tries"
_log = logging.getLogger("vllm.hpcrl")


def limit_fetches() -> None:
    """Change vLLM's scheduler, once; an unknown version is left unchanged."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    original = getattr(Scheduler, "_update_waiting_for_remote_kv", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update(self: Any, request: Any) -> Any:
        failed = request.request_id in self.failed_recving_kv_req_ids
        result = original(self, request)
        # if a part was fetched vLLM continues from there, and does not look again
        if failed and request.num_computed_tokens == 0:
            tries = getattr(request, _MARK, 0) + 1
            setattr(request, _MARK, tries)
            if tries >= TRIES:
                request.skip_reading_prefix_cache = True
                _log.warning(
                    "KV of request %s was found and could not be fetched %d times: it is computed",
                    request.request_id,
                    tries,
                )
        return result

    setattr(update, _MARK, True)
    Scheduler._update_waiting_for_remote_kv = update

"""Logs of rollouts that tests write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ledger_entries import finished

from hpcrl.dock.ledger.log import RolloutLog


def open_log(path: Path, *, attempt: int = 1, restored: int = 0) -> RolloutLog:
    return RolloutLog(path, attempt=attempt, restored=restored, limit_s=5.0)


def keep(log: RolloutLog, group: int, member: int, tokens: int = 100) -> Any:
    arrays = {"tokens": np.full(tokens, 10 * group + member, dtype=np.int32)}
    return log.finish(b"about", arrays, lambda place: finished(group, member, place=place))

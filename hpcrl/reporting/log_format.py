"""The format of hpcrl's log lines: times have their zone, so that logs of several hosts can be merged."""

from __future__ import annotations

import logging
import time
from typing import TextIO


class _ZonedFormatter(logging.Formatter):
    """Writes times as ``2026-01-31 12:00:00,123+0100``."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = time.localtime(record.created)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', moment)},{int(record.msecs):03d}{time.strftime('%z', moment)}"


def start_logging(words: str, *, stream: TextIO | None = None) -> None:
    """Log from INFO on to a stream, the standard error by default, unless logging has begun already.

    Parameters
    ----------
    words:
        Format of the text after the time, as in `logging`.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_ZonedFormatter(f"%(asctime)s {words}"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

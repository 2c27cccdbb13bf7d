"""A message on trial."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from hpcrl.config.outlets import NotifierConfig
from hpcrl.runs.outlets.interface import Notice
from hpcrl.runs.outlets.notices.delivery import TryResult, send_in_process


def send_sample(config: NotifierConfig, name: str, environ: Mapping[str, str] | None = None) -> TryResult:
    """Send a test message about a run or a recipe by one notifier, once, and return what became of it.

    Parameters
    ----------
    environ:
        Variables of its process; None: those of this one.
    """
    why = (
        "this is a test: nothing has happened",
        f"events that would be sent: {', '.join(config.events)}",
        f"hpcrl why {name}",
    )
    notice = Notice(
        id=f"test.{uuid.uuid4().hex}",
        event="test",
        name=name,
        directory=Path.cwd(),
        attempt=0,
        step=0,
        time_s=time.time(),
        title=f"hpcrl: test message of {config.name} for {name}",
        why=why,
    )
    return send_in_process(config, notice, config.timeout_s, environ)

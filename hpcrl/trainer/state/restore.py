"""Choosing the checkpoint to restore: all ranks read, each its share of the bytes, and all get one answer."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision, SkippedEntry
from hpcrl.checkpoints.verify import damaged_files, share_of
from hpcrl.errors import CheckpointError
from hpcrl.trainer.parallel.ranks import Ranks


def choose_checkpoint(
    ledger: CheckpointLedger, ranks: Ranks, *, content: bool, timeout_s: float, only: Path | None = None
) -> RestoreDecision:
    """Return the newest entry that matches its manifest. Collective: all ranks get the same answer.

    Parameters
    ----------
    only:
        The only entry that may be taken; any of the ledger by default.
    content:
        Whether every byte is compared, or sizes only.
    timeout_s:
        Timeout in seconds for the checks of all entries together.

    Raises
    ------
    DeadlineError, PeerLostError
        The timeout passed, or a rank was lost; it is unknown which entry is intact.
    """
    started = time.monotonic()
    skipped: list[SkippedEntry] = []
    if only is not None:
        candidates = [(int(only.name.removeprefix("step-")), only)]
    else:
        steps = ranks.on_leader(ledger.steps, "listing checkpoints")
        candidates = [(step, ledger.path_of(step)) for step in reversed(steps)]
    for step, path in candidates:
        left_s = timeout_s - (time.monotonic() - started)

        def look(path: Path = path, left_s: float = left_s) -> list[str]:
            return _problems(path, ranks, content=content, deadline_s=left_s)

        reports = ranks.all_succeed(look, f"verifying checkpoint {step}")
        problems = sorted({problem for report in reports for problem in report})
        if not problems:
            return _decision(step, started, skipped, content=content)
        # else it was removed meanwhile
        if only is not None or step in ranks.on_leader(ledger.steps, "listing checkpoints"):
            skipped.append(SkippedEntry(step, f"{path} is damaged: " + "; ".join(problems)))
    return _decision(None, started, skipped, content=content)


def _problems(path: Path, ranks: Ranks, *, content: bool, deadline_s: float) -> list[str]:
    """Return the problems that this rank finds in its share of an entry."""
    try:
        entry = CheckpointEntry.open(path)
    except CheckpointError as error:
        return [str(error)]
    share = share_of(entry.manifest.files, ranks.rank, ranks.size)
    return damaged_files(entry.path, share, content=content, deadline_s=max(0.0, deadline_s))


def _decision(step: int | None, started: float, skipped: list[SkippedEntry], *, content: bool) -> RestoreDecision:
    return RestoreDecision(
        step=step,
        verified="content" if content else "sizes",
        seconds=time.monotonic() - started,
        skipped=skipped,
    )

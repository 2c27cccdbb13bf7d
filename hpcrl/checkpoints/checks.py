"""Comparisons of entries with their manifests: author, time and result, in ``checkpoints/step-000010.check.json``.

The files lie in the directory of the entries, as pins do. A check is valid for the entry whose manifest it read, not
for one that was saved later under the same step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from hpcrl.checkpoints.ledger import MANIFEST, CheckpointLedger
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of an entry with its manifest.

    Attributes
    ----------
    manifest_xxh3_128:
        Hash of the manifest that was there; empty where it could not be read.
    compared:
        Every byte, or sizes of files only.
    time_s:
        Seconds since the epoch.
    by:
        For people: ``attempt 2``, or a user.
    problem:
        Description of the problem; empty where there is none.
    """

    step: int
    manifest_xxh3_128: str
    compared: Literal["content", "sizes"]
    time_s: float
    by: str
    problem: str = ""


def record_check(ledger: CheckpointLedger, step: int, *, content: bool, by: str, problem: str = "") -> None:
    """Write down what a comparison found; it replaces the one before.

    A comparison of sizes that found nothing says less than one of every byte, and does not replace it.

    Raises
    ------
    OSError
        The filesystem refused.
    """
    before = read_check(ledger, step)
    if not content and not problem and before is not None and before.compared == "content":
        return
    check = Check(
        step=step,
        manifest_xxh3_128=_hash_of_manifest(ledger, step),
        compared="content" if content else "sizes",
        time_s=time.time(),
        by=by,
        problem=problem,
    )
    write_json(_path(ledger, step), check)


def read_check(ledger: CheckpointLedger, step: int) -> Check | None:
    """Return the last comparison of the entry that exists now; None where it was never compared."""
    try:
        check = msgspec.json.decode(_path(ledger, step).read_bytes(), type=prepared(Check))
    except (OSError, msgspec.DecodeError):
        return None
    return check if check.manifest_xxh3_128 == _hash_of_manifest(ledger, step) else None


def forget_check(ledger: CheckpointLedger, step: int) -> None:
    """Remove what is known of an entry that is gone."""
    _path(ledger, step).unlink(missing_ok=True)


def _path(ledger: CheckpointLedger, step: int) -> Path:
    return ledger.root / f"{ledger.path_of(step).name}.check.json"


def _hash_of_manifest(ledger: CheckpointLedger, step: int) -> str:
    try:
        return xxhash.xxh3_128_hexdigest((ledger.path_of(step) / MANIFEST).read_bytes())
    except OSError:
        return ""

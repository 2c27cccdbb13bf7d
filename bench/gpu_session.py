"""What only a GPU can show, on one card, in parts of ten minutes at most: correctness, kernels, whole steps.

    python bench/gpu_session.py correctness kernels whole --output DIR
    python bench/gpu_session.py kernels --output DIR --only sparse head     some checks of a part
    python bench/gpu_session.py whole --output DIR --tiny                   small sizes, also on a processor

Each check runs in a process of its own: an error of the device ends one check, and so does a check that takes longer
than its limit. Figures are printed and written to ``DIR/rows.jsonl`` as they come. A later call with the same DIR goes
on behind the checks that are done; ``--again`` runs them anew. The end writes ``DIR/session.json``; on a GPU
``--record`` writes it to ``bench/results/gpu-<card>.json`` as well.

It needs hpcrl's packages and torch 2.11 or later; ``bench/gpu_wheels.py`` collects those for a machine without a
network. `python3 -m pytest` is what the check ``tests`` needs more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from harness import ROOT, record

sys.path.insert(0, str(ROOT))

# before processes are forked: imports are made once. Nothing here may touch the device.
from gpu_checks import PARTS
from gpu_checks.check import Check, Session

import hpcrl.trainer.step.policy  # noqa: F401
from hpcrl.errors import UsageError

_LEAST_S = 10.0
"""A check is not begun where less time is left."""
_TINY = 4
"""How much longer checks of small sizes may take."""
_SAID = 3
"""Exit code of a process that wrote its error into a row."""


class Rows:
    """The rows of a session's file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "rows.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; what a kill cut short is left out."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def add(self, check: str, **row: Any) -> None:
        """Append a row and print it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"check": check, **row}) + "\n")
        said = " ".join(f"{key}={_shown(value)}" for key, value in row.items() if key != "trace")
        print(f"{check:22} {said}", flush=True)

    def done(self) -> set[str]:
        """Names of the checks that came to their end."""
        return {row["check"] for row in self.read() if row.get("done")}


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _child(check: Check, rows: Rows, session: Session) -> None:
    """Run one check; its errors are a row of it."""
    os.setpgid(0, 0)
    os.environ.update(check.env)
    try:
        for row in check.run(session):
            rows.add(check.name, **row)
    except UsageError as error:
        # a library that is not installed, or not for this device
        rows.add(check.name, not_here=str(error).splitlines()[0])
    except BaseException as error:  # noqa: BLE001 - whatever happens belongs into the report
        first = next(iter(str(error).splitlines()), "")
        trace = traceback.format_exc()[-3000:]
        rows.add(check.name, failed=f"{type(error).__name__}: {first}"[:500], trace=trace)
        print(trace[-1500:], flush=True)
        sys.exit(_SAID)


def run_check(check: Check, rows: Rows, session: Session, left_s: float) -> bool:
    """Run ``check`` in a process of its own, for its limit or ``left_s`` at most; returns whether it is done."""
    # limits are of a GPU: small sizes run on processors, which others may use as well
    limit, begun = min(check.limit_s * (_TINY if session.tiny else 1), left_s), time.monotonic()
    session.until = begun + limit * 0.9
    process: ForkProcess = multiprocessing.get_context("fork").Process(target=_child, args=(check, rows, session))
    process.start()
    process.join(limit)
    overran = process.is_alive()
    if overran:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        rows.add(check.name, failed=f"took longer than {limit:.0f} s")
    elif process.exitcode not in (0, _SAID):
        rows.add(check.name, failed=f"its process ended with {process.exitcode}")
    whole = not overran and not process.exitcode
    rows.add(check.name, done=whole, seconds=round(time.monotonic() - begun, 1))
    return whole


def chosen(parts: list[str], only: list[str]) -> Iterator[Check]:
    """The checks of some parts, in their order."""
    for part in parts:
        for check in PARTS[part]:
            if not only or any(fnmatch(check.name.partition(".")[2], each) for each in only):
                yield check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="checks of these names (*, ?)")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of them; no check is begun behind it")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--again", action="store_true", help="also checks that are done")
    parser.add_argument("--record", action="store_true", help="write the figures to bench/results as well")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows, session = Rows(arguments.output), Session(tiny=arguments.tiny, scratch=arguments.output)
    end, before, ran, left_out = time.monotonic() + arguments.seconds, rows.done(), list[str](), list[str]()
    for check in chosen(arguments.parts, arguments.only):
        if check.name in before and not arguments.again:
            continue
        if end - time.monotonic() < _LEAST_S:
            left_out.append(check.name)
        else:
            run_check(check, rows, session, end - time.monotonic())
            ran.append(check.name)
    figures = summary(rows.read())
    (arguments.output / "session.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    failed = [f"{row['check']}: {row['failed']}" for row in figures["rows"] if "failed" in row]
    print(f"{len(ran)} checks ran, {len(failed)} rows failed, {len(left_out)} had no time: {', '.join(left_out)}")
    for line in failed:
        print(f"FAILED {line}")
    if arguments.record and (card := figures["device"]) != "cpu":
        record(f"gpu-{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}", figures)
    sys.exit(bool(failed or left_out))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of the last run of each check, and what they were measured on."""
    latest: dict[str, list[dict[str, Any]]] = {}
    finished = set[str]()
    for row in rows:
        if row["check"] in finished:
            latest.pop(row["check"], None)
            finished.discard(row["check"])
        latest.setdefault(row["check"], []).append({key: value for key, value in row.items() if key != "trace"})
        if "done" in row:
            finished.add(row["check"])
    device = next((row["device"] for row in reversed(rows) if "device" in row), "cpu")
    return {"device": device, "rows": [row for group in latest.values() for row in group]}


if __name__ == "__main__":
    main()

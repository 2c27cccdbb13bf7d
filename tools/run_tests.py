"""Run the tests as `make test` does: all of them, then the few that failed once more, alone.

Tests here start real clusters, servers and runs. On a machine with few processors two of them at a time may starve a
third beyond its deadlines. What fails alone, too, is a failure; what then passes is named at the end as unsteady, for
somebody to mend. Where more than `MOST` fail, nothing is tried again.

    python tools/run_tests.py [--workers N] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3
"""Failures that may be tried again: more are no accident of the machine."""
_TESTS_FAILED = 1
"""pytest's exit code where tests ran and some failed."""


def run(workers: int, arguments: list[str]) -> int:
    """Exit code of the tests, with the second try."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-tests-") as cache:
        pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
        parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else ["-p", "no:xdist"]
        code = subprocess.run([*pytest, *parallel], check=False).returncode
        if code != _TESTS_FAILED:
            return code
        failed = sorted(json.loads((Path(cache) / "v/cache/lastfailed").read_text()))
        if len(failed) > MOST:
            return code
        print(f"\n{len(failed)} failed; once more, alone:", *failed, sep="\n  ", flush=True)
        code = subprocess.run([*pytest, "-p", "no:xdist", "--last-failed"], check=False).returncode
    if code == 0:
        print("\nUNSTEADY: failed beside other tests, passed alone:", *failed, sep="\n  ", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="tests at a time")
    own, others = parser.parse_known_args()
    return run(own.workers, others)


if __name__ == "__main__":
    sys.exit(main())

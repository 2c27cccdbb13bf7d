"""``hpcrl submit --follow`` without recipe and model: follow a run that was created, with Ctrl-C as there."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from hpcrl.cli.following import _follow
from hpcrl.runs.contents import RunContents
from hpcrl.runs.rundir import RunDir
from hpcrl.submit.submission import submit_attempt

if __name__ == "__main__":
    run = RunDir(Path(sys.argv[1]))
    submit_attempt(RunContents.read(run))
    sys.exit(_follow(run, Console(stderr=True)))

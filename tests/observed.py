"""What ``hpcrl status`` says, for tests that wait for it: an interpreter for every look would starve what they test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.runs import job_facts
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.usage import status_document
from hpcrl.slurm.lookup import look_up


def status_of(run: RunDir) -> Any:
    """What ``hpcrl status RUN --json`` prints. As there, Slurm is asked: without its word a requeued run looks lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_facts, "_sources", [look_up])
        return json.loads(status_document(run))

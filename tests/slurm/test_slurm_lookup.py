"""What readers of runs are told of jobs: one question about many, and whose they are."""

from __future__ import annotations

import pytest
from fake_slurm import FakeSlurm, job

from hpcrl.runs.record import Submission
from hpcrl.slurm import lookup


def test_a_number_that_somebody_else_has_now_is_not_our_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a site loses its state, numbers begin again."""
    monkeypatch.setattr(lookup, "client_of", lambda submission, timeout_s: slurm.client())
    slurm.queue = {7: job(7, "RUNNING", UserID="1234")}
    states = {}
    for owner in (1234, 1235, None):
        monkeypatch.setattr(lookup, "_watchers", {})
        monkeypatch.setattr(lookup, "_watched", {})
        submission = Submission(
            submitted_at_s=0.0, executor="slurm", job_id="7", folder="", after_attempt=0, user_id=owner
        )
        fact = lookup.look_up([submission])["7"]
        states[owner] = (fact.state, fact.gone, fact.holding)
    assert states == {1234: ("RUNNING", False, True), 1235: ("UNKNOWN", True, False), None: ("RUNNING", False, True)}

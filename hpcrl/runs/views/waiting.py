"""Reasons why a run waits in the queue, in words."""

from __future__ import annotations

import time

from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.observe import RunView

_DAY_S = 86400.0


def waiting_words(view: RunView, job: JobFact) -> str:
    """Return what a waiting job needs, why Slurm lets it wait, and when Slurm expects to start it, in words."""
    words = []
    if view.nodes_needed:
        usable = "" if job.usable_nodes is None else f", {job.usable_nodes} usable"
        words.append(f"needs {view.nodes_needed} node{'s' if view.nodes_needed > 1 else ''}{usable}")
    if job.reason not in ("", "None"):
        words.append(f"reason {job.reason}")
    if job.start_s is not None and job.start_s > time.time():
        far = job.start_s - time.time() > _DAY_S
        when = time.strftime("%Y-%m-%d %H:%M" if far else "%H:%M", time.localtime(job.start_s))
        words.append(f"Slurm expects {when}")
    if view.elastic:
        words.append("its engines wait until it has its nodes")
    return f": {'; '.join(words)}" if words else ""

"""Write the page: one HTML file with its styles, its programs and its data, which fetches nothing.

Texts of a run (rollouts, messages of programs, names) are data of others. The template escapes them, data of the
programs is JSON without ``<``, programs only make text of it, and the policy of the page allows no other programs.
People hand pages on, so values that look like secrets, and the runs' own secrets, are replaced.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from hpcrl.analysis.page.chosen_rollouts import shown_rollouts
from hpcrl.analysis.page.material import RunMaterial, read_material
from hpcrl.analysis.page.page_values import ASSETS, page_templates, page_values, plot_runs
from hpcrl.analysis.page.plotly_program import read_plotly
from hpcrl.errors import UsageError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretScan
from hpcrl.storage.files import atomic_write

MOST_BYTES = 6_000_000
"""Maximum size of a page."""


def write_page(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the page of runs, finished or not; return its path.

    Raises
    ------
    MissingExtraError
        plotly is not installed.
    UsageError
        A run has no step yet.
    RunDirError
        A directory is not a run.
    """
    plotly = read_plotly()
    materials = [read_material(run) for run in runs]
    for each in materials:
        if not each.history.records:
            raise UsageError(f"{each.history.name} has no step yet, so there is nothing to plot")
    atomic_write(path, _page(materials, plotly).encode())
    return path


def _page(materials: Sequence[RunMaterial], plotly: str) -> str:
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    rollouts = [shown_rollouts(each.run, each.finished, len(materials)) for each in materials]
    packed = base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode()
    scan = SecretScan.of_runs(each.run for each in materials)
    values = page_values(plot_runs(materials), rollouts, scan) | {
        "made_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "script_hashes": Markup(" ".join(_hash(text) for text in (script, plotly))),
        "css": Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "plotly": Markup(packed),
    }
    return page_templates().get_template("page.html.j2").render(values)


def _hash(text: str) -> str:
    """Return the source of a program for the policy of the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

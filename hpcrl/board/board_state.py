"""State that the pages of a board share: runs, templates and programs, and values that are kept for a while."""

from __future__ import annotations

import gc
import gzip
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from hpcrl import __version__
from hpcrl.analysis.page.marks import read_marks
from hpcrl.analysis.page.material import RunMaterial, read_material
from hpcrl.analysis.page.page_values import ASSETS, PlottedRuns, page_templates, plot_runs
from hpcrl.analysis.page.planned_times import load_planner
from hpcrl.analysis.page.plotly_program import read_plotly
from hpcrl.board.file_stamps import StampedCache, files_stamp, record_stamp, stamp_of
from hpcrl.board.reading_pools import ReadingPools
from hpcrl.board.run_keys import RunKeys
from hpcrl.dock.ledger.replay import Replay
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretScan

_OWN_ASSETS = Path(__file__).parent / "assets"
MOST_COMPARED = 6
"""Maximum number of runs of one page; material of as many is kept."""
_KEPT_LEDGERS, _KEPT_REASONS = 2, 100
MOST_LEDGER_BYTES = 64 << 20
"""Maximum size of a ledger that a board reads: it is kept in memory, on a login node."""


class BoardAnswer(NamedTuple):
    """Answer of a page.

    Attributes
    ----------
    html:
        None: what the browser has is still right.
    tag:
        Stands for the content.
    """

    html: str | None
    tag: str


class Asset(NamedTuple):
    """File of the pages: content, type, and its name with a digest of the content."""

    content: bytes
    kind: str
    name: str


class Board:
    """A board over directories of runs.

    Parameters
    ----------
    roots:
        Directories of runs; none: as ``hpcrl ls`` finds them.

    Raises
    ------
    MissingExtraError
        plotly is not installed.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self.pools = ReadingPools()
        self.keys = RunKeys(roots, self.pools)
        self.roots = list(roots)
        self.ledgers: StampedCache[Replay] = StampedCache(_KEPT_LEDGERS)
        self.reasons: StampedCache[dict[str, Any]] = StampedCache(_KEPT_REASONS)
        self.comparisons: StampedCache[list[str]] = StampedCache(MOST_COMPARED)
        self._materials: StampedCache[RunMaterial] = StampedCache(MOST_COMPARED)
        self._plotted: StampedCache[PlottedRuns] = StampedCache(MOST_COMPARED)
        self._scans: StampedCache[SecretScan] = StampedCache(_KEPT_REASONS)
        texts = [
            ("page.css", "text/css", (ASSETS / "page.css").read_text(encoding="utf-8")),
            ("board.css", "text/css", (_OWN_ASSETS / "board.css").read_text(encoding="utf-8")),
            ("page.js", "text/javascript", (ASSETS / "page.js").read_text(encoding="utf-8")),
            ("board.js", "text/javascript", (_OWN_ASSETS / "board.js").read_text(encoding="utf-8")),
            ("plotly.js", "text/javascript", read_plotly()),
        ]
        named = {name: _asset(name, kind, text) for name, kind, text in texts}
        self.assets = {asset.name: asset for asset in named.values()}
        self._packed: StampedCache[bytes] = StampedCache(len(self.assets))
        self._templates = page_templates(_OWN_ASSETS)
        self._templates.globals["asset"] = {name: f"/assets/{asset.name}" for name, asset in named.items()}
        self._templates.globals["hpcrl_version"] = __version__
        self._salt = secrets.token_hex(8)

    def warm(self) -> None:
        """Make what the first page of a run would wait for: templates, the planner, and packed programs."""
        for name in self._templates.list_templates(extensions=["j2"]):
            self._templates.get_template(name)
        load_planner()
        for name in self.assets:
            self.packed(name)
        # what is loaded stays: looking through it for garbage would be a tenth of the first reading of a long run
        gc.freeze()

    def packed(self, name: str) -> bytes:
        """Return the content of an asset, compressed once: the plotting program takes 0.2 s."""
        return self._packed.get(name, "", lambda: gzip.compress(self.assets[name].content, 6, mtime=0))

    def tag(self, *parts: object) -> str:
        """Return a tag of an answer that depends on these values; another board has others."""
        return f'"{stamp_of([self._salt, *parts])}"'

    def scan(self, runs: Sequence[RunDir]) -> SecretScan:
        """Return what finds secrets in texts of runs; it knows the runs' own secrets as of their files now."""
        files = [path for run in runs for path in (run.recipe_path, run.cluster_path, run.plan_path)]
        key = tuple(run.path for run in runs)
        return self._scans.get(key, files_stamp(files), lambda: SecretScan.of_runs(runs))

    def render(
        self,
        template: str,
        tag: str,
        *,
        of: Sequence[RunDir] = (),
        cleaned: Mapping[str, Any] = MappingProxyType({}),
        **values: Any,
    ) -> BoardAnswer:
        """Return the answer of a template; secrets in texts are replaced.

        Parameters
        ----------
        of:
            Runs that it is about: their own secrets are replaced, too.
        cleaned:
            Values in which the scan of these runs has replaced secrets already; ``values`` come before them.
        """
        shown = {**cleaned, **self.scan(of).cleaned(values)}
        return BoardAnswer(self._templates.get_template(template).render(tag=tag, page_kind=template, **shown), tag)

    def materials(self, runs: Sequence[RunDir]) -> tuple[list[RunMaterial], str]:
        """Return the material of runs, with their states now, and a stamp of what was read.

        Raises
        ------
        RunDirError
            A directory is not a run.
        """
        found, stamps = list[RunMaterial](), list[str]()
        for run in runs:
            stamp, view = record_stamp(run), observe(run)
            make = partial(read_material, run, most_ledger_bytes=MOST_LEDGER_BYTES)
            kept = self._materials.get(run.path, stamp, make)
            history = replace(kept.history, view=view)
            found.append(replace(kept, history=history, marks=read_marks(history)))
            stamps.append(stamp)
        return found, stamp_of(stamps)

    def plotted(self, runs: Sequence[RunDir]) -> PlottedRuns:
        """Return the plots of runs, with their states now (errors: `materials`)."""
        materials, stamp = self.materials(runs)
        plotted = self._plotted.get(tuple(run.path for run in runs), stamp, lambda: plot_runs(materials))
        return plotted._replace(materials=materials)


def view_stamp(view: RunView) -> str:
    """Return a stamp of the state of a run without the times of its heartbeat."""
    plain = msgspec.structs.replace(view, heartbeat_s=None, clocks={})
    return stamp_of([msgspec.json.encode(plain)])


def clock(seconds: float | None) -> str:
    """Return a time in UTC, to the second; ``-`` for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _asset(name: str, kind: str, text: str) -> Asset:
    content = text.encode()
    stem, _, suffix = name.rpartition(".")
    return Asset(content, kind, f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}.{suffix}")

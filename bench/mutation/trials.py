"""Runs tests of a copy of the checkout in children of a process that has imported what takes long.

Importing torch takes longer than most tests. What is imported once is everything but hpcrl and its tests.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mutation import recorder
from mutation.operators import Mutant

#: what takes long, or needs more than this machine
MARKERS = "not (slow or e2e or slurm or vllm or triton or campaign or nightly or gpu)"
_IMPORTED = ("torch", "numpy", "transformers", "safetensors.torch", "tokenizers", "aiohttp.web", "pydantic", "msgspec")
_IMPORTED += ("rich.console", "typer", "submitit", "yaml", "jinja2", "psutil", "xxhash")


#: packages that `tools/bootstrap.py` installs for tests, and that git does not have
_INSTALLED = (".chat-templates", ".deepep", ".reasoning-gym")


def import_once() -> None:
    """Import what children share; nothing of it may have started a thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "hpcrl" not in sys.modules, "children import it from the copy"
    gc.freeze()


def copied_tree(root: Path, into: Path) -> Path:
    """Copy what git has of a checkout, as it lies there now, and link what tests would be skipped without."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
    # tests ask git which files there are
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(into), *words], check=True, capture_output=True)
    for name in _INSTALLED:
        if (root / name).is_dir():
            (into / name).symlink_to((root / name).resolve())
    return into


_changes: list[Mutant] = []


@contextlib.contextmanager
def changed(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Apply a mutant; the tree is as it was afterwards."""
    path = tree / mutant.path
    source = path.read_bytes()
    try:
        path.write_bytes(mutant.apply(source))
        _changes.append(mutant)
        # a compiled module is known by its size and the second of its change
        os.utime(path, (1e9 + 2 * len(_changes),) * 2)
        yield
    finally:
        path.write_bytes(source)


def digest_of(files: Sequence[Path]) -> str:
    """Return a digest of the content of files, in their order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@dataclass
class Tests:
    """What is known of the tests of some files.

    Attributes
    ----------
    seconds:
        Of each test that passes.
    executed_by:
        Tests that execute a function, by module and first line; line 1 is the import of the module.
    failing:
        Tests that fail without a mutant, which say nothing.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    executed_by: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    failing: set[str] = field(default_factory=set)

    def add(self, other: Tests) -> None:
        self.seconds |= other.seconds
        self.failing |= other.failing
        for place, tests in other.executed_by.items():
            self.executed_by[place] |= tests

    def to_json(self) -> str:
        executed = [[path, line, sorted(tests)] for (path, line), tests in self.executed_by.items()]
        return json.dumps({"seconds": self.seconds, "failing": sorted(self.failing), "executed": executed})

    @classmethod
    def from_json(cls, text: str) -> Tests:
        value = json.loads(text)
        tests = cls(value["seconds"], failing=set(value["failing"]))
        for path, line, names in value["executed"]:
            tests.executed_by[path, line] = set(names)
        return tests

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute what a mutant changes, the fastest first."""
        if mutant.function_line:
            tests = self.executed_by.get((mutant.path, mutant.function_line), set())
        else:  # of a class or a module: what executes any of it
            tests = {test for (path, _), some in self.executed_by.items() if path == mutant.path for test in some}
        return sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__)

    def with_their_files(self, tests: Sequence[str]) -> list[str]:
        """Add the other tests of their files: what a fixture of a file has executed is known of one test alone."""
        files = {test.partition("::")[0] for test in tests}
        others = [test for test in self.seconds if test.partition("::")[0] in files and test not in set(tests)]
        return [*tests, *sorted(others, key=self.seconds.__getitem__)]


@dataclass(frozen=True)
class Trial:
    """What became of a run of tests: pytest's exit code, None where it took too long, and the first that failed."""

    code: int | None
    seconds: float
    failed: str


class _Plugin:
    """Tells the recorder which test runs, puts tests in order, and keeps what became of them."""

    def __init__(self, report: Path, order: Sequence[str] | None, recording: bool) -> None:
        self._report = report
        self._places = None if order is None else {test: place for place, test in enumerate(order)}
        self._recording = recording
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: list[str] = []
        self._passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (places := self._places) is not None:
            items[:] = sorted((i for i in items if i.nodeid in places), key=lambda i: places[i.nodeid])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._recording:
            recorder.begin(item.nodeid)
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {name: self._seconds[name] for name in self._passed if name not in self._failed}
        self._report.write_text(json.dumps({"passed": passed, "failed": self._failed}), encoding="utf-8")


def record(tree: Path, file: str, scratch: Path, tests: Tests, limit_s: float) -> Trial:
    """Run a file of tests without a mutant, and learn what it executes."""
    output, report = scratch / "executed.txt", scratch / "report.json"
    output.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
    site = scratch / "site"
    if not site.exists():
        recorder.install_in(site)
    environ = {recorder.OUTPUT: str(output), recorder.ROOT: str(tree), "PYTHONPATH": f"{site}{os.pathsep}{tree}"}
    plugin = _Plugin(report, None, recording=True)
    trial = _in_child(tree, [file, "-m", MARKERS], plugin, environ, log=scratch / "record.log", limit_s=limit_s)
    outcome = _outcome(report)
    tests.seconds.update(outcome["passed"])
    tests.failing.update(outcome["failed"])
    for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []:
        test, _, place = line.partition("\t")
        path, _, first = place.partition("\t")
        if test in outcome["passed"] and first.isdecimal():
            tests.executed_by[path, int(first)].add(test)
        elif not test and first == "1":  # imported while tests were collected
            tests.executed_by[path, 1].update(outcome["passed"])
    return trial


def run(tree: Path, order: Sequence[str], scratch: Path, limit_s: float) -> Trial:
    """Run tests in the given order until one fails."""
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    plugin = _Plugin(report, order, recording=False)
    files = list(dict.fromkeys(test.partition("::")[0] for test in order))
    environ = {"PYTHONPATH": str(tree)}
    return _in_child(tree, [*files, "-x"], plugin, environ, log=scratch / "trial.log", limit_s=limit_s)


def run_files(tree: Path, files: Sequence[str], scratch: Path, limit_s: float, left_out: Collection[str] = ()) -> Trial:
    """Run files of tests, or single tests, one after the other until one fails; exit code 5: there are none."""
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    arguments = [*files, "-x", "-m", MARKERS, *(f"--deselect={name}" for name in sorted(left_out))]
    plugin = _Plugin(report, None, recording=False)
    environ = {"PYTHONPATH": str(tree)}
    return _in_child(tree, arguments, plugin, environ, log=scratch / "trial.log", limit_s=limit_s)


def _outcome(report: Path) -> dict[str, Any]:
    if not report.exists():
        return {"passed": {}, "failed": []}
    value: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return value


def _in_child(
    tree: Path, arguments: Sequence[str], plugin: _Plugin, environ: dict[str, str], *, log: Path, limit_s: float
) -> Trial:
    began_s = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _run_pytest(tree, arguments, plugin, environ, log)
        finally:
            os._exit(code)
    status: int | None = None
    while time.monotonic() - began_s < limit_s:
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(ended)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    failed = _outcome(plugin._report)["failed"]
    return Trial(status, time.monotonic() - began_s, failed[0] if failed else "")


def _run_pytest(tree: Path, arguments: Sequence[str], plugin: _Plugin, environ: dict[str, str], log: Path) -> int:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(environ)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.argv = ["pytest"]
    if recorder.OUTPUT in environ:
        recorder.start()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-W", "ignore::pytest.PytestWarning"]
    base = ["--basetemp", str(log.parent / "tmp")]
    return int(pytest.main([*options, *base, *arguments], plugins=[plugin]))

"""Runs the tests of many changed versions of a repository, one after the other, in one sandbox.

This file is the text of a program, as that of the judge: the generator sends it to the interpreter of the sandbox with
a request in JSON. pytest is imported once; each version runs in a copy of the process. Results are lines of JSON on a
descriptor of their own. Nothing here is protected from the tested code: the versions are made by the generator.
"""

from __future__ import annotations

import sys
from typing import Any

_CHANNEL = 200
_WAIT_S = 0.005


class _Collector:
    """The plugin that selects tests, collects outcomes, and sees which functions each test calls."""

    def __init__(self, wanted: list[str] | None, prefix: str, calls: bool) -> None:
        self._wanted = None if wanted is None else frozenset(wanted)
        self._prefix, self._calls = prefix, calls
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.called: dict[str, set[str]] = {}
        self._test = ""
        if calls:
            self.called[""] = set()
            sys.setprofile(self._enter)

    def _enter(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(self._prefix):
                self.called[self._test].add(f"{code.co_filename[len(self._prefix) :]}:{code.co_firstlineno}")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep the wanted tests."""
        if self._wanted is not None:
            items[:] = [item for item in items if item.nodeid in self._wanted]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Note which test runs."""
        self._test = nodeid
        if self._calls:
            self.called.setdefault(nodeid, set())
            sys.setprofile(self._enter)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Keep the first line of a failure: pytest takes long to write all of it."""
        if call.excinfo is not None and item.nodeid not in self.messages:
            try:
                text = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"
            except Exception:  # noqa: BLE001 - a changed class may not be able to say anything
                text = type(call.excinfo.value).__name__
            self.messages[item.nodeid] = " ".join(text.split())[:300]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the report of one phase."""
        test = report.nodeid
        main = type(report).__name__ == "TestReport"
        if report.outcome == "failed":
            self.outcomes[test] = "F"
        elif self.outcomes.get(test) != "F" and main and report.outcome == "skipped":
            self.outcomes[test] = "S"
        elif main and report.when == "call" and test not in self.outcomes:
            self.outcomes[test] = "S" if hasattr(report, "wasxfail") else "P"


def _run_one(request: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of one version in this process."""
    import resource  # noqa: PLC0415
    import time  # noqa: PLC0415

    import pytest  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CPU, (int(job["cpu_s"]) + 1, int(job["cpu_s"]) + 2))
    collector = _Collector(job.get("tests"), request["directory"] + "/", bool(job.get("calls")))
    begin = time.process_time()
    arguments = [*request["arguments"], f"--maxfail={job['max_failed']}", *job["files"]]
    code = int(pytest.main(arguments, plugins=[collector]))
    return {
        "job": job["job"],
        "code": code,
        "outcomes": collector.outcomes,
        "messages": collector.messages,
        "called": {test: sorted(found) for test, found in collector.called.items()},
        "cpu_s": time.process_time() - begin,
    }


def _wait(child: int, timeout_s: float) -> bool:
    """Return whether a child has ended in time; one that has not is killed."""
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import time  # noqa: PLC0415

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(_WAIT_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _write(directory: str, files: dict[str, str]) -> dict[str, str]:
    """Write files, and return what was in them."""
    import contextlib  # noqa: PLC0415
    import importlib.util  # noqa: PLC0415
    import os  # noqa: PLC0415

    before = {}
    for path, text in files.items():
        name = os.path.join(directory, path)
        with open(name, encoding="utf-8", newline="") as stream:
            before[path] = stream.read()
        with open(name, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        # a compiled file of the same second and size would be taken for this one
        with contextlib.suppress(OSError):
            os.unlink(importlib.util.cache_from_source(name))
    return before


def main() -> None:
    """Read the request and run its versions."""
    import fcntl  # noqa: PLC0415
    import json  # noqa: PLC0415
    import os  # noqa: PLC0415

    request = json.loads(sys.stdin.buffer.read())
    channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _CHANNEL)

    def tell(found: dict[str, Any]) -> None:
        rest = json.dumps(found).encode() + b"\n"
        while rest:
            rest = rest[os.write(channel, rest) :]

    sys.path[:0] = request["tools"]
    import unittest.mock  # noqa: F401, PLC0415

    import pytest  # noqa: F401, PLC0415 - all copies of the process have it

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path += request["imports"]
    sys.argv[:] = ["pytest"]
    for job in request["jobs"]:
        before = _write(request["directory"], job["changes"])
        child = os.fork()
        if child == 0:
            sys.dont_write_bytecode = not job.get("keep_compiled", False)
            try:
                tell(_run_one(request, job))
            finally:
                os._exit(0)
        if not _wait(child, request["timeout_s"]):
            tell({"job": job["job"], "late": True})
        _write(request["directory"], before)
    tell({"end": True})
    os._exit(0)


if __name__ == "__main__":
    main()

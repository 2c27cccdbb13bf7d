"""Runs the selected tests inside a sandbox and reports each result on a channel of its own.

This file is the text of a program: `hpcrl.swe.judging.judge` sends it to the interpreter of the sandbox on the
standard input, followed by a request in JSON. It imports nothing of hpcrl, and it runs with Python 3.8 and later.

The tested code runs in the same process. So the program takes these precautions before it imports any of that code:

- it imports pytest, and keeps its own references to all functions that it needs to report;
- it moves the channel to another descriptor and replaces the standard streams by the null device;
- it signs each record with a secret of this run, numbers the records, and ends the process itself;
- it remembers the functions of pytest, unittest and the builtins, and reports which of them were replaced.

A record is one line: ``number kind text signature``. The kinds are ``ready`` (pytest is imported), ``test`` (index of
the test and its outcome), ``changed`` (what was replaced) and ``end`` (exit code and counts).
"""

from __future__ import annotations

import sys
from typing import Any, Callable  # noqa: UP035 - Python 3.8 reads this file

_WATCHED = (
    *("_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.unittest", "_pytest.main", "_pytest.outcomes"),
    *("_pytest.skipping", "_pytest.assertion.rewrite", "_pytest.assertion.util", "_pytest.python_api", "_pytest.nodes"),
    *("_pytest.fixtures", "_pytest.terminal", "unittest.case", "unittest.suite", "unittest.result"),
)
"""Modules that decide on outcomes or report them, in addition to those of pytest and pluggy that pytest imports."""
_PATCHED = ("_pytest.config", "_pytest.legacypath")
"""Modules in which pytest itself replaces functions while it starts."""
_CHANNEL = 200
"""Lowest descriptor of the channel: programs that close or copy small ones do not meet it."""
_ALLOWED = 3
"""Maximum replaced functions that one record names."""


def _channel() -> int:
    """Return the standard output under a descriptor of its own."""
    import fcntl  # noqa: PLC0415

    return int(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _CHANNEL))


def _silence() -> None:
    """Connect the standard streams to the null device."""
    import os  # noqa: PLC0415

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def _reporter(channel: int, key: bytes) -> Callable[[str, str], None]:
    """Return a function that writes one signed record. It uses no Python function that other code could replace."""
    import hashlib  # noqa: PLC0415
    import os  # noqa: PLC0415

    write, sign, pid, own = os.write, hashlib.blake2b, os.getpid, os.getpid()
    count = 0

    def report(kind: str, text: str) -> None:
        nonlocal count
        if pid() != own:
            return  # a copy of this process that a test has forked
        record = b"%d %b %b" % (count, kind.encode(), text.encode("utf-8", "backslashreplace"))
        count += 1
        rest = record + b" " + sign(record, key=key, digest_size=16).hexdigest().encode() + b"\n"
        while rest:
            rest = rest[write(channel, rest) :]

    return report


def _functions(space: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the functions of a module or a class with their code, one level deep."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, given in list(space.items()):
        value = given.__func__ if isinstance(given, (staticmethod, classmethod)) else given
        if callable(value) or isinstance(value, property):
            found[name] = (value, getattr(value, "__code__", None))
    return found


def _snapshot() -> Callable[[], list[str]]:
    """Remember the functions that decide on outcomes; return a function that lists those that were replaced."""
    import builtins  # noqa: PLC0415
    import importlib  # noqa: PLC0415

    for name in _WATCHED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # another version of pytest
    watched = {
        name: module
        for name, module in list(sys.modules.items())
        if name in _WATCHED
        or (name.partition(".")[0] in ("pytest", "_pytest", "pluggy", "unittest") and name not in _PATCHED)
    }
    spaces: dict[str, dict[str, Any]] = {"builtins": vars(builtins)}
    for name, module in watched.items():
        spaces[name] = vars(module)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                spaces[f"{name}.{attribute}"] = value.__dict__  # type: ignore[assignment]
    before = {name: (space, _functions(space)) for name, space in spaces.items()}
    loaded, trace, profile, functions = sys.modules, sys.gettrace, sys.getprofile, _functions

    def changed() -> list[str]:
        found = [f"sys.modules[{name!r}]" for name, module in watched.items() if loaded.get(name) is not module]
        if trace() is not None or profile() is not None:
            found.append("sys.settrace")
        for name, (space, known) in before.items():
            now = functions(space)
            for each, (value, code) in known.items():
                # by identity: another object may say that it is equal
                other, its_code = now.get(each, (None, None))
                if other is not value or its_code is not code:
                    found.append(f"{name}.{each}")
        return found

    return changed


class _Results:
    """The plugin that selects tests and collects their outcomes."""

    def __init__(self, wanted: list[str], report: Callable[[str, str], None], changed: Callable[[], list[str]]) -> None:
        self._numbers = {test: number for number, test in enumerate(wanted)}
        self._report, self._changed = report, changed
        self._state: dict[str, str] = {}
        self._raised: set[str] = set()
        self.counts = {"P": 0, "F": 0, "S": 0}
        self.tell_messages = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep the wanted tests."""
        kept = [item for item in items if item.nodeid in self._numbers]
        left = [item for item in items if item.nodeid not in self._numbers]
        if left:
            config.hook.pytest_deselected(items=left)
        items[:] = kept
        self.look()

    def look(self) -> None:
        """Report what was replaced."""
        found = self._changed()
        if found:
            self._report("changed", ", ".join(found[:_ALLOWED]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the report of one phase to the outcome of its test, and send the outcome after the last phase."""
        test = report.nodeid
        if test not in self._numbers:
            return
        state = self._state.get(test, "")
        main = type(report).__name__ == "TestReport"
        if report.outcome == "failed":
            state = "F"
            if self.tell_messages:
                self._tell(test, report)
        elif state != "F" and main and report.outcome == "skipped":
            state = "S"
        elif state == "" and main and report.when == "call" and report.outcome == "passed":
            # a test with an expected failure that passes does not count as passed
            state = "S" if hasattr(report, "wasxfail") else "P"
        self._state[test] = state
        if report.when == "teardown" and main:
            if test in self._raised and state == "P":
                self._report("changed", "an exception became a pass")
                state = "F"
            final = state or "F"
            self.counts[final] += 1
            self._report("test", "%d %s" % (self._numbers[test], final))  # noqa: UP031 - no method that could be replaced

    def _tell(self, test: str, report: Any) -> None:
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        message = str(getattr(crash, "message", "") or "failed")
        self._report("message", "%d %s" % (self._numbers[test], " ".join(message.split())[:300]))  # noqa: UP031


def _witness(results: _Results, raised: set[str]) -> None:
    """Let the plugin see exceptions of tests before pytest turns them into an outcome."""
    import pytest  # noqa: PLC0415

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(item: Any) -> Any:
        outcome = yield
        if outcome.excinfo is not None:
            raised.add(item.nodeid)

    results.pytest_runtest_call = pytest_runtest_call  # type: ignore[attr-defined]


def run(request: dict[str, Any], channel: int) -> int:
    """Run the tests of a request and report them; return the exit code of pytest."""
    report = _reporter(channel, bytes.fromhex(request["key"]))
    sys.path[:0] = request["tools"]
    import pytest  # noqa: PLC0415

    changed = _snapshot()
    # until now a failure of the interpreter or of pytest was shown
    _silence()
    report("ready", ".".join(map(str, sys.version_info[:3])))
    # the tested code comes last: it shadows nothing
    sys.path += request["imports"]
    results = _Results(request["tests"], report, changed)
    results.tell_messages = bool(request.get("messages"))
    _witness(results, results._raised)
    sys.argv[:] = ["pytest"]
    arguments = [*request["arguments"], *request["files"]]
    code = int(pytest.main(arguments, plugins=[results]))
    results.look()
    counts = results.counts
    report("end", "%d %d %d %d" % (code, counts["P"], counts["F"], counts["S"]))  # noqa: UP031
    return code


def main() -> None:
    """Read the request, run it, and end the process before any exit handler of the tested code runs."""
    import json  # noqa: PLC0415
    import os  # noqa: PLC0415

    leave = os._exit
    request = json.loads(sys.stdin.buffer.read())
    leave(run(request, _channel()))


if __name__ == "__main__":
    main()

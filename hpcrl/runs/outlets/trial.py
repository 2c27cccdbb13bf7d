"""Try sinks and notifiers before a run: ``python -m hpcrl.runs.outlets.trial < request.json``.

Each is imported and made; no sink is opened, and no message is sent. It prints one JSON document with ``findings``
(``key``, ``what`` and ``hint`` of each that cannot be used).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hpcrl.config.outlets import NotifierConfig, SinkConfig
from hpcrl.extend import ExtensionError
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.outlets.making import make_notifier, make_sink

_TIMEOUT_S = 120.0
"""Maximum time in seconds for an own interpreter: imports of large libraries."""


def find_problems(sinks: Sequence[SinkConfig], notifiers: Sequence[NotifierConfig]) -> list[dict[str, str]]:
    """Make sinks and notifiers, all of them also where one fails; keys have their names: ``sinks.NAME``."""
    findings: list[dict[str, str]] = []

    def attempt(key: str, make: Callable[[], object]) -> None:
        try:
            make()
        except ExtensionError as error:
            findings.append({"key": key, "what": error.what, "hint": error.hint})

    for sink in sinks:
        if sink.try_before_submit and sink.python is not None:
            own = sink.model_copy(update={"python": None}).model_dump(mode="json")
            findings += _tried_by(sink.python, f"sinks.{sink.name}", {"sinks": [own], "notify": []})
        elif sink.try_before_submit:
            attempt(f"sinks.{sink.name}", lambda config=sink: make_sink(config))  # type: ignore[misc]
    for notifier in notifiers:
        if notifier.try_before_submit and notifier.python is not None:
            own = notifier.model_copy(update={"python": None}).model_dump(mode="json")
            findings += _tried_by(notifier.python, f"notify.{notifier.name}", {"sinks": [], "notify": [own]})
        elif notifier.try_before_submit:
            attempt(f"notify.{notifier.name}", lambda config=notifier: make_notifier(config))  # type: ignore[misc]
    return findings


def _tried_by(python: str, key: str, request: dict[str, Any]) -> list[dict[str, str]]:
    """Make a sink or a notifier in its own interpreter, and return what was found."""
    hint = "name an interpreter that has hpcrl and the library"
    try:
        done = subprocess.run(
            module_command(python, "hpcrl.runs.outlets.trial"),
            input=msgspec.json.encode(request),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        answer = msgspec.json.decode(done.stdout, type=dict[str, list[dict[str, str]]])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] if isinstance(error, ValueError) else []
        what = f"{python} cannot make it: {said[0] if said else error}"
        return [{"key": key, "what": what, "hint": hint}]
    return answer["findings"]


def main() -> None:
    """Read a request from the standard input and print the answer."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # extensions may print
    request: dict[str, Any] = msgspec.json.decode(sys.stdin.buffer.read())
    sinks = [SinkConfig.model_validate_json(msgspec.json.encode(each)) for each in request["sinks"]]
    notifiers = [NotifierConfig.model_validate_json(msgspec.json.encode(each)) for each in request["notify"]]
    answer.write(msgspec.json.encode({"findings": find_problems(sinks, notifiers)}) + b"\n")


if __name__ == "__main__":
    main()

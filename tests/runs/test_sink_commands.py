"""`hpcrl sinks send` gives sinks of an ended run what they lack; `hpcrl notify test` has the secrets of the profile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_testing import START_S, Hpcrl, make_run, write_status, write_steps

from hpcrl.config.outlets import NotifierConfig, SinkConfig
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import read_position
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.runs.views.late_sinks import sink_warnings

MODULE = """
import os


class Late:
    def __init__(self, *, breaks=False):
        self.breaks = breaks

    def open(self, run):
        self.path = run.directory / "sinks/late.txt"
        self.say(f"open after {run.last_step} with {os.environ.get('OF_THE_SITE')}")

    def log(self, step, metrics):
        if self.breaks:
            raise RuntimeError("no connection")
        self.say(f"step {step}")

    def evaluated(self, version, metrics):
        self.say(f"version {version} at {metrics['time_s']:.0f}")

    def ended(self, state, summary):
        self.say(f"{state} {summary['steps']:g}")

    def close(self):
        self.say("close")

    def say(self, text):
        with self.path.open("a") as stream:
            stream.write(text + "\\n")


class Written:
    def __init__(self, where):
        self.where = where

    def notify(self, notice):
        with open(self.where, "w") as stream:
            stream.write(f"{notice.event} {os.environ.get('OF_THE_SITE')}")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run of a site with a secret, a sink and a notifier; nobody has started it."""
    (tmp_path / "late_sink.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    made = make_run(tmp_path / "runs")
    key = tmp_path / "key"
    key.write_text("opens it\n")
    key.chmod(0o600)
    site = made.cluster().model_copy(update={"secrets": {"OF_THE_SITE": str(key)}})
    made.cluster_path.write_text(site.model_dump_json())
    change(made, SinkConfig(name="late", sink="late_sink:Late"))
    return made


def change(run: RunDir, *sinks: SinkConfig) -> None:
    notify = (NotifierConfig(name="word", notifier="late_sink:Written", parameters={"where": str(run.path / "word")}),)
    run.plan_path.write_text(run.plan().model_copy(update={"sinks": sinks, "notify": notify}).model_dump_json())


def lines(run: RunDir) -> list[str]:
    return (run.sinks_dir / "late.txt").read_text().splitlines()


def test_a_sink_gets_what_it_lacks_after_the_end(run: RunDir, hpcrl: Hpcrl) -> None:
    write_status(run, RunState.FAILED)
    write_steps(run, 4)
    run.sinks_dir.mkdir()
    (run.sinks_dir / "late.json").write_text('{"last_step": 2}')
    (warning,) = sink_warnings(run)
    assert f"hpcrl sinks send {run.name}" in warning
    code, said, _ = hpcrl("sinks", "send", str(run.path))
    assert (code, said) == (0, "late: 4 of 4 steps\n")
    first = ["open after 2 with opens it", "step 3", "step 4", f"version 0 at {START_S + 20:.0f}", "FAILED 4", "close"]
    assert lines(run) == first
    assert sink_warnings(run) == []
    # nothing is sent twice
    code, said, _ = hpcrl("sinks", "send", str(run.path), "--json")
    assert json.loads(said)["sinks"] == {"late": {"last_step": 4, "steps": 4, "error": ""}}
    assert lines(run) == [*first, "open after 4 with opens it", "FAILED 4", "close"]


def test_what_cannot_be_sent_is_an_error(run: RunDir, hpcrl: Hpcrl) -> None:
    change(run, SinkConfig(name="late", sink="late_sink:Late", parameters={"breaks": True}))
    write_status(run, RunState.COMPLETED)
    write_steps(run, 4)
    code, said, _ = hpcrl("sinks", "send", str(run.path))
    assert code == 1
    log = run.sinks_dir / "late.log"
    assert said.split() == f"late: 0 of 4 steps; it ended with 1, and {log} has the reason".split()
    assert "RuntimeError: no connection" in log.read_text()
    assert read_position(run, "late") is None
    code, _, error = hpcrl("sinks", "send", str(run.path), "--only", "board")
    assert (code, "has no sink board" in error, "there are late" in error) == (2, True, True)
    change(run)
    code, _, error = hpcrl("sinks", "send", str(run.path))
    assert (code, "has no sinks" in error) == (2, True)


def test_a_run_that_lives_has_its_supervisor_for_that(run: RunDir, hpcrl: Hpcrl) -> None:
    supervisor = ProcessId.of(os.getpid())
    assert supervisor is not None
    write_status(run, RunState.RUNNING, supervisor=supervisor)
    code, _, error = hpcrl("sinks", "send", str(run.path))
    assert (code, "has not ended" in error) == (2, True)
    assert not (run.sinks_dir / "late.txt").exists()


def test_a_test_message_has_the_secrets(run: RunDir, hpcrl: Hpcrl) -> None:
    code, said, _ = hpcrl("notify", "test", str(run.path))
    assert (code, said) == (0, "word: sent\n")
    assert (run.path / "word").read_text() == "test opens it"

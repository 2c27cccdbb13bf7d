"""Runs the stages of a first run in order: it stops at the first that finds something wrong, and can go on there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.bringup.follow_run import end_open_run
from hpcrl.bringup.limit_stages import ends_with_ctrl_c, time_limit
from hpcrl.bringup.records import FirstRunState, StageRecord, StageStatus
from hpcrl.bringup.report import write_first_run_report
from hpcrl.bringup.stage import BringupStage, FirstRunRequest, SiteBench, StageStoppedError
from hpcrl.bringup.stages import STAGES
from hpcrl.errors import ExitCode, HpcrlError, UsageError, refusal

_LOCK = ".lock"


class FirstRunEnd(StrEnum):
    """Status with which a call of the first run ended."""

    PASSED = "passed"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the command."""
        codes = {"passed": ExitCode.OK, "stopped": ExitCode.FAILED, "interrupted": ExitCode.CANCELLED}
        return codes[self.value]


class FirstRunResult(NamedTuple):
    """Result of a call of the first run.

    Attributes
    ----------
    end:
        Status with which the call ended.
    stage:
        Name of the stage in which it ended; the last stage where all passed.
    report:
        Path of the written report, for people; a JSON report lies in the same directory.
    """

    end: FirstRunEnd
    stage: str
    report: Path


def first_run(
    request: FirstRunRequest,
    *,
    say: Callable[[str], None],
    begin: str | None = None,
    again: bool = False,
    stages: Sequence[BringupStage] = STAGES,
) -> FirstRunResult:
    """Run the stages; a report is written whatever happens.

    Parameters
    ----------
    request:
        Options of the command.
    say:
        Takes lines of progress.
    begin:
        Name of the stage to begin with, which then runs again as all later ones do. None: what has passed with the
        same inputs is not run again.
    again:
        Run all stages again.

    Raises
    ------
    UsageError
        No stage has this name, the directory cannot be used, or another call is at work in it.
    """
    names = [stage.name for stage in stages]
    if begin is not None and begin not in names:
        raise UsageError(f"there is no stage {begin!r}\n    hint: {', '.join(names)}")
    first = 0 if begin is None else names.index(begin)
    request.directory.mkdir(parents=True, exist_ok=True)
    with _alone(request.directory):
        bench = SiteBench(request, FirstRunState.read(request.directory, request.cluster), _indented(say))
        if again or begin is not None:
            bench.state.stages = {name: each for name, each in bench.state.stages.items() if name in names[:first]}
        say(f"first run on {request.cluster}: {len(stages)} stages; state and report are in {request.directory}")
        end, stage = FirstRunEnd.PASSED, names[-1]
        try:
            with ends_with_ctrl_c():
                end_open_run(bench)
                for number, each in enumerate(stages):
                    stage = each.name
                    head = f"{number + 1}/{len(stages)} {each.name}"
                    if number < first:
                        _leave_out(bench, each, head, say)
                    elif not _step(bench, each, head, say):
                        end = FirstRunEnd.STOPPED
                        break
        except KeyboardInterrupt:
            end = FirstRunEnd.INTERRUPTED
            say(f"interrupted in {stage}; passed stages are kept\n  continue: {request.way_on}")
        finally:
            bench.keep()
            report = write_first_run_report(bench, stages)
        return FirstRunResult(end, stage, report)


def _leave_out(bench: SiteBench, stage: BringupStage, head: str, say: Callable[[str], None]) -> None:
    """Pass over a stage before the one of ``--from``."""
    record = bench.state.stages.get(stage.name)
    if record is None or not record.status.passed:
        bench.state.stages[stage.name] = StageRecord(
            status=StageStatus.LEFT_OUT, started_at_s=time.time(), summary="it has not passed, and --from left it out"
        )
    say(f"{head}: {'passed before' if record is not None and record.status.passed else 'left out'}")


def _step(bench: SiteBench, stage: BringupStage, head: str, say: Callable[[str], None]) -> bool:
    """Run one stage, unless it passed with the same inputs; returns whether the next one may begin."""
    profile = _profile_digest(bench)
    before = bench.state.stages.get(stage.name)
    digest, most = _digest_and_limit(bench, stage, profile)
    if before is not None and before.status.passed and digest and before.digest == digest:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(before.started_at_s))
        say(f"{head}: passed on {when} with the same profile: {before.summary}")
        return True
    say(f"{head}: {stage.what} ({most})")
    started_s, begun = time.time(), time.monotonic()
    record = StageRecord(status=StageStatus.INTERRUPTED, summary="the command was ended by a signal", digest=digest)
    try:
        with time_limit(stage.most_s(bench) if most else stage.limit_s, f"the stage {stage.name}"):
            outcome = stage.run(bench)
        record = StageRecord(
            status=outcome.status,
            # the digest from before the stage: a change during the stage counts as another input
            digest=digest,
            summary=outcome.summary,
            warnings=list(outcome.warnings),
            facts=dict(outcome.facts),
        )
    except (HpcrlError, OSError) as error:
        known = error if isinstance(error, HpcrlError) else refusal(error)
        message = str(known) if known is not None else f"{type(error).__name__}: {error}"
        commands = error.commands if isinstance(error, StageStoppedError) else ()
        record = StageRecord(
            status=StageStatus.STOPPED,
            summary=message.partition("\n")[0],
            message=message,
            facts=error.facts if isinstance(error, StageStoppedError) else {},
            ways_on=[*commands, bench.request.way_on],
        )
    except Exception as error:
        record = StageRecord(status=StageStatus.STOPPED, summary=f"{type(error).__name__}: {error}")
        raise
    finally:
        bench.state.stages[stage.name] = msgspec.structs.replace(
            record,
            # a drafted profile exists only now
            profile=profile or _profile_digest(bench),
            started_at_s=started_s,
            seconds=round(time.monotonic() - begun, 3),
        )
        bench.keep()
    for warning in record.warnings:
        bench.say(f"warning: {warning}")
    bench.say(f"{record.status} after {time.monotonic() - begun:.1f} s: {record.message or record.summary}")
    for way in record.ways_on:
        bench.say(f"continue: {way}")
    return record.status.passed


def _digest_and_limit(bench: SiteBench, stage: BringupStage, profile: str) -> tuple[str, str]:
    """Return the digest of a stage and its longest time in words; empty where the profile cannot say them yet."""
    try:
        return stage.digest(bench, profile), f"{stage.most_s(bench):.0f} s at most"
    except HpcrlError:
        return "", ""


def _profile_digest(bench: SiteBench) -> str:
    """Return the SHA-256 of the profile's resolved values; empty where it cannot be read."""
    try:
        return hashlib.sha256(bench.profile().value.model_dump_json().encode()).hexdigest()
    except HpcrlError:
        return ""


def _indented(say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: say("\n".join(f"    {line}" for line in text.splitlines()))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Refuse a second call in the same directory (UsageError)."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another first run is at work in {directory}\n    hint: wait for it, or take another --directory"
            ) from None
        except OSError:
            # the filesystem has no locks
            pass
        yield
    finally:
        os.close(descriptor)

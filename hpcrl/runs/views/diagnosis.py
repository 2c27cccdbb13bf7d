"""Diagnosis of the end of a run, for ``hpcrl why``: first cause, last words, consequences, and commands to continue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.text import Text

from hpcrl.runs.cause import Cause, CauseKind, describe_end, from_record
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.registry import reference
from hpcrl.runs.resume_request import ResumePoint, find_resume_point
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState
from hpcrl.runs.views.fabric_notes import fabric_notes
from hpcrl.runs.views.failures import failure_lines, heldout_words, rollouts_of
from hpcrl.runs.views.logs import LogFilter, find_log_files, read_logs
from hpcrl.runs.views.whole_events import whole_events
from hpcrl.runs.views.words import duration, state_text

WHY_SCHEMA = "hpcrl.why/1"
_LOG_LINES = 15
_TRACEBACK_LINES = 25
_SHORT_LINES = 8
_SHORT_EVENTS = 3
_OOM_HINT = (
    "no process of the run sent it; likely senders are the kernel's out-of-memory killer (see dmesg) or a person"
)
_HINTS = {
    CauseKind.START_TIMEOUT: "if it was only slow, raise limits.start_timeout_s in the cluster profile",
    CauseKind.HUNG: "if it was only slow, raise supervision.hang_floor_s (or hang_ceiling_s) in the recipe",
    CauseKind.WRONG_WEIGHTS: "rollouts since its last proof may have wrong log-probabilities; "
    "hpcrl resume returns to the newest checkpoint",
    CauseKind.DISK_FULL: "free space there, then resume; `hpcrl checkpoint ls` lists what this run keeps",
    CauseKind.TIME_LIMIT: "the limit is job.time_limit_h of the recipe, else the profile's limits.time_limit_h",
    CauseKind.CHANGED: "restore the submitted state, or accept the changes: hpcrl resume RUN --accept-changes",
}


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """Something that followed from the cause."""

    time_s: float
    what: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnosis of the end of a run.

    Attributes
    ----------
    sentence:
        The cause, or the state, in one sentence.
    hint:
        The usual reason for it; may be empty.
    last_words:
        End of the traceback that the role recorded, else of its log.
    log:
        File of ``last_words``, relative to the run directory; empty for a traceback.
    consequences:
        Restarts, ends and complaints of roles, in time order.
    lost_replicas:
        Replicas with their own jobs that were lost in this attempt, in time order: the run continues without them.
    skipped_steps:
        Steps of the run whose gradient was not finite, with parameters and rollouts, in time order.
    earlier:
        Ends of earlier attempts, by attempt.
    ways_on:
        Commands to continue with.
    resume_step:
        Step of the checkpoint that a resume takes; None where there is none.
    failed_rollouts:
        Rollouts of the run that failed, in lines; empty where none did.
    """

    name: str
    state: RunState
    attempt: int
    ended_at_s: float | None
    wall_s: float | None
    sentence: str
    cause: Cause | None
    hint: str
    last_words: list[str]
    log: str
    consequences: list[Consequence]
    lost_replicas: list[Consequence]
    skipped_steps: list[Consequence]
    earlier: dict[int, str]
    ways_on: list[str]
    resume_step: int | None
    failed_rollouts: list[str] = []
    schema: str = WHY_SCHEMA


def diagnose(run: RunDir) -> Diagnosis:
    """Return an explanation of the end of the newest attempt of a run."""
    view = observe(run)
    last_words, log = _last_words(run, view)
    point = ResumePoint(None, [], [])
    if view.state.ended and view.state is not RunState.COMPLETED:
        point = find_resume_point(run)
    return Diagnosis(
        name=view.name,
        state=view.state,
        attempt=view.attempt,
        ended_at_s=view.ended_at_s,
        wall_s=view.wall_s,
        sentence=_sentence(view),
        cause=view.cause,
        hint=_hint(run, view.cause),
        last_words=last_words,
        log=log,
        consequences=_consequences(run, view),
        lost_replicas=[
            Consequence(time_s=event.time_s, what=event.data["why"])
            for event in whole_events(run, attempt=view.attempt, kind="replica.lost")
        ]
        + [
            Consequence(time_s=event.time_s, what=f"job {event.data['job_id']} replaces it: {event.data['lost']}")
            for event in whole_events(run, attempt=view.attempt, kind="replica.submitted")
            if event.data["lost"]
        ],
        skipped_steps=[
            Consequence(time_s=event.time_s, what=event.data["what"])
            for event in whole_events(run, kind="trainer.step_skipped")
        ],
        earlier=_earlier(run, view.attempt),
        ways_on=_ways_on(view, point, reference(run)),
        resume_step=point.step,
        failed_rollouts=_failed_rollouts(run),
    )


def _failed_rollouts(run: RunDir) -> list[str]:
    """Return lines about failed training rollouts, and failed ones of the newest evaluation."""
    lines = failure_lines(rollouts_of(run))
    evaluations = read_evaluations(run)
    if evaluations and (newest := evaluations[-1]).failed:
        lines.append(f"held-out after step {newest.version}: reward {heldout_words(newest)}")
        if newest.first_failure is not None:
            first = newest.first_failure
            place = f", at {first['where']}" if first.get("where") else ""
            lines.append(f"    the first: {first.get('what', '')}{place}")
    return lines


def _sentence(view: RunView) -> str:
    if view.cause is not None:
        return view.cause.message
    if view.state is RunState.COMPLETED:
        return "the run completed all its steps"
    return f"the run has not ended: it is {view.state}"


def _hint(run: RunDir, cause: Cause | None) -> str:
    if cause is None:
        return ""
    submissions = RunRecord.read(run).submissions
    if cause.kind is CauseKind.TIME_LIMIT and submissions and submissions[-1].in_job:
        return f"the limit is that of job {submissions[-1].in_job}, the allocation that the run was in"
    if cause.kind is CauseKind.EXIT and cause.signal == 9:
        return _OOM_HINT
    return _HINTS.get(cause.kind, "")


def _last_words(run: RunDir, view: RunView) -> tuple[list[str], str]:
    """Return the end of the traceback or of the log of the role that failed first, and the file it is from."""
    cause = view.cause
    if cause is None or cause.role is None or cause.details:
        return [], ""
    if cause.dump:
        return cause.frames, cause.dump
    if cause.traceback:
        return cause.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:], ""
    # a killed rank may have logged nothing; its launcher has
    for rank in dict.fromkeys((cause.rank, 0)):
        wanted = LogFilter(view.attempt, cause.role, cause.replica, rank)
        files = find_log_files(run, wanted)
        lines = [line.line for line in read_logs(run, wanted, lines=_LOG_LINES)]
        if lines:
            return lines, str(files[0].path.relative_to(run.path)) if len(files) == 1 else ""
    return [], ""


def _restored(run: RunDir, view: RunView) -> list[Consequence]:
    """Return the events in which this attempt skipped or withdrew checkpoints and versions before its first step."""
    what = {
        "trainer.checkpoint_skipped": "the checkpoint of step {step} was passed over: {reason}",
        "trainer.checkpoints_put_aside": "checkpoints of steps {steps} were put aside, as asked by {asked}",
        "trainer.versions_withdrawn": "weights of versions {versions} were put aside, as they are later than the start",
    }
    found = [
        Consequence(time_s=event.time_s, what=text.format_map(event.data))
        for kind, text in what.items()
        for event in whole_events(run, attempt=view.attempt, kind=kind)
    ]
    return found + [
        Consequence(
            time_s=event.time_s, what=f"this attempt runs other code or environments than were submitted: {change}"
        )
        for event in whole_events(run, attempt=view.attempt, kind="attempt.changed")
        for change in event.data["changes"]
    ]


def _restarts(run: RunDir, view: RunView) -> list[Consequence]:
    """Return the replicas that were restarted in this attempt, and the stack files of those that hung."""
    found = []
    for event in whole_events(run, attempt=view.attempt, kind="component.restarting"):
        who = f"{event.data['role']} {event.data['replica']}"
        what = f"{event.data['cause']}; {who} is restarted (restart {event.data['restart']})"
        found.append(Consequence(time_s=event.time_s, what=what))
    for event in whole_events(run, attempt=view.attempt, kind="component.lost"):
        found.append(Consequence(time_s=event.time_s, what=f"{event.data['cause']}; the run continues without it"))
    for event in whole_events(run, attempt=view.attempt, kind="component.hung"):
        if event.data["dumps"]:
            frames = " < ".join(frame.partition(" (")[0] for frame in event.data["frames"][1:4])
            what = f"stacks of {event.data['role']} {event.data['replica']} are in {event.data['dumps'][0]}"
            found.append(Consequence(time_s=event.time_s, what=what + (f": {frames}" if frames else "")))
    for event in whole_events(run, attempt=view.attempt, kind="component.went_on"):
        what = (
            f"{event.data['role']} {event.data['replica']} seemed to hang ({event.data['problem']}) and then "
            "made progress"
        )
        found.append(Consequence(time_s=event.time_s, what=what))
    for event in whole_events(run, attempt=view.attempt, kind="trainer.version_refused"):
        found.append(Consequence(time_s=event.time_s, what=event.data["what"]))
    for event in whole_events(run, attempt=view.attempt, kind="engine.adapter_unproven"):
        engine, tries = event.data["engine"], event.data["tries"]
        what = f"{engine} has not shown in {tries} versions that it computes with the adapter: they change too little"
        found.append(Consequence(time_s=event.time_s, what=what))
    for event in whole_events(run, attempt=view.attempt, kind="engine.weights_unproved"):
        engine, version = event.data["engine"], event.data["version"]
        what = f"nothing has shown that {engine} computes with version {version}: {event.data['why']}"
        found.append(Consequence(time_s=event.time_s, what=what))
    for event in whole_events(run, attempt=view.attempt, kind="notify.failed"):
        which = event.data["notifier"] or "the notifiers"
        found.append(Consequence(time_s=event.time_s, what=f"a message of {which} was not sent: {event.data['error']}"))
    found += [Consequence(time_s=time_s, what=what) for time_s, what in fabric_notes(run, view.attempt)]
    return found + _lost_segments(run, view)


def _lost_segments(run: RunDir, view: RunView) -> list[Consequence]:
    """Return memory that left the KV pool before the run was stopped: its blocks are recomputed."""
    states = whole_events(run, attempt=view.attempt, kind="run.state")
    stopped_s = min((e.time_s for e in states if e.data["state"] == RunState.STOPPING), default=math.inf)
    # by the node it was on; engines that share a node cannot be distinguished
    owners: dict[str, set[str]] = {}
    for event in whole_events(run, attempt=view.attempt, kind="store.canary"):
        owners.setdefault(event.data["host"], set()).add(event.writer.replace("-", " "))

    def segment(name: str) -> str:
        found = owners.get(name.rpartition(":")[0], set())
        return f"{name} of {next(iter(found))}" if len(found) == 1 else name

    return [
        Consequence(
            time_s=event.time_s,
            what=f"the segment {segment(event.data['segment'])} left the KV pool with its blocks "
            f"(segments left: {event.data['segments']}); engines compute these blocks anew",
        )
        for event in whole_events(run, attempt=view.attempt, kind="store.segment_lost")
        if event.time_s < stopped_s
    ]


def _consequences(run: RunDir, view: RunView) -> list[Consequence]:
    """Return the events that followed the cause: restores, restarts, failure records and ends of other roles."""
    cause = view.cause
    found = _restored(run, view) + _restarts(run, view)
    if cause is None:
        return sorted(found, key=lambda consequence: consequence.time_s)
    first = (cause.role, cause.replica)
    for record in FailureRecord.read_all(run, view.attempt):
        if (record.role, record.replica) != first or record.rank != (cause.rank or 0):
            found.append(Consequence(time_s=record.time_s, what=from_record(record).message))
    said = {(record.role, record.replica) for record in FailureRecord.read_all(run, view.attempt)}
    for component in view.components:
        key = (component.role, component.replica)
        # those that were asked to stop are EXITED, whatever their exit code
        by_itself = component.state is ComponentState.FAILED and key not in (first, *said)
        if by_itself and component.ended_at_s is not None:
            end = describe_end(component.exit_code, component.signal)
            found.append(Consequence(time_s=component.ended_at_s, what=f"{component.role} {component.replica} {end}"))
    return sorted(found, key=lambda consequence: consequence.time_s)


def _earlier(run: RunDir, attempt: int) -> dict[int, str]:
    """Return the last state and cause of earlier attempts, from their events."""
    ends: dict[int, str] = {}
    gone = {event.attempt: sorted(event.data["nodes"]) for event in whole_events(run, kind="nodes.excluded")}
    for event in whole_events(run, kind="run.state"):
        if event.attempt < attempt:
            state, cause = RunState(event.data["state"]), event.data.get("cause")
            if not state.ended and state is not RunState.REQUEUED:
                names = gone.get(event.attempt, [])
                down = f"; {'node' if len(names) == 1 else 'nodes'} {', '.join(names)} went down" if names else ""
                ends[event.attempt] = f"LOST: the supervisor ended without a final status{down}"
            else:
                ends[event.attempt] = f"{state}: {cause}" if cause else state.value
    return ends


def _ways_on(view: RunView, point: ResumePoint, named: str) -> list[str]:
    """Return commands to continue with; ``named`` is the argument that identifies the run."""
    if view.state is RunState.COMPLETED:
        return [f"hpcrl report {named}", f"hpcrl resume {named} --set trainer.steps=...    # continue with more"]
    if not view.state.ended:
        return [f"hpcrl status {named} --watch", f"hpcrl logs {named} -f"]
    lost = view.cause is not None and view.cause.kind is CauseKind.NOTHING_TO_RESTORE
    if lost or (point.step is None and point.saved):
        return [
            f"hpcrl checkpoint verify {named}    # what is wrong with each",
            f"hpcrl resume {named} --from-step STEP    # one that is valid again",
            f"hpcrl resume {named} --from-scratch    # step 0; existing state is put aside",
        ]
    where = "from the beginning: it has saved no checkpoint"
    if point.step is not None:
        where = f"from step {point.step}, if the trainer finds it valid"
    return [f"hpcrl resume {named}    # {where}", f"hpcrl logs {named}"]


def diagnosis_document(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as JSON (schema `WHY_SCHEMA`)."""
    return msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode()


def print_diagnosis(diagnosis: Diagnosis, console: Console, *, events: bool = False) -> None:
    """Print the diagnosis for a person: the cause, how to continue, last words; all consequences with ``events``."""

    def say(*parts: str | Text | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    attempt = f"  attempt {diagnosis.attempt}, {duration(diagnosis.wall_s)}" if diagnosis.attempt else ""
    say((diagnosis.name, "bold"), "  ", state_text(diagnosis.state), attempt)
    cause = diagnosis.cause
    if cause is None:
        when = ""
    else:
        when = f"{_clock(cause.time_s)}  " if events else time.strftime("%H:%M  ", time.localtime(cause.time_s))
    say("\n", when, (diagnosis.sentence, "bold"))
    for line in cause.details if cause is not None else ():
        say(line)
    if cause is not None and cause.doubt:
        say((cause.doubt, "yellow"))
    if diagnosis.hint:
        say((f"hint: {diagnosis.hint}", "dim"))
    if diagnosis.failed_rollouts:
        say("\n", ("rollouts that failed", "dim"))
        for line in diagnosis.failed_rollouts:
            say(Text(f"  {line}", style="yellow"))
    say("\n", ("next", "dim"))
    for way in diagnosis.ways_on:
        say(f"  {way}")
    if diagnosis.last_words:
        last_words = diagnosis.last_words if events else diagnosis.last_words[-_SHORT_LINES:]
        where = f"end of {diagnosis.log}" if diagnosis.log else f"traceback of {cause.where if cause else ''}"
        left_out = "" if len(last_words) == len(diagnosis.last_words) else f", the last {_SHORT_LINES} lines"
        say("\n", (f"{where}{left_out}", "dim"))
        for line in last_words:
            say("  ", line)
    _say_events(diagnosis, say, most=None if events else _SHORT_EVENTS)


def _say_events(diagnosis: Diagnosis, say: Callable[..., None], *, most: int | None) -> None:
    """Print consequences, losses and ends of earlier attempts; of each at most ``most``."""
    then = "then" if diagnosis.cause is not None else "until now"
    earlier = [f"{number}  {end}" for number, end in sorted(diagnosis.earlier.items(), reverse=most is not None)]
    lists = (
        (then, [(item.time_s, item.what) for item in diagnosis.consequences]),
        ("replicas that were lost and are replaced", [(item.time_s, item.what) for item in diagnosis.lost_replicas]),
        ("steps that were skipped", [(item.time_s, item.what) for item in diagnosis.skipped_steps]),
        ("earlier attempts", [(None, line) for line in earlier]),
    )
    left_out = 0
    if most is None and not any(items for _, items in lists):
        say("\n", ("nothing else is recorded for this attempt", "dim"))
    for title, items in lists:
        shown = items[:most]
        left_out += len(items) - len(shown)
        if shown:
            say("\n", (title, "dim"))
        for time_s, what in shown:
            clock = "" if time_s is None or most is not None else f"{_clock(time_s)}  "
            say(f"  {clock}{what}")
    if left_out:
        say("\n", (f"and {left_out} more: hpcrl why {diagnosis.name} --events", "dim"))


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"

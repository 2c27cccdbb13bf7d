"""The stream of a step has other writers: what they print changes nothing, and what damages a report is a cause."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.processes.environment_marks import RUN_ID_VARIABLE
from hpcrl.supervisor.launch.survey import Survey
from hpcrl.supervisor.process import guarded
from hpcrl.supervisor.process.guarded import ProcessSpec, guard_command, start_guarded
from hpcrl.supervisor.process.report_lines import DamagedLineError, LineSplitter, encode_line, find_lines

#: programs of a site that print before, or around, a task of a step; "$@" is the task
NOISE = {
    "a greeting": 'echo "Welcome to n17, quota 80%"; exec "$@"',
    "a greeting without an end of line": 'printf "Welcome to n17 "; exec "$@"',
    "JSON that is not a report": """echo '{"a": 1}'; echo 7; echo null; echo '[]'; exec "$@" """,
    "JSON that looks like a report": (
        """echo '{"task": 0, "node": "", "time_s": 1, "report": "ended", "exit_code": 9, "signal": null}'; exec "$@" """
    ),
    "no text": """head -c 300000 /dev/zero; printf '\\377\\376\\n'; exec "$@" """,
    "labels of srun": '"$@" | sed -u "s/^/0: /"',
    "words while it runs": '(while sleep 0.05; do echo "quota 80%"; done) & noise=$!; "$@"; kill $noise',
}


def spec(tmp_path: Path, program: str = "print('role')") -> ProcessSpec:
    return ProcessSpec(
        role="engine",
        replica=0,
        attempt=1,
        command=[sys.executable, "-c", program],
        env={**os.environ, RUN_ID_VARIABLE: "shared-streams"},
        cwd=str(tmp_path),
        logs=[str(tmp_path / "log")],
        grace_s=2.0,
        events_path=str(tmp_path / "events.jsonl"),
        events_writer="guard",
    )


@pytest.mark.parametrize("noise", NOISE)
async def test_what_others_print_into_a_step_changes_nothing(noise: str, tmp_path: Path) -> None:
    argv = ["sh", "-c", NOISE[noise], "sh", *guard_command(sys.executable)]
    process = await start_guarded(argv, spec(tmp_path, "raise SystemExit(5)"), env=os.environ)
    end = await asyncio.wait_for(process.ended(), 30.0)
    assert (end.exit_code, end.problem, end.guard_lost) == (5, "", False)
    assert await process.started() is not None
    assert await asyncio.wait_for(process.gone(), 30.0) == []


@pytest.mark.parametrize(
    "printed",
    [
        pytest.param(encode_line({"report": "started"}), id="without its fields"),
        pytest.param(encode_line({"task": 3, "node": "", "time_s": 1.0, "report": "started", "pid": 1}), id="task"),
        pytest.param(encode_line({"task": 0, "node": "", "time_s": 1.0, "report": "grew"}), id="kind"),
        pytest.param(encode_line({"task": 0, "node": "n", "time_s": "soon", "report": "gone", "left": []}), id="type"),
        pytest.param(encode_line({"task": 0, "report": "started", "pid": 1})[:-20] + b"\n", id="cut"),
    ],
)
async def test_a_damaged_report_ends_the_replica_with_its_cause(printed: bytes, tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(printed)
    argv = ["sh", "-c", f"cat {tmp_path}/said; sleep 600"]
    process = await start_guarded(argv, spec(tmp_path), env=os.environ)
    end = await asyncio.wait_for(process.ended(), 60.0)
    assert "a report of its guard cannot be read" in end.spawn_error
    assert not end.no_step
    assert await process.started() is None
    assert await asyncio.wait_for(process.gone(), 60.0) == []


async def test_a_wrapper_that_is_cut_off_takes_what_it_started_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrappers of ``srun`` wait for it: killing the wrapper alone would leave a pipe that never ends."""
    monkeypatch.setattr(guarded, "_PIPE_S", 0.3)
    for inside in ("sleep 600; true", "setsid sleep 30; true"):
        process = await start_guarded(["sh", "-c", inside], spec(tmp_path), env=os.environ)
        await asyncio.sleep(0.3)
        process.cut_off()
        assert (await asyncio.wait_for(process.ended(), 25.0)).guard_lost
        assert await process.started() is None


def test_nodes_are_understood_behind_labels_and_greetings() -> None:
    answers = [sys.executable, "-P", "-m", "hpcrl.supervisor.launch.node_answers"]
    noise = """echo '{"node": "n1"}'; printf 'hello '; "$@" | sed -u 's/^/0: /'"""
    command = ["env", "SLURMD_NODENAME=n1", "sh", "-c", noise, "sh", *answers]
    with Survey([(command, ["n1"])], env=os.environ, timeout_s=30) as survey:
        assert survey.answers["n1"].machine
        clock = survey.clocks()["n1"]
        assert abs(clock.ahead_s) <= clock.uncertain_s


def test_a_line_of_a_step_is_as_short_as_slurm_hands_on_whole() -> None:
    said = {"report": "dumped", "frames": ["f" * 90] * 200, "problem": "p" * 5000, "stopped": [1, 2]}
    line = encode_line(said, limit=1000)
    assert len(line) <= 1000
    (found,) = find_lines(line)
    assert found["frames"]
    assert set(found["frames"]) == {"f" * 90}
    assert (found["report"], found["stopped"]) == ("dumped", [1, 2])
    assert find_lines(encode_line(said)) == [said]


@pytest.mark.campaign
def test_any_stream_is_parsed_without_loss() -> None:
    """Reports between random bytes, cut into random pieces; by what was put in."""
    seed = time.time_ns()
    print(f"seed {seed}")
    dice, until = random.Random(seed), time.monotonic() + 10.0
    while time.monotonic() < until:
        stream, said = b"", []
        for number in range(dice.randrange(1, 20)):
            match dice.randrange(4):
                case 0:
                    stream += dice.randbytes(dice.randrange(200)).replace(b"@", b"a")
                case 1:
                    stream += json.dumps({"report": "ended", "task": number}).encode() + b"\n"
                case 2:
                    stream += b"%d: " % number
                case _:
                    said.append({"number": number, "text": "".join(map(chr, dice.choices(range(1, 0x2FF), k=20)))})
                    stream += encode_line(said[-1])
        splitter, found = LineSplitter(), []
        while stream:
            size = dice.randrange(1, 300)
            for line in splitter.add(stream[:size]):
                found += find_lines(line)
            stream = stream[size:]
        for line in splitter.add(b""):
            found += find_lines(line)
        assert found == said


def test_a_mark_without_an_object_is_damage() -> None:
    whole = encode_line({"a": 1})
    for broken in (whole[:-3] + b"\n", whole.replace(b"{", b"["), whole[: whole.index(b"{")] + b"7\n"):
        with pytest.raises(DamagedLineError):
            find_lines(broken)
    assert msgspec.json.decode(whole[whole.index(b"{") :]) == {"a": 1}

"""A small run to its end on one GPU: questions from a file, rollouts, training, hand-offs, and what became of each.

The recipe is the shipped one for Qwen3-1.7B on GSM8K, with a start model of the same family and small sizes. Engines
are the embedded ones, which compute on processors: vLLM is not needed, and the trainer has the GPU for itself.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_checks.check import Check, Row, Session
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]

RECIPE, NAME = "qwen3_1b7_gsm8k", "one-gpu"
STEPS = 3
# attention on GPUs has kernels for heads of this size
WARMUP = {"family": "qwen3", "config": {"intermediate_size": 128}, "head_dim": 64, "steps": 30, "batch_size": 16}
SIZES = (
    "engine.backend=embedded",
    "engine.memory.gpu_memory_utilization=0.9",
    "engine.max_model_len=384",
    "rollouts.rollouts_per_step=16",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=32",
    "rollouts.sampling.max_new_tokens=64",
    f"trainer.steps={STEPS}",
    "trainer.micro_batch_tokens=2048",
    "trainer.memory.lm_head_chunk_tokens=256",
    "evaluation.prompts=8",
)


def write_questions(file: Path, operands: range) -> None:
    """Write sums as questions in the form of GSM8K."""
    rows = (
        {"question": f"Ann has {a} eggs and buys {b}. How many?", "answer": f"{a}+{b}={a + b}.\n#### {a + b}"}
        for a in operands
        for b in range(1, 4)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def run(session: Session) -> Iterator[Row]:
    """Make a start model, run the recipe for some steps, and verify its rollouts."""
    place = session.scratch / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    place = place.resolve()
    train, held_out, model = place / "train.jsonl", place / "test.jsonl", place / "model"
    write_questions(train, range(1, 9))
    write_questions(held_out, range(9, 12))
    files = (f"environments.0.path={train}", f"environments.0.held_out_path={held_out}")
    begun = time.monotonic()
    warmup = f"model.warmup={json.dumps(WARMUP)}"
    hpcrl(session, place, "warmup", RECIPE, *given(*files, warmup), "--output", str(model))
    yield {"model_s": time.monotonic() - begun}
    begun = time.monotonic()
    hpcrl(session, place, "submit", RECIPE, "--name", NAME, *given(f"model.path={model}", *files, *SIZES))
    try:
        left_s = max(1.0, session.until - time.monotonic()) if session.until < float("inf") else 600.0
        hpcrl(session, place, "wait", NAME, "--timeout", f"{left_s:.0f}")
    except RuntimeError as error:
        why = hpcrl(session, place, "why", NAME, check=False)
        raise RuntimeError(f"{error}; why: {why[-1500:]}") from error
    finally:
        # the supervisor outlives this process: nothing of a run that is late is left on the machine
        hpcrl(session, place, "cancel", NAME, "--yes", check=False)
    seconds = time.monotonic() - begun
    hpcrl(session, place, "rollouts", "verify", NAME)
    found = RunDir(place / "runs" / NAME)
    (ready,) = (event.data for event in read_events(found, kind="trainer.ready"))
    records = read_metrics(found)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    row: Row = {"device": ready["device"], "kernels": ready["kernels"], "steps": len(records), "run_s": seconds}
    row |= {"step_s": statistics.median(sum(record.phases_s.values()) for record in records)}
    row |= {"reward": records[-1].reward_mean, "mismatch_kl": records[-1].mismatch_kl}
    on_gpu = session.device.type == "cuda"
    yield row | ({"failed": "the trainer computed on processors"} if on_gpu and ready["device"] == "cpu" else {})


def given(*settings: str) -> list[str]:
    """Return settings as the command line takes them."""
    return [part for setting in settings for part in ("--set", setting)]


def hpcrl(session: Session, place: Path, *words: str, check: bool = True) -> str:
    """Call the command line; returns what it says (RuntimeError with its last words where it fails)."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "HPCRL_RUNS_ROOT": str(place / "runs")}
    command = [sys.executable, "-m", "hpcrl", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if check and done.returncode:
        raise RuntimeError(f"hpcrl {words[0]} ended with {done.returncode}: {said.strip()[-1500:]}")
    return said


RUN: tuple[Check, ...] = (Check("whole.run", run, 150),)

"""Runs with everything that a page shows, written by hand; texts of programs and policies try to become markup."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("runs",)]
from runs_testing import START_S, make_run, step_record, write_event, write_status  # noqa: E402

from hpcrl.dock.ledger.entries import Finished, Kept, Taken  # noqa: E402
from hpcrl.dock.ledger.log import RolloutLog  # noqa: E402
from hpcrl.dock.ledger.replay import Held  # noqa: E402
from hpcrl.models.character_tokenizer import write_character_tokenizer  # noqa: E402
from hpcrl.models.tokenizer import ChatTokenizer  # noqa: E402
from hpcrl.rollouts.core.records import Rollout, Turn, encode_rollout  # noqa: E402
from hpcrl.runs.metrics import MetricsWriter  # noqa: E402
from hpcrl.runs.rundir import RunDir  # noqa: E402
from hpcrl.runs.status import RunState  # noqa: E402
from hpcrl.runs.token_ratios import RolloutRatios, tokens_digest  # noqa: E402
from hpcrl.runs.views.rollouts import rollout_details  # noqa: E402

SCRIPT = "</script><script>window.taken=1</script><img src=x onerror='window.taken=2'>"
GROUPS, MEMBERS, LAST_OF_FIRST = 4, 3, 10


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


browser = _tool("headless_chromium")
needs_chromium = pytest.mark.skipif(
    browser.find_chromium() is None, reason="chromium is not installed (tools/bootstrap.py --chromium)"
)


def make_page_run(
    root: Path, name: str = "night-1", *, steps: int = 30, gain: float = 0.0, faults: bool = True
) -> RunDir:
    """A run of two attempts that completed; with ``gain`` its rewards are higher by so much.

    The first attempt ends after step 10, where the second goes on. Steps follow each other without a pause.
    """
    run = make_run(root, name, steps=steps)
    write_character_tokenizer(root / "tokens")
    recipe = run.recipe()
    model = recipe.model.model_copy(update={"path": str(root / "tokens")})
    own = recipe.model_copy(update={"model": model, "description": SCRIPT if faults else "", "name": name})
    run.write_configuration(own, run.cluster(), run.plan())
    run.start_attempt()
    write_status(run, RunState.COMPLETED)
    ends = write_records(run, steps)
    write_lives(run, ends)
    for version in range(0, steps + 1, 10):
        reward = round(0.2 + 0.5 * version / steps + gain, 4)
        facts = {"by_env": {"words": reward}, "counted_by_env": {"words": 64}, "prompts": 64, "seconds": 1.0}
        at = ends[version] + 1.0
        write_event(run, "evaluation", time_s=at, writer="orchestrator-0", version=version, reward=reward, **facts)
    if faults:
        write_faults(run, ends[8] - 0.3)
    write_ledger(run, root / "tokens", steps, gain)
    return run


def write_records(run: RunDir, steps: int) -> dict[int, float]:
    """Write the records of steps; returns the time of the end of each, and of the begin of the first as that of 0."""
    ends = {0: START_S + 19.0}
    for attempt, own in ((1, range(1, LAST_OF_FIRST + 1)), (2, range(LAST_OF_FIRST + 1, steps + 1))):
        writer = MetricsWriter(run, attempt)
        for step in own:
            record = step_record(step, attempt=attempt, total=steps)
            pause = 10.0 if step == LAST_OF_FIRST + 1 else 0.0
            ends[step] = ends[step - 1] + pause + sum(record.phases_s.values())
            counters = {"started": 20.0 * step, "finished": 16.0 * step, "dropped_stale": float(step // 4)}
            more = {"rollouts": counters, "reward_count": GROUPS * MEMBERS, "time_s": ends[step]}
            writer.write(msgspec.structs.replace(record, **more))
        writer.close()
    return ends


def write_lives(run: RunDir, ends: dict[int, float]) -> None:
    """Both attempts, as supervisor, trainer and orchestrator leave them."""
    middle = ends[LAST_OF_FIRST]
    for attempt, begin, end in ((1, START_S + 9, middle + 2), (2, middle + 3, max(ends.values()) + 2)):
        checkpoint = None if attempt == 1 else LAST_OF_FIRST
        where = {"attempt": attempt, "writer": "supervisor"}
        write_event(run, "attempt.started", time_s=begin, **where, checkpoint_step=checkpoint)
        for role in ("trainer", "engine"):
            for state, at in (("STARTING", begin + 0.5), ("READY", begin + 4), ("EXITED", end)):
                write_event(run, "component.state", time_s=at, **where, role=role, replica=0, state=state)
    for version, end in ends.items():
        facts = {"version": version, "seconds": 0.4, "pause_s": 0.1, "proved": True}
        write_event(run, "trainer.version_published", time_s=end, writer="trainer-0", version=version, form="full")
        write_event(
            run, "engine.weights_updated", time_s=end + 0.5, writer="orchestrator-0", engine="engine-0", **facts
        )
    saved = {"step": LAST_OF_FIRST, "seconds": 0.7, "blocked_s": 0.3}
    write_event(run, "trainer.checkpoint_saved", time_s=middle + 0.5, writer="trainer-0", **saved)


def write_faults(run: RunDir, at: float) -> None:
    """An engine that fails and comes back, with words that try to become markup."""
    cause = {"role": "engine", "replica": 0, "restart": 1, "pause_s": 1.0, "cause": SCRIPT, "cause_kind": "exit"}
    write_event(run, "component.restarting", time_s=at, writer="supervisor", **cause)
    # a supervisor writes its events in the order of time
    path = run.events_dir / "0001-supervisor.jsonl"
    lines = sorted(path.read_text().splitlines(), key=lambda line: float(json.loads(line)["time_s"]))
    path.write_text("".join(f"{line}\n" for line in lines))
    away = {"writer": "orchestrator-0", "engine": "engine-0"}
    write_event(run, "engine.away", time_s=at + 0.1, why="<b>killed</b>", **away)
    write_event(run, "engine.back", time_s=at + 3.1, **away)


def write_ledger(run: RunDir, tokens: Path, steps: int, gain: float) -> None:
    """Rollouts of each step; what the policy said is a script in each best one."""
    tokenizer = ChatTokenizer(tokens)
    log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
    random = np.random.default_rng(3)
    for step in range(1, steps + 1):
        groups = range((step - 1) * GROUPS, step * GROUPS)
        for group in groups:
            base = 0.2 + 0.4 * step / steps + gain + 0.1 * float(random.standard_normal())
            for member in range(MEMBERS):
                reward = min(1.0, max(0.0, base + 0.1 * (member - 1)))
                rollout = make_spoken(tokenizer, member, reward, step, SCRIPT if member == MEMBERS - 1 else "tac")
                _finish(log, group, rollout)
            log.append(Kept(group=group))
        log.append(Taken(step=step, groups=[(group, list(range(MEMBERS))) for group in groups]))
        lines = [{"group": g, "member": m, "text": "kept", "advantage": 0.5} for g in groups for m in range(MEMBERS)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.rollouts_dir / f"step-{step:06d}.jsonl").write_text(text)
    log.close()


def make_spoken(tokenizer: ChatTokenizer, member: int, reward: float, step: int, text: str) -> Rollout:
    said = tokenizer.render_ids([{"role": "user", "content": f"say {text}"}], add_generation_prompt=True)
    sampled = [*tokenizer.encode(text), tokenizer.eos_token_id]
    ids, mask = [*said, *sampled], [0] * len(said) + [1] * len(sampled)
    versions = [step - 1] * len(said) + [max(0, step - 1 - (i < 3)) for i in range(len(sampled))]
    return Rollout(
        member=member,
        token_ids=np.asarray(ids, np.int32),
        sampled=np.asarray(mask, np.uint8),
        logprobs=np.asarray(mask, np.float32) * -0.25,
        versions=np.asarray(versions, np.int32),
        reward=reward,
        parts={"exact": reward},
        seconds=1.5,
        ended_s=START_S + 20 + 2.5 * step,
        turns=[Turn(len(said), len(sampled), 0.5, 2.0)],
    )


def _finish(log: RolloutLog, group: int, rollout: Rollout) -> None:
    def entry(place: Any) -> Finished:
        return Finished(
            group=group,
            member=rollout.member,
            environment="words",
            prompt_index=7 * group,
            reward=rollout.reward,
            tokens=len(rollout.token_ids),
            sampled_tokens=rollout.sampled_tokens,
            first_version=int(rollout.versions[-1]),
            last_version=int(rollout.versions[-1]),
            ended_s=rollout.ended_s,
            payload=place,
        )

    log.finish(*encode_rollout(rollout), entry)


def record_ratios(run: RunDir, held: Held, values: list[float | None]) -> list[float | None]:
    """Record log-ratios of a rollout as a trainer does, the values in turn for its tokens; returns those of all."""
    columns = rollout_details(run, held)["columns"]
    sampled = columns["token_ids"][columns["sampled"] != 0]
    ratios = [values[index % len(values)] for index in range(len(sampled))]
    assert held.step is not None
    writer = MetricsWriter(run, 2)
    writer.write_ratios(held.step, [RolloutRatios(*held.id, tokens_digest(sampled), ratios)])
    writer.close()
    return ratios


async def draw_whole(page: Any) -> None:
    """Draw also the plots that are far from what the window shows, as before printing."""
    await page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    await page.wait_for("[...document.querySelectorAll('.canvas')].every((each) => 'points' in each.dataset)")


async def serious(page: Any) -> list[str]:
    """What axe-core finds that is serious or worse."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core-python is not installed (tools/bootstrap.py dev)")
    await page.call(
        "Runtime.evaluate", expression=(Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    )
    found = json.loads(await page.evaluate("axe.run().then((result) => JSON.stringify(result.violations))"))
    return [
        f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]

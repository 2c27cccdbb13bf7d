"""Pictures of page and board for the docs, of real runs: a quickstart, one that is killed and resumed, and one with
prefill, decode and agents on a virtual Slurm. ``HPCRL_PICTURES=DIRECTORY`` keeps them there, from the checkout on."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import start_models
from board_lab import served
from exercise_tasks import make_exercises
from lab import Lab, component, events, processes, steps, wait_step
from page_lab import browser, needs_chromium
from patience import wait_for
from slurm_lab import SlurmLab
from virtual_site import virtual_site
from vllm_environment import VLLM_PYTHON

from hpcrl.analysis.finished_rollouts import read_finished
from hpcrl.analysis.page.write_html import write_page
from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.fleet import ReplicaState, read_fleet
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunStatus

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 300_000
STEPS, KILLED_ENGINE, KILLED_ALL = 48, 9, 21
#: evaluations and checkpoints between the two kills
RESUMED = (f"trainer.steps={STEPS}", "checkpoint.every_steps=6", "evaluation.every_steps=6", "evaluation.prompts=32")
SIDES = ("engine.prefill={replicas: 1, nodes: 1}", "engine.decode={replicas: 2, nodes: 1}")
NODES = 4
"""Of the run with agents: trainer, prefill, and two of decode."""
WELCOMED = "location.search === '' && document.documentElement?.dataset.state === 'drawn'"
SHOWN = (
    "document.documentElement.dataset.state === 'drawn' && [...document.querySelectorAll('.canvas')].every((each) => {"
    "const box = each.getBoundingClientRect();"
    "return box.bottom < 0 || box.top > innerHeight || each.dataset.points; })"
)
"""Whether all plots in the window are drawn."""
pytestmark = [
    needs_chromium,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("pictures"), start_models.taught_model(tmp_path_factory))
    yield lab
    for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
        kill(RunDir(path))


@pytest.fixture(scope="module")
def quickstart(lab: Lab) -> RunDir:
    """The newest quickstart of ``make quickstart`` (``HPCRL_TEST_QUICKSTARTS``), or one that is made."""
    there = Path(os.environ.get("HPCRL_TEST_QUICKSTARTS", ROOT / "runs"))
    ended = [path.parent for path in there.glob("quickstart-*/run.json")]
    ended = [path for path in sorted(ended) if observe(RunDir(path)).state == "COMPLETED"]
    return RunDir(ended[-1]) if ended else lab.submit("quickstart", to_end=True)


@pytest.fixture(scope="module")
def resumed(lab: Lab) -> RunDir:
    """A quickstart that lost its engine, then all of its processes at once, and was resumed."""
    run = lab.submit("quickstart-resumed", *RESUMED)
    wait_step(run, KILLED_ENGINE, 300.0)
    engine = component(run, "engine").pid
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: events(run, "component.restarting"), 60.0, "a restart of the engine")
    wait_step(run, KILLED_ALL, 300.0)
    wait_for(lambda: CheckpointLedger(run.checkpoints_dir).newest_verified().entry, 60.0, "a checkpoint")
    kill(run)
    assert lab.wait_end(run, 120.0).upper() in ("LOST", "FAILED")
    wait_for(lambda: not processes(run), 60.0, "end of all processes")
    lab.hpcrl("resume", run.name)
    lab.complete(run)
    return run


@pytest.fixture(scope="module")
def slurm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A lab on a virtual cluster, whose model has seen the tasks of `swe_exercises`."""
    tasks = make_exercises(tmp_path_factory.mktemp("exercises"), tasks=512)
    model = start_models.exercises_model(tmp_path_factory, tasks)
    limits = {"start_timeout_s": 600, "save_timeout_s": 60, "time_limit_h": 24}
    for cluster in virtual_site("pictures", nodes=NODES):
        directory = tmp_path_factory.mktemp("agents")
        (directory / "tasks").symlink_to(tasks.parent)
        lab = SlurmLab(directory, model, cluster, vllm_python=str(VLLM_PYTHON), limits=limits)
        yield lab
        lab.end_all()


def kill(run: RunDir) -> None:
    """Kill the supervisor and all others of a run, as a machine does that loses its power."""
    status = RunStatus.read(run)
    if status is not None and status.supervisor.alive():
        os.kill(status.supervisor.pid, signal.SIGKILL)
    for process in processes(run):
        process.send_signal(signal.SIGKILL)


async def pictures(
    tmp_path: Path,
    runs: Sequence[RunDir],
    boards: dict[str, tuple[str, str, bool, int]],
    pages: dict[str, tuple[RunDir, str, int]],
) -> dict[str, bytes]:
    """Take pictures.

    Parameters
    ----------
    boards:
        Pages of the board by file: path, what is at the top (a selector; empty: the page's own), whether dark, height.
    pages:
        Runs by the file of a picture of their page, with the section at the top and the height.
    """
    found: dict[str, bytes] = {}
    roots = dict.fromkeys(run.path.parent for run in runs)
    async with served(*roots) as board, browser.chromium_page() as page:
        await page.look(1280)
        await page.open(board.link, WELCOMED)
        for file, (path, section, dark, height) in boards.items():
            await page.look(1280, height, dark=dark)
            await page.open(board.url + path)
            if "/rollouts/" in path:
                await page.evaluate("colour.value = 'logprob'; colour.dispatchEvent(new Event('change'))")
            # the directory of a test says nothing
            place = "document.querySelectorAll('header .mono').forEach((each) => { each.textContent = 'runs/' + "
            await page.evaluate(f"{place}document.querySelector('h1').textContent; }})")
            found[file] = await taken(page, section)
        for file, (run, section, height) in pages.items():
            await page.look(1280, height)
            await page.open(write_page([run], tmp_path / f"{run.name}.html"))
            found[file] = await taken(page, section)
        assert page.messages == []
    for file, content in found.items():
        check_and_keep(file, content)
    return found


async def taken(page: Any, section: str) -> bytes:
    for _ in range(2 if section else 1):  # plots above it may be higher when they are drawn
        if section:
            await page.evaluate(f"document.querySelector({section!r}).scrollIntoView({{ behavior: 'instant' }})")
        await page.wait_for(SHOWN)
    content: bytes = await page.picture()
    return content


def check_and_keep(file: str, content: bytes) -> None:
    assert struct.unpack(">I", content[16:20]) == (1280,), file
    assert len(content) < MOST_BYTES, file
    # more than a ground: what is on a blank picture packs to next to nothing
    assert len(set(zlib.compress(content))) > 200, file
    if directory := os.environ.get("HPCRL_PICTURES"):
        (ROOT / directory / file).write_bytes(content)


async def test_the_picture_of_the_page_of_a_quickstart(tmp_path: Path, quickstart: RunDir) -> None:
    found = await pictures(tmp_path, [quickstart], {}, {"page.png": (quickstart, "#overview", 1060)})
    assert list(found) == ["page.png"]


async def test_pictures_of_a_quickstart_and_of_a_run_that_was_killed_and_resumed(
    tmp_path: Path, quickstart: RunDir, resumed: RunDir
) -> None:
    assert list(steps(resumed)) == list(range(1, STEPS + 1))
    assert [record.attempt for record in steps(resumed).values()][:: STEPS - 1] == [1, 2]
    assert events(resumed, "trainer.restored")
    boards = {
        "board-quickstart.png": (f"/run/{quickstart.name}", "", False, 900),
        "board-resumed.png": (f"/run/{resumed.name}", "#learning", True, 820),
    }
    found = await pictures(tmp_path, [quickstart, resumed], boards, {"page-resumed.png": (resumed, "#learning", 820)})
    assert len(set(found.values())) == 3


@pytest.mark.slurm
@pytest.mark.vllm
async def test_pictures_of_agents_with_prefill_and_decode_and_of_the_list(
    tmp_path: Path, quickstart: RunDir, resumed: RunDir, slurm_lab: SlurmLab
) -> None:
    """The router between the two sides comes with vLLM's environment; engines are hpcrl's own."""
    settings = (f"model.path={slurm_lab.model}", f"environments.0.tasks={slurm_lab.runs_root.parent}/tasks/tasks.jsonl")
    run = slurm_lab.submit("swe-exercises-pd", *settings, *SIDES, recipe="swe_exercises", small=False)
    wait_step(run, 3, 900.0)
    wait_for(lambda: healthy(run), 120.0, "healthy engines", every_s=0.3)
    boards = {
        "board-agents.png": (f"/run/{run.name}/nodes", "", False, 560),
        "board-list.png": ("/", "", False, 360),
    }
    await pictures(tmp_path, [run, quickstart, resumed], boards, {})
    roles = {each.role: each.nodes for each in observe(run).components}
    ended = await asyncio.to_thread(slurm_lab.wait_state, run, ["COMPLETED", "FAILED", "LOST"], 1800.0)
    assert ended["state"] == "COMPLETED"
    assert {"trainer", "prefill", "decode", "router", "orchestrator"} <= set(roles)
    added = {event.data["engine"] for event in events(run, "router.engine_added")}
    assert added == {"prefill-0", "decode-0", "decode-1"}
    finished = read_finished(run)
    best = max(
        (held.entry for step in list(finished.trained)[-3:] for held in finished.trained[step]),
        key=lambda entry: (entry.reward or 0.0, entry.sampled_tokens),
    )
    boards = {"board-rollout.png": (f"/run/{run.name}/rollouts/{best.group}/{best.member}", ".rollout", False, 820)}
    await pictures(tmp_path, [run], boards, {"page-agents.png": (run, "#learning", 820)})


def healthy(run: RunDir) -> bool:
    """Whether all engines serve, as the orchestrator knows it now."""
    view = observe(run)
    replicas = read_fleet(run, view.attempt, view.components).replicas
    return len(replicas) == 3 and all(each.state is ReplicaState.HEALTHY for each in replicas)

"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from start_models import start_model
from vllm_environment import SKIPPED, skip_without_vllm

# A shell starts background commands with SIGINT ignored, and children inherit that: then no Ctrl-C test could
# work. A handler, unlike "ignore", is set back to the default in every child.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside each other, and threads of one that wait for each other by spinning take the processors from all:
# trainer tests took six times the processor time with two. Runs set the variable themselves (`engine.threads`).
os.environ["OMP_NUM_THREADS"] = "1"

# What is imported and collected stays: looking through it for garbage was a third of the time before the first test,
# in each worker, and went on between tests.
gc.disable()

# Nor is what tests have left behind a forked child's to collect: native parts of it do not survive a fork.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def empty_working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test sees what lies where the tests are started: a developer's recipes, profiles, start models and runs."""
    path = tmp_path_factory.mktemp("cwd")
    with contextlib.chdir(path):
        yield path


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which runs and profiles a user has is in the home directory: no test sees a developer's, or adds to them."""
    home = tmp_path_factory.getbasetemp() / "home"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("state", "config"):
            patch.setenv(f"XDG_{name.upper()}_HOME", str(home / name))
        yield


@pytest.fixture(autouse=True)
def no_runs_of_other_tests(
    own_home: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what another test left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "home" / uuid.uuid4().hex))


@pytest.fixture(scope="session", autouse=True)
def usual_umask() -> Iterator[None]:
    """With 002, as some systems have it, what tests write by hand would count as others' to change."""
    previous = os.umask(0o022)
    yield
    os.umask(previous)


@pytest.fixture(autouse=True)
def nothing_left_in_working_directory(empty_working_directory: Path) -> Iterator[None]:
    """Nor what another test wrote there: one that needs a directory of its own goes into its ``tmp_path``."""
    yield
    left = sorted(path.name for path in empty_working_directory.iterdir())
    for name in left:
        path = empty_working_directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not left, f"the test wrote {', '.join(left)} into the working directory"


#: files that take minutes, and are begun first: else the last of them would run when nothing else does
LONGEST = ("e2e/test_vllm_faults.py", "slurm_e2e/test_slurm_faults.py", "slurm_e2e/test_slurm_reference.py")
#: rooms whose tests mostly wait (for clusters and runs), and others that take long; of each the longest first
WAITING = ("slurm_e2e", "e2e", "journeys", "supervisor", "devcluster")
BUSY = ("trainer", "planning", "durability", "checkpoints", "weights")
WAITING_BEGUN = 0.6
"""When all files that wait are begun, as a share of the others."""


def pytest_configure() -> None:
    """End where a run of tests is meant for another torch than the one that Python finds (`make test-oldest-torch`)."""
    wanted = os.environ.get("HPCRL_TEST_TORCH")
    if wanted and (found := version("torch").split("+")[0]) != wanted:
        pytest.exit(f"HPCRL_TEST_TORCH asks for torch {wanted}, and Python finds {found}", returncode=4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the files")
    parser.addoption("--slow-part", default="1/1", metavar="K/N", help="all that is not slow, and a part of what is")


@pytest.hookimpl(trylast=True)  # parts are of what `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_vllm(items)
    for option, dealt in (("--part", items), ("--slow-part", [item for item in items if is_slow(item)])):
        if config.getoption(option) != "1/1":
            left_out = left_out_of(dealt, config.getoption(option))
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_order(items)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked as slow."""
    return item.get_closest_marker("slow") is not None


def left_out_of(items: list[pytest.Item], part: str) -> set[pytest.Item]:
    """The tests of other parts. Files are dealt out one by one, the longest first, so that parts take about as long."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"part {part}: K/N is wanted, with K from 1 to N")
    files = list(dict.fromkeys(item.path for item in in_order(items)))
    chosen = set(files[int(number) - 1 :: int(parts)])
    return {item for item in items if item.path not in chosen}


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files as workers take them, one after the other: the longest first, those that wait spread among those that
    compute, so that the processors have something to do meanwhile, and the short ones last: workers end together."""
    ranks = {name: rank for rank, name in enumerate((*WAITING, *BUSY))}
    files: dict[Path, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: ranks.get(room(item.path), len(ranks))):
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if room(path) in WAITING]
    others = [path for path in files if room(path) not in WAITING]
    places = {path: WAITING_BEGUN * i / len(waiting) for i, path in enumerate(waiting)}
    places |= {path: i / len(others) for i, path in enumerate(others)}
    places |= {path: LONGEST.index(of_tests(path)) - len(LONGEST) for path in files if of_tests(path) in LONGEST}
    return [item for path in sorted(places, key=places.__getitem__) for item in files[path]]


def room(path: Path) -> str:
    """The folder of tests/ that a file is in, or below."""
    return of_tests(path).partition("/")[0]


def of_tests(path: Path) -> str:
    """The name of a file from tests/ on."""
    return path.relative_to(Path(__file__).parent).as_posix()


@pytest.fixture(scope="session")
def vllm_start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start model of the recipe quickstart_vllm; ``HPCRL_TEST_VLLM_MODEL`` names one that is there already."""
    if given := os.environ.get("HPCRL_TEST_VLLM_MODEL"):
        return Path(given)
    return start_model(tmp_path_factory, "vllm", recipe="quickstart_vllm")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if SKIPPED in str(r.longrepr)]
    if skipped:
        hint = "python3 tools/bootstrap.py --vllm"
        terminalreporter.write_sep("!", f"{len(skipped)} tests with a real vLLM did NOT run: {hint}", red=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test of a GPU is skipped where there is none. Any other reason to skip it is a failure: it would hide one."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and item.get_closest_marker("gpu") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason != "no GPU":
            report.outcome = "failed"
            report.longrepr = f"A test of a GPU is skipped for another reason than that there is none: {reason}"

"""Ranks of one node, from one process: what they are given, and what is left of them when one of them fails."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from patience import patience, wait_for

from hpcrl.processes.interpreter import module_command
from hpcrl.runs.cause import find_dead_worker
from hpcrl.trainer.launcher import _IMPORTS, RANK_NAME

#: what every program begins with: a file for each thing that a rank says, and waiting for one
_SAYS = """
import os, pathlib, signal, sys, time
rank, told = int(os.environ["RANK"]), pathlib.Path(os.environ["TOLD"])
def say(what, text="x"):
    path = told / f"{what}-{rank}"
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)
def wait(name):
    while not (told / name).exists():
        time.sleep(0.01)
"""


class Launched:
    """A launcher and what is known of its ranks."""

    def __init__(self, process, directory):
        self.process, self.told = process, directory / "told"
        self.log_path = directory / "log"

    def wait(self, timeout_s=20.0):
        return self.process.wait(timeout_s * patience())

    @property
    def log(self):
        return self.log_path.read_text()

    def says(self, name):
        """What a rank said, once it has."""
        wait_for((self.told / name).exists, 20, f"{name}; the log: {self.log}")
        return (self.told / name).read_text()


@pytest.fixture
def launch(tmp_path):
    """Start ranks that run ``program``; nothing of them may be left afterwards."""
    launched = []

    def start(program, *flags, ranks=2, imports="", **variables):
        (tmp_path / "told").mkdir(exist_ok=True)
        (tmp_path / "rank_program.py").write_text(_SAYS + program)
        flags = ("--ranks", str(ranks), "--imports", imports, *flags, "rank_program", "one", "two")
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "TOLD": str(tmp_path / "told"), **variables}
        with (tmp_path / "log").open("w") as log:
            command = module_command(sys.executable, "hpcrl.trainer.launcher", *flags)
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        launched.append(process)
        return Launched(process, tmp_path)

    with no_rank_left(tmp_path):
        try:
            yield start
        finally:
            for process in launched:
                process.kill()
                process.wait()


@contextmanager
def no_rank_left(directory):
    yield
    mark = f"TOLD={directory / 'told'}"

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                if mark == f"TOLD={process.environ().get('TOLD')}" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    wait_for(lambda: not left(), 5, "end of all ranks")


def test_each_rank_has_its_place_and_a_state_of_its_own(launch):
    program = """
import random, numpy
names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT"
names += " OMP_NUM_THREADS"
say("place", " ".join(os.environ[name] for name in names.split()))
say("argv", sys.argv[1:])
say("name", pathlib.Path("/proc/self/comm").read_text().strip())
say("random", (random.random(), os.urandom(8), os.getsid(0) == os.getpid(), os.getppid()))
sys.exit(0)
"""
    flags = ("--nodes", "3", "--node-rank", "1", "--master-addr", "n007", "--master-port", "29500")
    run = launch(program, *flags, imports="random,numpy", OMP_NUM_THREADS="5")
    assert run.wait() == 0, run.log
    assert run.says("place-2") == "2 0 1 6 2 3 n007 29500 5"
    assert run.says("place-3") == "3 1 1 6 2 3 n007 29500 5"
    assert run.says("argv-3") == "['one', 'two']"
    assert [run.says(f"name-{rank}") for rank in (2, 3)] == [RANK_NAME.format(2), RANK_NAME.format(3)]
    first, second = (eval(run.says(f"random-{rank}")) for rank in (2, 3))
    assert first[0] != second[0]
    assert first[2:] == second[2:] == (True, run.process.pid)
    assert run.log == ""


def test_one_thread_is_the_default(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = launch('say("threads", os.environ["OMP_NUM_THREADS"])')
    assert (run.wait(), run.says("threads-0"), run.says("threads-1")) == (0, "1", "1")


def test_what_all_need_is_imported_once(launch, tmp_path):
    (tmp_path / "dear.py").write_text("import os\npid = os.getpid()\n")
    run = launch('import dear, gc\nsay("pid", dear.pid)\nsay("frozen", gc.get_freeze_count() > 0)', imports="dear")
    assert run.wait() == 0, run.log
    assert {run.says("pid-0"), run.says("pid-1")} == {str(run.process.pid)}
    assert run.says("frozen-0") == "True"


def test_a_rank_that_is_killed_ends_the_others_and_is_named(launch):
    run = launch('say("pid", os.getpid())\nsignal.pause()', "--nodes", "2", "--node-rank", "1", ranks=3)
    pids = [int(run.says(f"pid-{rank}")) for rank in (3, 4, 5)]
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert f"ERROR launcher hpcrl.trainer.launcher: rank 4 (pid {pids[1]}) was killed by SIGKILL\n" in run.log
    assert "SIGTERM to ranks 3, 5" in run.log
    # the others died of our signal, and are no cause
    assert run.log.count("was killed") == 1
    assert find_dead_worker(run.log.encode()) == (4, 9)


def test_a_rank_that_was_killed_is_named_although_another_ended_of_it_before(launch):
    """Its memory may take a while to be given back; meanwhile others miss it."""
    program = """
say("pid", os.getpid())
wait("pid-0"), wait("pid-1")
if rank == 0:
    sys.exit(7)
first = pathlib.Path("/proc", (told / "pid-0").read_text())
while first.exists():  # until the launcher has seen its end
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = launch(program)
    assert run.wait() == 7
    assert find_dead_worker(run.log.encode()) == (1, signal.SIGKILL)


def test_of_two_ends_that_are_seen_at_once_the_kill_is_the_first(launch):
    run = launch('say("pid", os.getpid())\nwait("go")\nsys.exit(7) if rank == 0 else os.abort()')
    pids = [int(run.says(f"pid-{rank}")) for rank in (0, 1)]
    run.process.send_signal(signal.SIGSTOP)
    (run.told / "go").touch()
    wait_for(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids), 10, "both ends")
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 128 + signal.SIGABRT
    killed, ended = run.log.splitlines()
    assert killed.endswith("was killed by SIGABRT")
    assert ended.endswith("exited with code 7")


def test_a_rank_that_fails_leaves_the_others_time_for_a_last_word(launch):
    program = """
if rank == 1:
    wait("ready-0")
    sys.exit(3)
say("ready")
time.sleep(0.2)
say("last word")
signal.pause()
"""
    run = launch(program)
    assert run.wait() == 3
    assert run.says("last word-0")
    assert "exited with code 3\n" in run.log
    assert find_dead_worker(run.log.encode()) is None


def test_sigterm_is_handed_on_and_waited_for(launch):
    program = """
def obey(*_):
    time.sleep(0.3)
    say("obeyed")
    sys.exit(0)
signal.signal(signal.SIGTERM, obey)
say("ready")
signal.pause()
"""
    run = launch(program)
    assert [run.says(f"ready-{rank}") for rank in (0, 1)]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert [(run.told / f"obeyed-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert "INFO launcher hpcrl.trainer.launcher: SIGTERM is forwarded to ranks 0, 1" in run.log
    assert "ERROR" not in run.log


def test_an_interrupt_reaches_what_a_rank_has_started(launch):
    program = 'import subprocess\nchild = subprocess.Popen(["sleep", "60"])\nsay("child", child.pid)\nsignal.pause()'
    run = launch(program)
    children = [int(run.says(f"child-{rank}")) for rank in (0, 1)]
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    wait_for(lambda: all(map(has_ended, children)), 5, "end of what ranks started")


def test_a_rank_that_ignores_sigterm_is_killed(launch):
    program = """
if rank == 0:
    wait("deaf-1")
    sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("deaf")
while True:
    time.sleep(60)
"""
    run = launch(program, "--grace-s", "0.3")
    assert run.wait() == 4
    assert "WARNING launcher hpcrl.trainer.launcher: SIGKILL to rank 1" in run.log
    assert find_dead_worker(run.log.encode()) is None


def has_ended(pid):
    """Return whether a process has ended. One whose parent was killed may stay a zombie: not every init reaps."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_go_with_a_launcher_that_is_killed(launch):
    run = launch('signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay("pid", os.getpid())\nsignal.pause()')
    pids = [int(run.says(f"pid-{rank}")) for rank in (0, 1)]
    run.process.kill()
    wait_for(lambda: all(map(has_ended, pids)), 5, "end of the ranks")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 thread"),
        ("import socket\nlistener = socket.create_server(('127.0.0.1', 0))", "opened socket:["),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        # a torch that was asked for CUDA
        ("import types, sys\nsys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace("
         "is_initialized=lambda: True))", "initialised CUDA"),
    ],
)  # fmt: skip
def test_ranks_begin_anew_where_a_copy_of_the_process_would_be_broken(launch, tmp_path, source, words):
    (tmp_path / "unsafe.py").write_text(source)
    program = """
say("fresh", "unsafe" not in sys.modules and sys.flags.safe_path)
say("argv", sys.argv[1:])
say("pid", os.getpid())
sys.exit(0 if rank else 5)
"""
    run = launch(program, imports="unsafe")
    assert run.wait() == 5
    assert run.says("fresh-0") == run.says("fresh-1") == "True"
    assert run.says("argv-0") == "['one', 'two']"
    assert "ranks import for themselves, which takes longer: " in run.log
    assert words in run.log
    assert f"rank 0 (pid {run.says('pid-0')}) exited with code 5" in run.log


def test_a_rank_begins_anew_where_torch_says_that_cuda_was_lost_by_the_fork(launch, tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os, types\nown = os.getpid()\ncuda = types.SimpleNamespace(is_initialized=lambda: False,"
        " _is_in_bad_fork=lambda: os.getpid() != own)\n"
    )
    run = launch('import torch\nsay("usable", not torch.cuda._is_in_bad_fork())', imports="torch")
    assert run.wait() == 0, run.log
    assert run.says("usable-0") == run.says("usable-1") == "True"
    assert "CUDA was initialised before this rank was forked" in run.log


def test_the_trainer_is_forked_and_its_ranks_find_each_other(launch):
    """Its imports start no thread and open nothing, although ranks have two threads each."""
    program = """
import torch, torch.distributed as dist
from hpcrl.trainer.parallel.mesh import distributed
with distributed(timeout_s=60):
    total = torch.ones(())
    dist.all_reduce(total)
    say("total", (os.environ.get("OPENBLAS_NUM_THREADS"), torch.get_num_threads() > 1, float(total)))
"""
    run = launch(program, imports=",".join(_IMPORTS), OMP_NUM_THREADS="2")
    assert run.wait(60) == 0, run.log
    assert "ranks import for themselves" not in run.log
    assert run.says("total-0") == run.says("total-1") == f"(None, {os.cpu_count() > 1}, 2.0)"


@pytest.mark.parametrize("flags", [("--ranks", "0"), ("--ranks", "2", "--node-rank", "1")])
def test_numbers_that_make_no_sense_are_refused(flags):
    command = module_command(sys.executable, "hpcrl.trainer.launcher", *flags)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ranks on node" in done.stderr

"""Libraries imported by real interpreters: those that load, crash, hang, print, or are of another version."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from msgspec.structs import replace
from patience import wait_for

from hpcrl import __version__
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.sites.foreign_script import ScriptEnd, run_script
from hpcrl.sites.library_findings import FindingRow, library_findings, library_summary
from hpcrl.sites.library_probe import (
    CudaAnswer,
    LibraryAnswer,
    LibraryQuestion,
    answer_of,
    library_questions,
    probe_libraries,
)
from hpcrl.sites.profile_check import Severity


def question(library: str, *, needed: bool = True, path: Path | None = None, **more: object) -> LibraryQuestion:
    environ = {} if path is None else {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    asked = LibraryQuestion(
        python=sys.executable, roles=("trainer",), library=library, needed=needed, gpus=True, environ=environ
    )
    return replace(asked, **more)


def package(directory: Path, module: str, code: str, *, distribution: str, version: str, requires: str = "") -> None:
    """Install a package by hand."""
    (directory / module).mkdir()
    (directory / module / "__init__.py").write_text(code)
    info = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {requires}"] if requires else []), "", ""]))


def found(*answers: LibraryAnswer, has_driver: bool = True) -> list[tuple[str, Severity]]:
    return [(row.code, row.severity) for row in library_findings(answers, has_driver=has_driver)]


def good(library: str, version: str, **more: object) -> LibraryAnswer:
    return replace(
        LibraryAnswer(question=question(library), version=version, python_version="3.11.7", distribution="x"), **more
    )


@pytest.fixture(scope="module")
def site() -> SlurmCluster:
    profile = load_cluster("h200-28").value
    assert isinstance(profile, SlurmCluster)
    return profile


def test_what_is_installed_here_is_imported_and_has_its_version() -> None:
    hpcrl, numpy = probe_libraries([question("hpcrl"), question("NumPy")], workers=2)
    assert (hpcrl.kind, hpcrl.problem, hpcrl.version) == ("good", "", __version__)
    assert (numpy.kind, numpy.distribution, numpy.version.split(".")[0]) == ("good", "numpy", "2")
    assert numpy.python_version == ".".join(map(str, sys.version_info[:3]))
    assert found(hpcrl, numpy) == []
    assert f"hpcrl {__version__}, NumPy {numpy.version}" in library_summary([hpcrl, numpy])[0]


def test_what_is_not_installed_matters_only_where_it_is_needed() -> None:
    answers = probe_libraries([question("FlashMLA", needed=False), question("FlashMLA")], workers=2)
    assert [answer.kind for answer in answers] == ["absent", "absent"]
    assert found(*answers) == [("imports", Severity.ERROR)]
    assert "not installed: FlashMLA" in library_summary(answers)[0]
    # without a driver nothing is said of what only GPUs need
    assert found(*answers, has_driver=False) == []


@pytest.mark.parametrize(
    ("code", "kind", "words", "finding"),
    [
        ("import nowhere_at_all", "failed", "No module named 'nowhere_at_all'", "imports"),
        ("assert False, 'no nvcc'", "failed", "AssertionError: no nvcc", "imports"),
        ("import sys; sys.exit(3)", "failed", "it ended with exit code 3", "imports"),
        ("import sys; sys.exit('no licence')", "failed", "no licence", "imports"),
        ("import os; os._exit(0)", "failed", "it ended the interpreter", "imports"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV", "import-crash"),
        ("import os; os.abort()", "crash", "SIGABRT", "import-crash"),
    ],
)
def test_how_an_import_fails(code: str, kind: str, words: str, finding: str, tmp_path: Path) -> None:
    package(tmp_path, "flash_mla", code, distribution="flash-mla", version="1.0.0")
    (answer,) = probe_libraries([question("FlashMLA", needed=False, path=tmp_path)])
    assert (answer.kind, answer.version) == (kind, "1.0.0")
    assert words in answer.problem
    (row,) = library_findings([answer], has_driver=True)
    assert (row.code, row.severity, row.key) == (finding, Severity.WARNING, "python_by_role.trainer")
    for part in (sys.executable, "FlashMLA", "1.0.0", words):
        assert part in row.what
    assert row.hint
    assert found(replace(answer, question=question("FlashMLA"))) == [(finding, Severity.ERROR)]


def test_a_crash_names_the_line(tmp_path: Path) -> None:
    code = "def load():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\nload()\n"
    package(tmp_path, "flash_mla", code, distribution="flash-mla", version="1.0.0")
    (answer,) = probe_libraries([question("FlashMLA", path=tmp_path)])
    assert f'at File "{tmp_path}/flash_mla/__init__.py", line 3 in load' in answer.problem


def test_an_import_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '3600'])\n"
    code += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\nchild.wait()\n"
    package(tmp_path, "flash_mla", code, distribution="flash-mla", version="1.0.0")
    (answer,) = probe_libraries([question("FlashMLA", path=tmp_path)], limit_s=6.0)
    assert answer.kind == "hang"
    assert "it takes longer than 6 s" in answer.problem
    assert found(answer) == [("import-hang", Severity.ERROR)]
    # it is a zombie of nobody, or gone; the signal has been sent, and the kernel takes a moment for it
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")

    def has_ended() -> bool:
        try:
            return child.read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_for(has_ended, 10.0, "end of the child", every_s=0.01)


def test_prints_are_a_note_and_no_answer(tmp_path: Path) -> None:
    code = "print('Welcome'); print('{\"absent\": true}')\nflash_mla_sparse_fwd = None\n"
    package(tmp_path, "flash_mla", code, distribution="flash-mla", version="1.0.0")
    (answer,) = probe_libraries([question("FlashMLA", path=tmp_path)])
    assert (answer.kind, answer.printed) == ("good", "Welcome")
    (row,) = library_findings([answer], has_driver=True)
    assert (row.code, row.severity) == ("import-prints", Severity.NOTE)
    assert "FlashMLA" in row.what
    assert "'Welcome'" in row.what


def test_a_library_without_what_hpcrl_calls(tmp_path: Path) -> None:
    package(tmp_path, "flash_mla", "", distribution="flash-mla", version="1.0.0")
    (answer,) = probe_libraries([question("FlashMLA", path=tmp_path)])
    assert answer.missing == ["flash_mla_sparse_fwd"]
    assert found(answer) == [("version-lacks", Severity.ERROR)]


def compiler(path: Path, lines: str) -> str:
    """A C compiler that takes what Triton would give it, and then runs some lines of a shell."""
    path.write_text(f'#!/bin/sh\ntest -f "$1" || exit 9\n{lines}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(
    not Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h").is_file(), reason="no headers here"
)
@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("exit 0", ""),
        ("echo 'probe.c:1:10: fatal error: pyconfig.h: No such file' >&2; exit 1", "fatal error: pyconfig.h"),
        ("echo 'ld: cannot find crti.o' >&2; exit 3", "ended with exit code 3: ld: cannot find crti.o"),
        (None, "neither gcc nor clang is on PATH, and CC is not set"),
    ],
)
def test_triton_must_be_able_to_compile_on_nodes_with_gpus(lines: str | None, problem: str, tmp_path: Path) -> None:
    """Its import succeeds without a compiler, and its first program on a GPU does not."""
    package(tmp_path, "triton", "", distribution="triton", version="3.7.1")
    asked = question("Triton", path=tmp_path)
    cc = {"PATH": str(tmp_path), "CC": "" if lines is None else compiler(tmp_path / "cc", lines)}
    asked = replace(asked, environ={**asked.environ, **cc})
    (answer,) = probe_libraries([asked])
    assert answer.kind == "good"
    assert problem in answer.build_problem
    assert bool(problem) == bool(answer.build_problem)
    assert found(answer) == ([("no-compiler", Severity.ERROR)] if problem else [])
    assert found(answer, has_driver=False) == []
    # vLLM uses it; a node without GPUs compiles nothing with it
    of_vllm = replace(asked, roles=("vllm",), needed=False)
    assert found(replace(answer, question=of_vllm)) == ([("no-compiler", Severity.WARNING)] if problem else [])
    (plain,) = probe_libraries([replace(asked, gpus=False)])
    assert plain.build_problem == ""


def test_triton_needs_the_headers_of_its_interpreter(tmp_path: Path) -> None:
    """A distribution's Python has them in a package of their own."""
    code = "import sysconfig\nown = sysconfig.get_paths\n"
    code += f"sysconfig.get_paths = lambda *a, **k: own(*a, **k) | {{'include': {str(tmp_path)!r}}}\n"
    package(tmp_path, "triton", code, distribution="triton", version="3.7.1")
    asked = question("Triton", path=tmp_path)
    (answer,) = probe_libraries([replace(asked, environ={**asked.environ, "CC": compiler(tmp_path / "cc", "exit 0")})])
    assert answer.build_problem == f"the headers of the interpreter are missing: there is no {tmp_path}/Python.h"
    (row,) = library_findings([answer], has_driver=True)
    assert "python3-dev" in row.hint


def test_what_a_package_asks_of_others_is_compared(tmp_path: Path) -> None:
    asks = 'numpy<1; python_version >= "3"'
    package(tmp_path, "vllm", "", distribution="vllm", version="0.32.0", requires=asks)
    (answer,) = probe_libraries([question("vLLM", path=tmp_path)])
    assert len(answer.unmet) == 1
    assert answer.unmet[0].startswith("numpy<1, and 2.")
    assert found(answer) == [("versions-conflict", Severity.ERROR)]


@pytest.mark.parametrize(
    ("answer", "code", "severity"),
    [
        (good("torch", "2.10.1"), "version-old", Severity.ERROR),
        (good("torch", "2.14.0"), "version-new", Severity.WARNING),
        (good("vLLM", "0.33.0"), "version-new", Severity.WARNING),
        (good("torch", "unknown"), "version-unknown", Severity.WARNING),
        (good("DeepEP", "1.2.1", question=question("DeepEP", needed=False)), "version-old", Severity.WARNING),
        (good("hpcrl", "0.0.1"), "hpcrl-differs", Severity.WARNING),
        (good("hpcrl", __version__, python_version="3.10.12"), "python-old", Severity.ERROR),
        (good("torch", "2.13.0", cuda=CudaAnswer()), "torch-without-cuda", Severity.ERROR),
        (
            good("torch", "2.13.0", cuda=CudaAnswer(built="13.0", driver="12.4", problem="driver too old")),
            "cuda-driver",
            Severity.ERROR,
        ),
        (good("torch", "2.13.0", cuda=CudaAnswer(built="13.0", driver="13.0")), "cuda-driver", Severity.ERROR),
        (good("hpcrl", "", kind="missing", problem="no such program"), "imports", Severity.ERROR),
        (good("torch", "", kind="skipped", problem="no time"), "imports-slow", Severity.WARNING),
        (good("torch", "", kind="unreadable", problem="its answer cannot be read"), "imports", Severity.ERROR),
    ],
)
def test_what_answers_mean(answer: LibraryAnswer, code: str, severity: Severity) -> None:
    (row,) = library_findings([answer], has_driver=True)
    assert (row.code, row.severity) == (code, severity)
    assert row.hint


def test_a_fork_that_counts_otherwise_is_judged_by_what_it_has() -> None:
    assert found(good("DeepGEMM", "0.2.5", distribution="sgl-deep-gemm")) == []
    assert found(good("DeepGEMM", "0.2.5", distribution="deep-gemm")) == [("version-old", Severity.ERROR)]
    lacking = good("DeepGEMM", "0.2.5", distribution="sgl-deep-gemm", missing=["k_grouped_fp8_gemm_nt_contiguous"])
    assert found(lacking) == [("version-lacks", Severity.ERROR)]


def test_the_driver_matters_where_there_is_one_and_nccl_where_deepep_is() -> None:
    torch = good("torch", "2.13.0", cuda=CudaAnswer(built="13.0", driver="13.0", gpus=8, nccl="2.29.7"))
    deepep = good("DeepEP", "2.1.0")
    assert found(torch) == []
    assert found(torch, replace(deepep, kind="absent", question=question("DeepEP", needed=False))) == []
    assert found(torch, deepep) == [("nccl-old", Severity.WARNING)]
    newer = CudaAnswer(built="13.0", driver="13.0", gpus=8, nccl="2.30.4")
    assert found(replace(torch, cuda=newer), deepep) == []
    broken = replace(torch, cuda=CudaAnswer(built="13.0", problem="no driver"))
    assert found(broken, has_driver=False) == []


def test_an_interpreter_that_is_not_there_is_one_finding(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    answers = probe_libraries([question(name, python=python) for name in ("hpcrl", "torch")])
    assert {answer.kind for answer in answers} == {"missing"}
    rows: list[FindingRow] = library_findings(answers, has_driver=True)
    assert len(rows) == 1
    assert python in rows[0].what


def test_no_time_is_an_answer() -> None:
    assert [a.kind for a in probe_libraries([question("torch")], budget_s=0.0)] == ["skipped"]


def test_answers_of_the_wrong_shape_are_refused() -> None:
    answer = answer_of(question("torch"), ScriptEnd(answers=[{"version": 2}]))
    assert answer.kind == "unreadable"


def test_each_role_is_asked_of_its_own_interpreter(site: SlurmCluster) -> None:
    asked = library_questions(site)
    assert {each.python for each in asked} == {sys.executable}
    assert {each.library for each in asked if each.needed} == {
        *("hpcrl", "torch", "Triton", "NumPy", "safetensors", "tokenizers")
    }
    pythons = {"trainer": "/t", "orchestrator": "/o"}
    named = library_questions(site.model_copy(update={"python_by_role": pythons, "vllm_python": "/v"}))
    needed = {
        python: {each.library for each in named if each.python == python and each.needed}
        for python in ("/t", "/o", "/v")
    }
    assert needed["/t"] == {"hpcrl", "torch", "Triton", "NumPy", "safetensors", "tokenizers"}
    assert needed["/o"] == {"hpcrl", "NumPy", "tokenizers"}
    assert needed["/v"] == {"hpcrl", "torch", "vLLM", "transformers"}
    assert {each.roles for each in named} == {("trainer",), ("orchestrator", "env"), ("vllm",)}
    # an environment of engines alone may be vLLM's
    alone = library_questions(site.model_copy(update={"python_by_role": {"engine": "/e", **pythons}}))
    assert {each.library for each in alone if each.python == "/e" and each.needed} == {"hpcrl", "torch"}
    container = load_cluster("pyxis-site").value
    assert isinstance(container, SlurmCluster)
    assert library_questions(container) == []


def test_a_partition_is_asked_for_its_own_roles() -> None:
    site = load_cluster("roce-h100").value
    assert isinstance(site, SlurmCluster)
    site = site.model_copy(update={"python_by_role": {"trainer": "/t", "engine": "/e", "orchestrator": "/o"}})
    assert {each.python for each in library_questions(site, "train")} == {"/t", "/o"}
    assert {each.python for each in library_questions(site, "serve")} == {"/e"}


def test_the_script_imports_nothing_of_hpcrl(tmp_path: Path) -> None:
    """Also where the directory of the script would be the first place to import from."""
    import hpcrl.sites.library_probe as probe

    code = f"import sys, runpy; sys.argv = ['x', {str(tmp_path / 'answers')!r}, sys.argv[2]]\n"
    code += f"runpy.run_path({str(probe.SCRIPT)!r}, run_name='__main__')\n"
    code += "print(*[n for n in sys.modules if n.startswith('hpcrl')])\n"
    script = tmp_path / "outer.py"
    script.write_text(code)
    asked = {
        "module": "json",
        "distributions": [],
        "attributes": [],
        "known": [],
        "nccl": [],
        "gpus": True,
        "hang_s": 60,
    }
    end = run_script(sys.executable, script, asked, limit_s=60)
    assert (end.kind, end.printed) == ("good", "")
    assert [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()][-1]["imported"] is True

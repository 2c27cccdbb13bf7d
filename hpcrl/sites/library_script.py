"""Import one library and say how that went. Runs in the interpreter of a role: it imports nothing of hpcrl.

``python library_script.py ANSWERS QUESTION``: the question is JSON (`hpcrl.sites.library_probe`); answers are appended
to a file as lines of JSON, because libraries print on stdout. What is known before the import is written before it, so
that a crash leaves it behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import Any

#: PR_SET_PDEATHSIG of prctl
_DIE_WITH_PARENT = 1
_C_SOURCE = "#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"
_BUILD_S = 60.0


def say(path: str, **answer: object) -> None:
    """Append one answer."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(answer) + "\n")


def installed(distributions: Sequence[str]) -> tuple[str, str]:
    """Return name and version of the first package that is installed; empty texts where none is."""
    for name in distributions:
        try:
            return name, str(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def unmet(distribution: str, known: Sequence[str]) -> list[str]:
    """Return what a package asks of the packages in ``known`` and does not get, as texts."""
    requirements: Any = None
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            requirements = importlib.import_module(module)
        except ImportError:
            continue
        break
    if requirements is None or not distribution:
        return []
    found = []
    for line in importlib.metadata.requires(distribution) or []:
        try:
            wanted = requirements.Requirement(line)
            if wanted.name.lower().replace("_", "-") not in known:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = importlib.metadata.version(wanted.name)
        except Exception:  # noqa: BLE001 - a line that cannot be read, or what is not installed
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found.append(f"{wanted.name}{wanted.specifier}, and {version} is installed")
    return found


def driver_version() -> str:
    """Return the version of CUDA that the driver can do (``13.0``); empty without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def cuda(torch: Any) -> dict[str, Any]:
    """Return what torch says of CUDA."""
    found: dict[str, Any] = {
        "built": str(torch.version.cuda or ""),
        "driver": driver_version(),
        "problem": "",
        "gpus": 0,
        "nccl": "",
    }
    if not found["built"]:
        return found
    try:
        torch.cuda.init()
        found["gpus"] = torch.cuda.device_count()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found["problem"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # absent from some builds
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def build_problem() -> str:
    """Return why a module in C cannot be built here; empty where it can.

    Triton builds one before its first program on a GPU: with CC, gcc or clang, and the headers of the interpreter
    (``triton/runtime/build.py`` of 3.6 and 3.7). Its import succeeds without them.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "neither gcc nor clang is on PATH, and CC is not set"
    # as Triton: Debian's default scheme is of what people install there
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    if not os.path.isfile(os.path.join(headers, "Python.h")):
        return f"the headers of the interpreter are missing: there is no {headers}/Python.h"
    with tempfile.TemporaryDirectory() as place:
        source, module = os.path.join(place, "probe.c"), os.path.join(place, "probe.so")
        with open(source, "w", encoding="utf-8") as stream:
            stream.write(_C_SOURCE)
        command = [compiler, source, "-shared", "-fPIC", f"-I{headers}", "-o", module]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=_BUILD_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} cannot be run: {error}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    words = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it says nothing")
    return f"{compiler} ended with exit code {done.returncode}: {words}"


def alone() -> None:
    """End with the process that started this one, and import nothing from the directory of this file."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # older Pythons put the directory of the script first
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    faulthandler.enable()


def main() -> None:
    """Answer one question."""
    path, question = sys.argv[1], json.loads(sys.argv[2])
    alone()
    faulthandler.dump_traceback_later(question["hang_s"], exit=False)
    module, distributions = question["module"], question["distributions"]
    distribution, version = installed(distributions)
    python = ".".join(map(str, sys.version_info[:3]))
    say(path, python=python, distribution=distribution, version=version)
    if not distribution and importlib.util.find_spec(module.partition(".")[0]) is None:
        say(path, absent=True)
        return
    try:
        library = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - libraries assert and raise what they like when they are imported
        say(path, error=f"{type(error).__name__}: {error}")
        return
    missing = [name for name in question["attributes"] if not hasattr(library, name)]
    if not version:
        version = str(getattr(library, "__version__", ""))
    answer: dict[str, Any] = {"version": version, "missing": missing, "unmet": unmet(distribution, question["known"])}
    if module == "torch" and question["gpus"]:
        answer["cuda"] = cuda(library)
        answer["cuda"].setdefault("nccl", installed(question["nccl"])[1])
    if module == "triton" and question["gpus"]:
        answer["build_problem"] = build_problem()
    # output at exit belongs to the library, too, and an answer that was written stays valid
    say(path, imported=True, **answer)


if __name__ == "__main__":
    main()

"""Set up the virtual environment of a checkout: ``python3 tools/bootstrap.py EXTRA...``.

Needs nothing but Python itself. Runs pip only when something that it installs from has changed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
#: the environment of vLLM engines: vLLM pins torch and much else
VLLM_VENV = ROOT / ".venv-vllm"
#: Triton alone, for tests that run programs in its interpreter: in `VENV` torch would find it and compile with it
TRITON = ROOT / ".triton"
#: the oldest torch of pyproject.toml, for a second run of tests that compute; it comes before `VENV` on their path
OLDEST_TORCH = ROOT / ".oldest-torch"
#: chat templates of published models, for tests that compare ours with transformers' rendering of them
TEMPLATES = ROOT / ".chat-templates"
#: DeepEP's own Python, which tests run over a stand-in of its compiled part
DEEPEP = ROOT / ".deepep"
#: procedural tasks for tests of environments; pip compiles one of its packages, which not every machine can
REASONING_GYM = ROOT / ".reasoning-gym"
#: a package that carries a small language model, which tools/smollm2.py converts for recipes/smollm2.yaml
SMOLLM2 = ROOT / ".smollm2"
#: a scorer of models that nobody here wrote, for a test that compares its figures with ours
LM_EVAL = ROOT / ".lm-eval"
#: an agent that nobody here wrote, with an interpreter of its own, for a test of the gateway
MINI_SWE = ROOT / ".mini-swe"
#: the library verifiers, with an interpreter of its own, for tests of environments
VERIFIERS = ROOT / ".verifiers"
#: libraries of metric sinks, with an interpreter of their own
SINKS = ROOT / ".sinks"
#: Perfetto as its web page has it, which reads traces in tests
PERFETTO = ROOT / ".perfetto"
#: a workflow manager, with an interpreter of its own, for a test of its example
SNAKEMAKE = ROOT / ".snakemake-env"
#: Prometheus and promtool of the Debian package, unpacked: installing it would start a server
PROMETHEUS = ROOT / ".prometheus"
MINIMUM = (3, 11)
#: programs that tests use: a real Slurm, etcd, sandboxes, a check of scripts; and the Debian packages that have them
SLURM_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "bindfs": "bindfs",
    "etcd": "etcd-server",
    "fusermount3": "fuse3",
    "shellcheck": "shellcheck",
    "bwrap": "bubblewrap",
}
#: a browser, in which tests open the pages of runs, and the Debian package that has it
CHROMIUM_PACKAGES = {"chromium": "chromium"}
#: libraries that Mooncake Store loads, and the Debian packages that have them
STORE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
#: an interpreter of the user's own for vLLM engines: no environment is made then
VLLM_VARIABLE = "HPCRL_VLLM_PYTHON"
#: what must load; pip installs a torch for CUDA too, without the libraries that it needs
VLLM_MODULES = ("torch", "vllm", "vllm_router", "mooncake", "hpcrl")
#: Python compiles a module when it is first imported, and keeps that where it may (PYTHONDONTWRITEBYTECODE). pip would
#: compile all one after the other, where a fifth is ever imported: that took more than half of the time
PIP_INSTALL = ("-m", "pip", "install", "--quiet", *(() if sys.dont_write_bytecode else ("--no-compile",)))
#: what the stamps depend on
INPUTS = ("pyproject.toml", "constraints.txt", "tools/bootstrap.py")
VLLM_INPUTS = ("pyproject.toml", "constraints-vllm.txt", "tools/bootstrap.py")
TRITON_INPUTS = ("constraints-triton.txt",)
OLDEST_TORCH_INPUTS = ("constraints-oldest-torch.txt",)
TEMPLATES_INPUTS = ("constraints-templates.txt", "constraints-templates-sdist.txt")
DEEPEP_INPUTS = ("constraints-deepep.txt",)
REASONING_GYM_INPUTS = ("constraints-reasoning-gym.txt",)
SMOLLM2_INPUTS = ("constraints-smollm2.txt",)
LM_EVAL_INPUTS = ("constraints-lm-eval.txt",)
MINI_SWE_INPUTS = ("constraints-mini-swe.txt",)
VERIFIERS_INPUTS = ("constraints-verifiers.txt",)
SINKS_INPUTS = ("constraints-sinks.txt",)
PERFETTO_INPUTS = ("constraints-perfetto.txt",)
SNAKEMAKE_INPUTS = ("constraints-snakemake.txt",)


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up .venv with the given extras of hpcrl.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml, for example: dev")
    parser.add_argument("--slurm", action="store_true", help="install Debian packages that tests use, too")
    parser.add_argument("--chromium", action="store_true", help="install a browser for tests of pages (370 MB)")
    parser.add_argument("--vllm", action="store_true", help="set up .venv-vllm, the environment of vLLM engines, too")
    parser.add_argument("--triton", action="store_true", help="install Triton into .triton for its tests, too")
    parser.add_argument("--oldest-torch", action="store_true", help="get the oldest torch that hpcrl works with (4 GB)")
    parser.add_argument("--templates", action="store_true", help="get chat templates of published models for tests")
    parser.add_argument("--deepep", action="store_true", help="get DeepEP's own Python for tests of its dispatcher")
    parser.add_argument("--reasoning-gym", action="store_true", help="get procedural tasks for tests of environments")
    parser.add_argument("--smollm2", action="store_true", help="get the package with the model of `make demo` (93 MB)")
    parser.add_argument("--lm-eval", action="store_true", help="get a scorer of models for a test of exports (175 MB)")
    parser.add_argument("--mini-swe", action="store_true", help="get an agent for a test of the gateway (500 MB)")
    parser.add_argument("--verifiers", action="store_true", help="get verifiers for tests of environments (600 MB)")
    parser.add_argument("--sinks", action="store_true", help="get libraries of metric sinks for tests (460 MB)")
    parser.add_argument("--perfetto", action="store_true", help="get Perfetto for tests of traces (65 MB)")
    parser.add_argument("--snakemake", action="store_true", help="get Snakemake for a test of its example (130 MB)")
    parser.add_argument("--prometheus", action="store_true", help="get Prometheus for tests of its rules (95 MB)")
    arguments = parser.parse_args()
    extras = arguments.extras
    if not any(vars(arguments).values()):
        parser.error("name extras, or what else to set up (--help)")
    if arguments.slurm:
        _install_slurm()
    if arguments.chromium:
        _install_chromium()
    if sys.version_info < MINIMUM:
        found = ".".join(map(str, sys.version_info[:3]))
        return _fail(f"hpcrl needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer, {sys.executable} is {found}")
    if extras and not _set_up(VENV, _digest(extras, INPUTS), lambda: _install(extras)):
        return _fail("pip could not install hpcrl; what it said stands above")
    if arguments.vllm and not _set_up_vllm():
        return _fail(
            "vLLM could not be installed; what pip said stands above. Tests with a real vLLM need it\n"
            f"    hint: name an interpreter that has vLLM and hpcrl in {VLLM_VARIABLE}"
        )
    _set_up_optional(arguments)
    needed = (
        (arguments.smollm2, lambda: _unpack(SMOLLM2, SMOLLM2_INPUTS), "the package with SmolLM2"),
        (arguments.oldest_torch, _set_up_oldest_torch, "the oldest torch"),
        (arguments.triton, _set_up_triton, "Triton"),
    )
    for asked, set_up, what in needed:
        if asked and not set_up():
            return _fail(f"{what} could not be installed; what pip said stands above")
    return 0


def _set_up_optional(arguments: argparse.Namespace) -> None:
    """Get what single tests use, and say which of them will not run where it cannot be had."""

    def own(venv: Path, inputs: tuple[str, ...]) -> bool:
        return _set_up(venv, _digest([], inputs), lambda: _install_pinned(venv, inputs))

    wanted: tuple[tuple[bool, Callable[[], bool], str], ...] = (
        (
            arguments.templates,
            lambda: _filled(TEMPLATES, _digest([], TEMPLATES_INPUTS), _get_templates),
            "published chat templates",
        ),
        (arguments.deepep, lambda: _unpack(DEEPEP, DEEPEP_INPUTS), "DeepEP's own Python"),
        (arguments.reasoning_gym, lambda: _unpack(REASONING_GYM, REASONING_GYM_INPUTS), "reasoning-gym"),
        (arguments.lm_eval, lambda: _unpack(LM_EVAL, LM_EVAL_INPUTS), "lm-evaluation-harness"),
        (arguments.mini_swe, lambda: own(MINI_SWE, MINI_SWE_INPUTS), "mini-swe-agent"),
        (arguments.verifiers, lambda: own(VERIFIERS, VERIFIERS_INPUTS), "verifiers"),
        (arguments.perfetto, lambda: _unpack(PERFETTO, PERFETTO_INPUTS), "Perfetto"),
        (arguments.sinks, lambda: own(SINKS, SINKS_INPUTS), "libraries of metric sinks"),
        (arguments.snakemake, lambda: own(SNAKEMAKE, SNAKEMAKE_INPUTS), "Snakemake"),
        (arguments.prometheus, lambda: _filled(PROMETHEUS, "prometheus", _get_prometheus), "Prometheus"),
    )
    for asked, set_up, what in wanted:
        if asked and not set_up():
            _fail(f"tests with {what} will be SKIPPED; what pip said stands above")


def _set_up_vllm() -> bool:
    """Make the environment of engines, unless the user has one."""
    if given := os.environ.get(VLLM_VARIABLE):
        print(f"vLLM engines use {given} ({VLLM_VARIABLE})", flush=True)
        return True
    return _set_up(VLLM_VENV, _digest([], VLLM_INPUTS), _install_vllm)


def _set_up_triton() -> bool:
    """Put Triton into a directory of its own."""
    return _unpack(TRITON, TRITON_INPUTS, hashed=False, title="Triton for its tests; a first time takes 1 GB of disk")


def _set_up_oldest_torch() -> bool:
    """Put the oldest torch into a directory of its own."""
    title = "the oldest torch; a first time takes a minute or two and 4 GB of disk"
    return _unpack(OLDEST_TORCH, OLDEST_TORCH_INPUTS, hashed=False, title=title)


def _unpack(directory: Path, inputs: tuple[str], *, hashed: bool = True, title: str = "") -> bool:
    """Unpack pinned packages, without what they depend on; they are in no environment of ours."""
    return _filled(
        directory, _digest([], inputs), lambda: _pip_target(directory, inputs[0], hashed=hashed, title=title)
    )


def _pip_target(directory: Path, requirements: str, *, hashed: bool = True, title: str = "") -> bool:
    shutil.rmtree(directory, ignore_errors=True)  # pip leaves what is there as it is
    if title:
        print(f"installing {title}", flush=True)
    pinned = ["--no-deps", *(["--require-hashes"] if hashed else []), "-r", str(ROOT / requirements)]
    command = [_pip_python(), *PIP_INSTALL, "--target", str(directory), *pinned]
    return subprocess.run(command, check=False).returncode == 0


def _pip_python() -> str:
    own = VENV / "bin" / "python"
    return str(own) if own.is_file() else sys.executable


def _get_templates() -> bool:
    """Unpack TRL, and the templates alone that the sources of another package carry."""
    if not _pip_target(TEMPLATES, TEMPLATES_INPUTS[0]):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        # pip asks the package for its metadata, and compiles nothing
        what = ["--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes"]
        command = [_pip_python(), "-m", "pip", "download", "--quiet", "--dest", scratch, *what]
        command += ["-r", str(ROOT / TEMPLATES_INPUTS[1])]
        if subprocess.run(command, check=False).returncode:
            return False
        target = TEMPLATES / "llama.cpp"
        target.mkdir()
        for archive in Path(scratch).glob("*.tar.gz"):
            with tarfile.open(archive) as opened:
                for member in opened:
                    path = Path(member.name)
                    if member.isfile() and path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                        (target / path.name).write_bytes(opened.extractfile(member).read())
        return any(target.iterdir())


def _get_prometheus() -> bool:
    """Unpack Debian's package of Prometheus; nothing is installed."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        print("Prometheus comes from a Debian package; there is no apt-get here", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as scratch:
        if os.geteuid() == 0:
            subprocess.run([apt, "update", "-q"], check=False)
        if subprocess.run([apt, "download", "-q", "prometheus"], cwd=scratch, check=False).returncode:
            return False
        packages = [str(path) for path in Path(scratch).glob("prometheus_*.deb")]
        PROMETHEUS.mkdir(exist_ok=True)
        return bool(packages) and not subprocess.run([dpkg, "-x", packages[0], str(PROMETHEUS)], check=False).returncode


def _set_up(venv: Path, wanted: str, install: Callable[[], bool]) -> bool:
    """Make and fill an environment, unless that was done from the same inputs."""
    return _filled(venv, wanted, lambda: ((venv / "bin" / "python").is_file() or _make_venv(venv)) and install())


def _filled(directory: Path, wanted: str, fill: Callable[[], bool]) -> bool:
    """Fill a directory, unless its stamp says that this was done from the same inputs."""
    stamp = directory / "hpcrl-bootstrap"
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    started = time.monotonic()
    if not fill():
        return False
    stamp.write_text(wanted)
    print(f"{directory.name} is ready ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def _digest(extras: list[str], inputs: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((sorted(extras), sys.version_info[:2])).encode())
    for name in inputs:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _make_venv(venv: Path) -> bool:
    """Create an environment; Debian and Ubuntu ship the module for it in a package of its own."""
    if importlib.util.find_spec("ensurepip") is None and not _apt_install("python3-venv"):
        _fail("the Python module 'ensurepip' is missing\n    hint: sudo apt-get install python3-venv")
        return False
    print(f"making {venv.name} with {sys.executable}", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False).returncode:
        shutil.rmtree(venv, ignore_errors=True)
        _fail("the virtual environment could not be made; what Python said stands above")
        return False
    return True


def _install_slurm() -> None:
    """Install Debian packages of tests that are missing, where we may; else say what will not run. Never fails."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons are not on a user's path
    missing = dict.fromkeys(p for program, p in SLURM_PACKAGES.items() if shutil.which(program, path=path) is None)
    missing |= dict.fromkeys(package for library, package in STORE_LIBRARIES.items() if not _loads(library))
    if missing and not _apt_install(*missing):
        _fail(
            "tests with a real Slurm or KV store will be SKIPPED: packages are missing, and could not be installed\n"
            f"    hint: sudo apt-get install {' '.join(missing)}"
        )


def _install_chromium() -> None:
    """Install a browser where it is missing and we may; else say what will not run. Never fails."""
    missing = [package for program, package in CHROMIUM_PACKAGES.items() if shutil.which(program) is None]
    if missing and not _apt_install(*missing):
        _fail(
            "tests of pages in a browser will be SKIPPED: it is missing, and could not be installed\n"
            f"    hint: sudo apt-get install {' '.join(missing)}"
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _apt_install(*packages: str) -> bool:
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return False
    print(f"installing {' '.join(packages)} with apt-get", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = "DPkg::Lock::Timeout=120"
    install = [apt, "-o", wait, "install", "-y", "-q", "--no-install-recommends", *packages]
    for command in ([apt, "update", "-q"], install):
        if subprocess.run(command, env=env, check=False).returncode:
            return False
    return True


def _install(extras: list[str]) -> bool:
    pip = [str(VENV / "bin" / "python"), *PIP_INSTALL, "-c", str(ROOT / "constraints.txt")]
    print(f"installing hpcrl[{','.join(extras)}]; a first time takes a minute or two", flush=True)
    return subprocess.run([*pip, "-e", f"{ROOT}[{','.join(extras)}]"], check=False).returncode == 0


def _install_pinned(venv: Path, inputs: tuple[str, ...]) -> bool:
    """Install the packages of one file into an environment of their own."""
    pinned = ["--no-deps", "--require-hashes", "-r", str(ROOT / inputs[0])]
    python = str(venv / "bin" / "python")
    return subprocess.run([python, *PIP_INSTALL, *pinned], check=False).returncode == 0


def _install_vllm() -> bool:
    python = str(VLLM_VENV / "bin" / "python")
    pip = [python, *PIP_INSTALL, "--no-deps"]
    print("installing vLLM for CPUs; a first time takes a few minutes and 2.5 GB of disk", flush=True)
    for what in (["-r", str(ROOT / "constraints-vllm.txt")], ["-e", str(ROOT)]):
        if subprocess.run([*pip, *what], check=False).returncode:
            return False
    if subprocess.run([python, "-c", f"import {', '.join(VLLM_MODULES)}"], check=False).returncode:
        _fail(
            "vLLM is installed and does not load; what Python said stands above\n"
            "    hint: without GPU, point pip at a CPU build of torch (PIP_FIND_LINKS or your mirror), and\n"
            f"    remove {VLLM_VENV}"
        )
        return False
    return True


def _fail(message: str) -> int:
    print(f"bootstrap: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

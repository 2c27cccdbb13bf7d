"""Set up the virtual environment of a checkout: ``python3 tools/bootstrap.py EXTRA...``.

Needs nothing but Python itself. Runs pip only when something that it installs from has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MINIMUM = (3, 11)
#: programs that tests with a real Slurm use, and the Debian packages that have them
SLURM_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "bindfs": "bindfs",
    "fusermount3": "fuse3",
}
#: what the stamp depends on
INPUTS = ("pyproject.toml", "constraints.txt", "tools/bootstrap.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up .venv with the given extras of hpcrl.")
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml, for example: dev")
    parser.add_argument("--slurm", action="store_true", help="install the packages of tests with a real Slurm, too")
    arguments = parser.parse_args()
    if arguments.slurm:
        _install_slurm()
    extras = arguments.extras
    if sys.version_info < MINIMUM:
        found = ".".join(map(str, sys.version_info[:3]))
        return _fail(f"hpcrl needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer, {sys.executable} is {found}")
    stamp, wanted = VENV / "hpcrl-bootstrap", _digest(extras)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    started = time.monotonic()
    if not (VENV / "bin" / "python").is_file() and not _make_venv():
        return 1
    if not _install(extras):
        return _fail("pip could not install hpcrl; what it said stands above")
    stamp.write_text(wanted)
    print(f"environment .venv is ready ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


def _digest(extras: list[str]) -> str:
    digest = hashlib.sha256(repr((sorted(extras), sys.version_info[:2])).encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _make_venv() -> bool:
    """Create .venv; Debian and Ubuntu ship the module for it in a package of its own."""
    if importlib.util.find_spec("ensurepip") is None and not _apt_install("python3-venv"):
        _fail("the Python module 'ensurepip' is missing\n    way out: sudo apt-get install python3-venv")
        return False
    print(f"making {VENV.name} with {sys.executable}", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        _fail("the virtual environment could not be made; what Python said stands above")
        return False
    return True


def _install_slurm() -> None:
    """Install what is missing of Slurm where we may; else say what will not be tested. Never fails."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons are not on a user's path
    missing = dict.fromkeys(p for program, p in SLURM_PACKAGES.items() if shutil.which(program, path=path) is None)
    if missing and not _apt_install(*missing):
        _fail(
            "tests with a real Slurm will be SKIPPED: packages are missing, and could not be installed\n"
            f"    way out: sudo apt-get install {' '.join(missing)}"
        )


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
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    print(f"installing hpcrl[{','.join(extras)}]; a first time takes a minute or two", flush=True)
    return subprocess.run([*pip, "-e", f"{ROOT}[{','.join(extras)}]"], check=False).returncode == 0


def _fail(message: str) -> int:
    print(f"bootstrap: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

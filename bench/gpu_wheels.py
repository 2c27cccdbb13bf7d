"""Collect the wheels that `gpu_session.py` needs on a machine with torch and without a network.

    python bench/gpu_wheels.py                     into .gpu-wheels, for Python 3.12 on x86-64
    python bench/gpu_wheels.py --python 3.13 DIR   for another Python, into another folder

The machine must have what hpcrl's trainer and its tests need beside these: torch 2.11 or later with triton,
transformers, numpy, safetensors, tokenizers, aiohttp, jinja2, typer, rich, psutil, pyyaml, pytest with xdist and
timeout. Versions are those of ``constraints.txt`` where it names them, else those that are installed here. The end
prints how they are installed there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: what an image with torch has not; a library to measure against has its version here
PACKAGES = {
    "pydantic": None,
    "pydantic-core": None,
    "typing-inspection": None,
    "annotated-types": None,
    "msgspec": None,
    "submitit": None,
    "py-spy": None,
    "xxhash": None,
    "cloudpickle": None,
    "typing-extensions": None,
    "pytest-asyncio": None,
    "liger-kernel": "0.8.5",
    "cut-cross-entropy": "25.1.1",
}
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
MIB = 1 << 20


def version_of(package: str, constraints: str) -> str:
    """The version of a package: that of `PACKAGES`, of ``constraints``, or the one that is installed here.

    PackageNotFoundError where there is none.
    """
    if own := PACKAGES[package]:
        return own
    found = re.search(rf"(?mi)^{re.escape(package).replace('-', '[-_.]')}==([^\s;]+)", constraints)
    return importlib.metadata.version(package) if found is None else found[1]


def download_command(package: str, version: str, python: str, target: Path) -> list[str]:
    """How pip fetches one wheel and nothing that it needs."""
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(target), "--python-version", python),
        *("--implementation", "cp"),
        *(part for abi in abis for part in ("--abi", abi)),
        *(part for platform in PLATFORMS for part in ("--platform", platform)),
        f"{package}=={version}",
    ]


def tree_bytes() -> int:
    """Of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_size(target: Path, limit_mib: float, tree: int) -> int:
    """Bytes of what is carried; SystemExit where wheels and tree are too large together."""
    sizes = {path.name: path.stat().st_size for path in sorted(target.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / MIB:8.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / MIB:8.2f} MiB  of wheels, {tree / MIB:.2f} MiB of the repository")
    if total + tree > limit_mib * MIB:
        raise SystemExit(f"together more than {limit_mib:g} MiB: leave out libraries to measure against (PACKAGES)")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=ROOT / ".gpu-wheels", metavar="DIR")
    parser.add_argument("--python", default="3.12", help="of the machine; default 3.12")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="of wheels and repository together; default 64")
    arguments = parser.parse_args()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    arguments.target.mkdir(parents=True, exist_ok=True)
    for old in arguments.target.glob("*.whl"):
        # two versions of one package stop the installation
        old.unlink()
    for package in PACKAGES:
        version = version_of(package, constraints)
        done = subprocess.run(
            download_command(package, version, arguments.python, arguments.target),
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"pip has no wheel of {package} {version} for Python {arguments.python}:\n{done.stderr}")
    check_size(arguments.target, arguments.limit_mib, tree_bytes())
    install = "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target"
    print(f"\non the machine:\n    {install} /tmp/hpcrl-site {arguments.target.name}/*.whl")
    print("    export PYTHONPATH=/tmp/hpcrl-site:$PWD")


if __name__ == "__main__":
    main()

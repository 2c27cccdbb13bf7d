"""Hints for installing a missing part of hpcrl. hpcrl is on no package index, so they name its source."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

_TRAINING = ("torch", "numpy", "safetensors", "tokenizers")
ROLE_IMPORTS = {
    "trainer": _TRAINING,
    "engine": _TRAINING,
    "orchestrator": ("numpy", "tokenizers"),
    "env": ("numpy", "tokenizers"),
    "vllm": ("vllm", "torch"),
}
"""Modules that a role imports in addition to hpcrl's core; ``vllm`` is an engine of that backend."""
_EXTRAS = {
    "torch": "trainer",
    "safetensors": "trainer",
    "numpy": "rollouts",
    "tokenizers": "rollouts",
    "matplotlib": "report",
    "pyarrow": "export",
    "datasets": "datasets",
    "huggingface_hub": "hub",
    "math_verify": "rewards",
    "jsonschema": "rewards",
    "reasoning_gym": "reasoning-gym",
    "mooncake": "store",
    "vllm": "vllm",
    "vllm_router": "vllm",
    "dynamo": "dynamo",
    "zmq": "dynamo",
    "mcp": "mcp",
    "mcp_types": "mcp",
}
"""By top-level package: the extra of ``pyproject.toml`` that brings it."""

_SOMEWHERE = "/path/to/hpcrl"
"""Placeholder for the checkout, or the wheel, if its location is unknown."""


def install_command(*extras: str, python: str | None = None) -> str:
    """Return the command that installs extras of hpcrl for an interpreter, by default for this one.

    Parameters
    ----------
    extras:
        Names of optional parts, as in ``pyproject.toml``.
    python:
        The interpreter to install for.
    """
    wanted = f"{source_of_hpcrl()}[{','.join(extras)}]"
    return f"{shlex.quote(python or sys.executable)} -m pip install '{wanted}'"


def extra_of(error: ImportError) -> str | None:
    """Return the extra that brings what could not be imported; None where none does."""
    return _EXTRAS.get((error.name or "").partition(".")[0])


def source_of_hpcrl() -> str:
    """Return the checkout or the wheel that hpcrl was installed from; a placeholder if it no longer exists."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    # environments of `hpcrl site install` keep the wheel
    if kept := sorted(Path(sys.prefix, "share", "hpcrl").glob("hpcrl-*.whl")):
        return str(kept[-1])
    # these take as long as all else that a command imports
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415
    from urllib.parse import unquote, urlparse  # noqa: PLC0415

    try:
        recorded = json.loads(distribution("hpcrl").read_text("direct_url.json") or "{}")
        source = Path(unquote(urlparse(str(recorded["url"])).path))
    except (PackageNotFoundError, ValueError, KeyError, TypeError):
        return _SOMEWHERE
    return str(source) if source.is_absolute() and source.exists() else _SOMEWHERE

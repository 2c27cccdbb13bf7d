"""Sandboxes: processes that hold programs written by a model, behind one interface."""

from hpcrl.sandboxes.interface import (
    ExecResult,
    Patch,
    PatchEntry,
    Sandbox,
    SandboxError,
    SandboxEvictedError,
    SandboxFile,
    SandboxHost,
    SandboxLimitError,
    SandboxLimits,
    SandboxLostError,
    SandboxStartError,
)

__all__ = [
    "ExecResult",
    "Patch",
    "PatchEntry",
    "Sandbox",
    "SandboxError",
    "SandboxEvictedError",
    "SandboxFile",
    "SandboxHost",
    "SandboxLimitError",
    "SandboxLimits",
    "SandboxLostError",
    "SandboxStartError",
]

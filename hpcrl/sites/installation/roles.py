"""The environments that a site has, what each of them must import, and where a cluster profile names it."""

from __future__ import annotations

from enum import StrEnum

from hpcrl.installing import ROLE_IMPORTS


class SiteRole(StrEnum):
    """Environment of a site, by the roles that use it."""

    LOGIN = "login"
    """The command line, for login nodes."""
    ENV = "env"
    """Rollouts and environments of recipes: the orchestrator."""
    TRAINER = "trainer"
    """Trainer, embedded engines and orchestrator."""
    VLLM = "vllm"
    """vLLM engines, routers and the KV store."""


class Accelerator(StrEnum):
    """Accelerator that torch is built for."""

    CUDA = "cuda"
    CPU = "cpu"


_COMMAND_LINE = ("hpcrl.cli.main", "hpcrl.config.load", "hpcrl.submit.submission")
_IMPORTS = {
    SiteRole.LOGIN: _COMMAND_LINE,
    SiteRole.ENV: (*_COMMAND_LINE, *ROLE_IMPORTS["orchestrator"]),
    SiteRole.TRAINER: (*_COMMAND_LINE, *ROLE_IMPORTS["trainer"]),
    SiteRole.VLLM: (*_COMMAND_LINE, *ROLE_IMPORTS["vllm"], "vllm_router", "mooncake"),
}
_WITH_TORCH = (SiteRole.TRAINER, SiteRole.VLLM)


def imports_of(role: SiteRole) -> tuple[str, ...]:
    """Return the modules that an environment must be able to import."""
    return _IMPORTS[role]


def lock_name(role: SiteRole, accelerator: Accelerator) -> str:
    """Return the name of the lock file of an environment; the accelerator matters where torch is in it."""
    return f"{role}-{accelerator}" if role in _WITH_TORCH else str(role)


def profile_line(role: SiteRole, python: str) -> str:
    """Return the line of a cluster profile, in YAML, that names an interpreter for a role.

    For the login environment, which no profile names, it is a comment.
    """
    import json  # noqa: PLC0415 - the command line loads this module

    word = json.dumps(python)  # JSON is valid YAML
    if role is SiteRole.LOGIN:
        return f"# no key of a profile: people on login nodes call {python.removesuffix('/python')}/hpcrl"
    if role is SiteRole.VLLM:
        return f"vllm_python: {word}"
    if role is SiteRole.ENV:
        return f"python_by_role: {{orchestrator: {word}}}"
    # not `engine`, which would take precedence over vllm_python
    return f"python_by_role: {{trainer: {word}, orchestrator: {word}}}  # with backend: embedded also engine"

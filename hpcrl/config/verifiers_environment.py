"""Settings of environments of the library verifiers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import PositiveFloat, PositiveInt
from hpcrl.config.hosted_environment import HostedEnv


class VerifiersEnv(HostedEnv):
    """An environment of the library ``verifiers``, which runs in an interpreter of its own.

    Its rollouts speak with the policy through the token gateway. Rewards and metrics are those of verifiers.
    """

    kind: Literal["verifiers"]
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w./@-]*$")] | None = None
    """Name of an installed package with a taskset, such as ``kuhn-poker``. Give this or ``path``."""
    path: str | None = None
    """Directory of such a package, or file with one; relative to the current directory."""
    python: str | None = None
    """Interpreter that has ``verifiers`` and the package, relative to the current directory; by default that of the
    orchestrator."""
    args: dict[str, Any] = {}
    """Fields of the taskset's configuration; arguments of ``load_environment`` where the package has that."""
    held_out_args: dict[str, Any] | None = None
    """Fields of the configuration of a taskset with the held-out tasks. Training tasks that ask the same are left
    out."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the tasks that are held out, chosen by a hash of what they ask. Not used with ``held_out_args``."""
    max_tasks: PositiveInt | None = None
    """Read only the first tasks of the taskset. Tasksets without an end are read as far as rollouts need them."""
    settings: dict[str, Any] = {}
    """Fields of the environment's configuration in addition to ``taskset``: its agents by name, with ``harness``,
    ``runtime``, ``max_turns`` and so on. Without them agents run on this machine (``runtime: {type: subprocess}``), by
    the harness ``null`` where the taskset names none."""
    agent: str | None = None
    """Agent whose reward counts, in environments with several; the others have a ``client`` in ``settings``. ``"*"``:
    all agents are the policy, and the reward is the mean of theirs."""
    host_commands: bool = False
    """Permit harnesses that run commands of the model on this machine without a sandbox."""
    truncated_reward: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    """Reward of a rollout whose conversation has become longer than the context. None: the one of verifiers, where its
    harness ends such a conversation; where the harness fails, the rollout fails."""
    inherit: Annotated[tuple[str, ...], Field(strict=False)] = (
        "PATH",
        "LANG",
        "LC_ALL",
        "TZ",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
    )
    """Variables of the orchestrator that the process of verifiers gets; it gets no others."""
    environ: dict[str, str] = {}
    """Further variables of that process."""
    time_limit_s: PositiveFloat = 3600.0
    """Maximum wall-clock time of a rollout in seconds, judging included; it fails then."""
    turn_timeout_s: PositiveFloat = 7200.0
    """More than ``time_limit_s``."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.verifiers:make", {"config": self.model_dump(mode="json")}

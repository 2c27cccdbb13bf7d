"""Sources of tasks. No torch in here: the trainer's warm-up and the orchestrator both use them."""

from hpcrl.rollouts.environments.base import Environment, Message, Outcome, Policy, Prompt, Reply, Split, prompt_of
from hpcrl.rollouts.environments.hosted import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.registry import build_environments, hosted

__all__ = [
    "Environment",
    "EnvironmentLostError",
    "EnvironmentRaisedError",
    "Message",
    "Outcome",
    "Policy",
    "Prompt",
    "Reply",
    "Split",
    "build_environments",
    "hosted",
    "prompt_of",
]

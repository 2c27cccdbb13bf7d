"""Sources of tasks. No torch in here: the trainer's warm-up and the orchestrator both use them."""

from hpcrl.rollouts.environments.base import Environment, Message, Outcome, Policy, Prompt, Reply, Split
from hpcrl.rollouts.environments.registry import build_environments

__all__ = ["Environment", "Message", "Outcome", "Policy", "Prompt", "Reply", "Split", "build_environments"]

"""Sources of tasks. No torch in here: the trainer's warm-up and the orchestrator both use them."""

from hpcrl.rollouts.environments.base import (
    Environment,
    Message,
    Outcome,
    Policy,
    PolicyEndpoint,
    Prompt,
    Reply,
    Split,
    Tool,
    ToolCall,
    malformed_answer,
    prompt_of,
    tool_message,
)
from hpcrl.rollouts.environments.process_calls import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.registry import build_environments, hosted

__all__ = [
    "Environment",
    "EnvironmentLostError",
    "EnvironmentRaisedError",
    "Message",
    "Outcome",
    "Policy",
    "PolicyEndpoint",
    "Prompt",
    "Reply",
    "Split",
    "Tool",
    "ToolCall",
    "build_environments",
    "hosted",
    "malformed_answer",
    "prompt_of",
    "tool_message",
]

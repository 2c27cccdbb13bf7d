"""A token gateway: foreign programs that speak OpenAI's API sample by it, and it records them token by token."""

from hpcrl.rollouts.gateway.server import Gateway

__all__ = ["Gateway"]

"""From messages to token ids and back, as a model's chat format has it."""

from hpcrl.rollouts.rendering.parsing import Parsed, TurnParser
from hpcrl.rollouts.rendering.renderer import Renderer

__all__ = ["Parsed", "Renderer", "TurnParser"]

"""A loss: PPO's clipped objective that also bounds what a token with a negative advantage may cost."""

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from hpcrl.trainer.token_loss import LossTerms, TokenLoss, TrainedTokens, bounded_ratio


class DualClipParameters(BaseModel):
    """Parameters in the recipe, under ``algorithm.loss.parameters``."""

    model_config = ConfigDict(extra="forbid")

    clip: float = Field(default=0.2, gt=0, lt=1)
    largest_cost: float = Field(default=3.0, gt=1)


class DualClip(TokenLoss):
    """Dual-clip PPO (Ye et al., arXiv 1912.09729, equation 5)."""

    Parameters = DualClipParameters
    metrics = ("ratio_above_one", "dual_clipped")

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        """Return the loss of each token."""
        low, high = 1 - self.parameters.clip, 1 + self.parameters.clip
        value, advantages = log_ratio.detach().exp(), tokens.advantages
        clipped = ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))
        dual = (advantages < 0) & (value > self.parameters.largest_cost)
        masked = clipped | dual
        bound = torch.where(dual, self.parameters.largest_cost, value.clamp(low, high))
        loss = -torch.where(masked, bound, bounded_ratio(log_ratio, masked)) * advantages
        return LossTerms(loss, masked, {"ratio_above_one": (value > 1).float(), "dual_clipped": dual.float()})

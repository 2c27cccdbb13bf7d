"""An advantage: ranks of rewards in place of rewards, less a price for length."""

import numpy as np
from numpy.typing import NDArray


def ranks(
    rewards: NDArray[np.float64], lengths: NDArray[np.int64], *, length_price: float = 0.0
) -> NDArray[np.float64]:
    """Return ranks from -1 to 1, equal for equal rewards; 0 for all where rewards and lengths are equal."""
    scores = rewards - length_price * lengths / lengths.max()
    below = (scores[:, None] > scores).sum(1)
    above = (scores[:, None] < scores).sum(1)
    return (below - above) / (len(scores) - 1)

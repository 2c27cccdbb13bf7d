"""Named checkers of replies: each gives a score, and a reward is their weighted sum."""

"""Analysis of the scores of rollouts: estimates with intervals, recomputed rewards, audits. No torch, no files."""

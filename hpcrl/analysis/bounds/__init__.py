"""Bounds of a step of a run: where its time goes, what the plan predicted, and which settings would change it."""

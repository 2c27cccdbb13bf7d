"""Evaluation without training: engines, and no trainer."""

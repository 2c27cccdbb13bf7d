"""Computes rewards again over the stored rollouts of a run."""

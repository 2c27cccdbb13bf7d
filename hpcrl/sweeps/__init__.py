"""Sweeps: several runs of one recipe with different values, queued, watched and compared together."""

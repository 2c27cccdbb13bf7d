"""Comparison of runs: settings, code, held-out rewards at equal cost, drops and faults."""

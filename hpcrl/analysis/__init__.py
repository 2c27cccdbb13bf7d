"""Analyses of runs from their files: series, pages, comparisons, what bounds a step, traces. No torch."""

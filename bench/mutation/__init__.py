"""Mutants: small wrong changes of the product, and whether its tests see them (`bench/mutants.py`)."""

"""Recipes of other systems, read into recipes of hpcrl: what carries over, what does not, and why."""

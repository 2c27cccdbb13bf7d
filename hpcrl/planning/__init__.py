"""Foresight: memory, times, and searches of layouts for a plan. Pure functions, but for reading measured runs."""

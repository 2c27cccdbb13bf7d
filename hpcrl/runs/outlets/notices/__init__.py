"""Notifications about a run: facts in its files, each sent once."""

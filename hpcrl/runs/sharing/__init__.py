"""Runs for others: a bundle of files to hand on, and access for a group."""

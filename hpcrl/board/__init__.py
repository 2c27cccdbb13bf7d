"""Runs in a browser, live and read-only (``hpcrl board``)."""

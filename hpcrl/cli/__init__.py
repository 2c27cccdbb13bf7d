"""The ``hpcrl`` command: parses, calls, prints. No logic, and no heavy import before a command runs."""

"""A run on disk: its directory, record, events, metrics, logs, and what they say about it."""

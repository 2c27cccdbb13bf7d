"""State of a run on disk: its directory, record, events, metrics, logs, and views of them."""

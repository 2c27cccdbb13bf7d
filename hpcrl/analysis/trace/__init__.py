"""Traces of runs in the trace event format of Chrome, which Perfetto reads."""

"""Programs of other packages that hear of a run: sinks of its metrics and notifiers of its end."""

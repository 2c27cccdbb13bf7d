"""What ``bench/handoff_publish.py`` publishes."""

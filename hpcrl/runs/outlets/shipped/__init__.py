"""Sinks that hpcrl brings, each for one library, which is imported when the sink is made."""

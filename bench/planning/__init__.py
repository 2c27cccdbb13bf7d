"""Parts of `bench/planner.py`: how far predictions of the planner and the simulator are off. ``cases`` has the data."""

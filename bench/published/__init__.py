"""Published figures as cases, by subject; `bench/planner_published.py` computes and prints them."""

"""Published figures as cases, by subject; `bench/planner.py published` computes and prints them."""

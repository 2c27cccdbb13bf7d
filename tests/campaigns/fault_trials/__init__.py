"""What `random_faults.py` does to runs, what must follow by the policy of each fault, and how that is judged."""

"""Ways of rollouts from producers to consumers, for ``bench/dock_peers.py``."""

"""Mooncake Store, the pool of KV blocks that engines share: its master, its health, what engines must know."""

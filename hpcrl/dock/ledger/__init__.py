"""The ledger of rollouts: what finished, and what became of it, on the shared filesystem.

`hpcrl.dock.ledger.entries` is the format, `hpcrl.dock.ledger.log` its one writer, `hpcrl.dock.ledger.replay` what its
entries come to, `hpcrl.dock.ledger.payload` where the arrays of rollouts lie.
"""

"""Warehouses: where the columns of finished rollouts lie in memory, on their way to the ranks that train on them.

A rollout's block of columns (`hpcrl.dock.columns`) is durable in ``rollouts/payload/`` before the rollout counts. A
warehouse holds a copy that is fetched faster, under the same `hpcrl.dock.ledger.entries.PayloadPlace`: who does not
find it there, or finds it damaged, reads the file.
"""

"""The dock: finished rollouts on their way from orchestrator to trainer. No torch in here.

`hpcrl.dock.wire` is the format, `hpcrl.dock.client` the trainer's side; the orchestrator serves it
(`hpcrl.rollouts.batches.http`).
"""

"""Joint checkpoints of trainer and orchestrator. No torch in here."""

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger

__all__ = ["CheckpointEntry", "CheckpointLedger"]

"""Joint checkpoints of trainer and orchestrator. No torch in here."""

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger, CheckpointManifest, expected_save_s
from hpcrl.checkpoints.writer import CheckpointWriter

__all__ = ["CheckpointEntry", "CheckpointLedger", "CheckpointManifest", "CheckpointWriter", "expected_save_s"]

"""Weight hand-offs: published policy versions on a shared filesystem. No torch in here."""

from hpcrl.weights.shard import TensorRecord, write_shard
from hpcrl.weights.store import Handoff, HandoffStore, Manifest

__all__ = ["Handoff", "HandoffStore", "Manifest", "TensorRecord", "write_shard"]

"""Weight hand-offs: published policy versions on a shared filesystem. No torch in here."""

from hpcrl.weights.handoff_writer import HandoffWriter
from hpcrl.weights.manifest import Handoff, Manifest, TensorRecord
from hpcrl.weights.shard import write_shard
from hpcrl.weights.store import HandoffStore

__all__ = ["Handoff", "HandoffStore", "HandoffWriter", "Manifest", "TensorRecord", "write_shard"]

"""Weight hand-offs: published policy versions on a shared filesystem. No torch in here."""

from hpcrl.weights.format.manifest import Handoff, Manifest, TensorRecord
from hpcrl.weights.format.shard import write_shard
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.handoff_writer import VersionCommitter

__all__ = ["Handoff", "HandoffStore", "Manifest", "TensorRecord", "VersionCommitter", "write_shard"]

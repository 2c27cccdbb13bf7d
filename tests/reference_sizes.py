"""Sizes of the small reference run, for its test and its campaign."""

from __future__ import annotations

#: a shape that a machine of two processors runs in minutes: one trainer node for three, and three engines. The meshes
#: are those of the reference run, on as few ranks as have them
FEW = (
    "trainer.nodes=4",
    "trainer.ranks=8",
    "engine.prefill.replicas=1",
    "engine.decode.replicas=2",
    "rollouts.rollouts_per_step=32",
)
#: the pool that the reference run has on a site with room for it; with as little memory as Mooncake takes
POOL = "engine.kv_store={segment_gib: 0.03125, local_buffer_gib: 0.015625}"
#: a run that does not learn measures the same held-out prompts every time, within 0.01
LEARNED = 0.1
#: starts and saves of so many processes on one machine take longer than on nodes of a cluster
LIMITS = {"start_timeout_s": 900, "save_timeout_s": 60, "time_limit_h": 24}

"""Marks of a run in the environment of its processes, which identify them whichever process forked them."""

from __future__ import annotations

RUN_ID_VARIABLE = "HPCRL_RUN_ID"
"""Marks every process of a run; its value is `hpcrl.runs.record.RunRecord.run_id`."""
KIND_VARIABLE = "HPCRL_PROCESS"
"""``launch`` (submitit and the supervisor), ``guard`` or ``role``."""
RUN_DIR_VARIABLE = "HPCRL_RUN_DIR"
"""The run directory that a guard or a role works for."""
LAUNCH_DIR_VARIABLE = "HPCRL_LAUNCH_DIR"
"""The same of submitit and the supervisor on this machine, which are not roles."""
SANDBOX_MEMORY_VARIABLE = "HPCRL_SANDBOX_MEMORY"
"""Limit of the memory of all sandboxes of a node, ``BYTES:NAME``; daemons of sandboxes with the same name share it."""
START_WEIGHTS_VARIABLE = "HPCRL_START_WEIGHTS"
"""Set to 1 for engines of a run that only evaluates: they keep the weights that they have started with, and a label of
these may be given without others."""

"""A drafted profile of the Slurm that this machine belongs to."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys

from hpcrl.sites.draft_node import SeenNode
from hpcrl.sites.node_topology import read_topology
from hpcrl.sites.profile_draft import draft_profile
from hpcrl.sites.site_facts import SlurmFacts, partitions_of_machine, read_site_facts


def draft_of_machine(
    slurm: SlurmFacts,
    name: str,
    *,
    runs_root: str | None = None,
    fabric: str | None = None,
    python: str | None = None,
    vllm_python: str | None = None,
) -> str:
    """Return the text of a profile from what Slurm says, with this machine's adapters where it is a node of it.

    Parameters
    ----------
    slurm:
        Whom to ask.
    name:
        Name of the profile.
    runs_root, fabric, vllm_python:
        See `hpcrl.sites.profile_draft.draft_profile`.
    python:
        Interpreter of roles on nodes; the one of this process where it has torch.
    """
    if python is None and importlib.util.find_spec("torch") is not None:
        python = sys.executable
    host = socket.gethostname()
    here = partitions_of_machine(slurm, [os.environ.get("SLURMD_NODENAME", ""), host, host.partition(".")[0]])
    topology = read_topology()
    return draft_profile(
        read_site_facts(slurm),
        name,
        runs_root=runs_root,
        fabric=fabric,
        python=python,
        vllm_python=vllm_python,
        seen={partition: SeenNode(node, topology) for partition, node in here.items()},
    )

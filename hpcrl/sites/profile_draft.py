"""First draft of a cluster profile from the running Slurm, with comments on missing facts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hpcrl.sites.draft_node import SeenNode, adapter_lines, fabric_kind
from hpcrl.sites.gpu_models import gpu_model
from hpcrl.sites.site_facts import PartitionFacts, SiteFacts
from hpcrl.sites.yaml_text import yaml_text

_UNKNOWN = "CHANGE_ME"
"""Placeholder that the schema refuses: a draft becomes a profile only when a person has checked it."""


def draft_profile(
    facts: SiteFacts,
    name: str,
    *,
    runs_root: str | None = None,
    fabric: str | None = None,
    python: str | None = None,
    vllm_python: str | None = None,
    seen: Mapping[str, SeenNode] | None = None,
) -> str:
    """Return the text of ``clusters/<name>.yaml``.

    Parameters
    ----------
    facts:
        Facts from Slurm.
    name:
        Name of the profile.
    runs_root, fabric, python:
        Values that only a person knows; left open where not given.
    vllm_python:
        Interpreter of vLLM engines; without one, engines have that of the trainer.
    seen:
        A node of a partition, by the name of the partition, if one could be checked.
    """
    major, minor = facts.version
    time_limits = [p.max_time_h for p in facts.partitions if p.nodes and p.max_time_h is not None]
    lines = [
        f"# Drafted by `hpcrl cluster init` from Slurm {major}.{minor:02d}, cluster {facts.cluster!r}.",
        f"# Correct what is wrong, fill in what says {_UNKNOWN}, then: hpcrl cluster check {name}",
        f"name: {yaml_text(name)}",
        f"description: {json.dumps(f'{facts.cluster} (drafted, not yet checked by a person)')}",
        "kind: slurm",
        "",
        "paths:",
        "  # seen under this name by the login node and by all compute nodes, with room for checkpoints",
        f"  runs_root: {yaml_text(runs_root) if runs_root else _UNKNOWN}",
        "  # cache: /shared/cache       # downloads",
        "  # scratch: /scratch          # a disk of each node, for compile caches",
        "",
        "limits:",
        "  # starting a role: size of the weights over the bandwidth of the filesystem, and some",
        "  start_timeout_s: 1800",
        "  stop_timeout_s: 30",
        "  # the longest save of a checkpoint; the signal before the time limit comes this much earlier",
        "  save_timeout_s: 600",
        f"  time_limit_h: {min([24.0, *time_limits]):g}",
        "",
        "partitions:",
    ]
    for partition in facts.partitions:
        lines += _partition(partition, fabric, (seen or {}).get(partition.name))
    lines += [
        "placement:",
        f"  default: {_default(facts)}",
        "  # by_role: {trainer: ..., engine: ..., prefill: ..., decode: ...}",
        "",
        f"gres: {'gres' if facts.has_gpus else 'none'}",
        "",
        "capabilities:",
        f"  hetjob: {_yaml(facts.hetjob)}",
        f"  exclusive: {_yaml(not any(p.shares_always for p in facts.partitions))}",
        f"  requeue: {_yaml(facts.requeue)}",
        "  # not to be seen from here: `srun scontrol version` on a compute node tells",
        f"  scontrol_on_nodes: {_yaml(facts.requeue)}",
        f"  accounting: {_yaml(facts.accounting)}",
        f"  segment: {_yaml(facts.segment)}",
        "",
        *_pythons(python, vllm_python),
        "# launch:",
        "#   inherit: [HF_TOKEN]",
        "#   module_init: /etc/profile.d/lmod.sh",
        "#   modules: [cuda]",
        "",
    ]
    return "\n".join(lines)


def _partition(partition: PartitionFacts, fabric: str | None, seen: SeenNode | None) -> list[str]:
    if not partition.nodes:
        return [f"  # {partition.name}: no nodes"]
    shape, count = partition.nodes[0]
    lines = [f"  {yaml_text(partition.name)}:"]
    if len(partition.nodes) > 1:
        others = ", ".join(f"{n} with {s.gpus} GPUs and {s.cpus} CPUs" for s, n in partition.nodes[1:])
        lines += [f"    # nodes differ: these are the most frequent ones; {others} (a constraint can tell them apart)"]
    lines += [f"    nodes: {count}"]
    if partition.max_time_h is not None:
        lines += [f"    max_time_h: {partition.max_time_h:g}"]
    for name, allowed in (("account", partition.accounts), ("qos", partition.qos)):
        lines += [f"    # {name}: one of {', '.join(allowed)}" if allowed else f"    # {name}: ..."]
    lines += ["    node:", f"      gpus: {shape.gpus}"]
    if shape.gpu_type is not None:
        lines += [f"      gpu_type: {yaml_text(shape.gpu_type)}"]
    lines += [
        f"      cpus: {shape.cpus}",
        # rounded down: a job must not request more than there is
        f"      memory_gib: {int(shape.memory_mib / 1024 * 10) / 10:g}",
        "      # infiniband, roce (with gid_index) or ethernet",
        f"      fabric: {{kind: {fabric or (fabric_kind(seen.topology) if seen else None) or _UNKNOWN}}}",
        "      # interface: bond0",
    ]
    if shape.gpus:
        lines += _gpu(shape.gpu_type)
        lines += (adapter_lines(seen) if seen else []) or [
            "      # adapters that GPUs talk through, from `nvidia-smi topo -m` on a node",
            "      # nics:",
            "      #   - {name: mlx5_0, gpus: [0]}",
        ]
    return lines


def _gpu(gpu_type: str | None) -> list[str]:
    """Return the lines of a GPU's numbers for the planner: from a data sheet where the type is known."""
    model = gpu_model(gpu_type)
    if model is None:
        return [
            "      # what the planner must know of a GPU (docs/configuration.md); runs do without",
            "      # gpu: {memory_gib: ..., memory_gb_s: ..., tflops: {float32: ..., bfloat16: ...}, pcie_gb_s: ...}",
        ]
    fp8 = "" if model.fp8 is None else f", fp8: {model.fp8:g}"
    nvlink = [] if model.nvlink_gb_s is None else [f"        nvlink_gb_s: {model.nvlink_gb_s:g}"]
    return [
        f"      # data sheet of {model.name}, dense rates, links each way: correct them where yours is another variant",
        "      gpu:",
        f"        memory_gib: {model.memory_gib:g}",
        f"        memory_gb_s: {model.memory_gb_s:g}",
        f"        tflops: {{float32: {model.float32:g}, bfloat16: {model.bfloat16:g}{fp8}}}",
        *nvlink,
        f"        pcie_gb_s: {model.pcie_gb_s:g}",
        "      # bandwidth of the host's memory: sockets x channels x rate of a channel",
        "      # memory_gb_s: 614",
    ]


def _pythons(python: str | None, vllm_python: str | None) -> list[str]:
    """Return the lines of interpreters of the roles on nodes: without them, roles would have that of the command
    line."""
    word = json.dumps(python) if python else _UNKNOWN
    lines = [
        "# interpreters that all nodes see under these names: `hpcrl site install --role trainer --prefix DIR` makes",
        "# one for all three (docs/install.md); `hpcrl cluster check --job` imports what they need on a node",
        "python_by_role:",
        f"  trainer: {word}",
        f"  orchestrator: {word}",
    ]
    if vllm_python:
        return [*lines, "# engines, router and KV store", f"vllm_python: {json.dumps(vllm_python)}", ""]
    return [
        *lines,
        f"  engine: {word}",
        "# vLLM engines have an environment of their own (`hpcrl site install --role vllm`), and no `engine` above",
        "# vllm_python: /shared/envs/vllm/bin/python",
        "",
    ]


def _default(facts: SiteFacts) -> str:
    with_nodes = [p for p in facts.partitions if p.nodes]
    # a partition with GPUs comes before the site's default
    best = sorted(with_nodes, key=lambda p: (p.nodes[0][0].gpus == 0, not p.is_default))
    return yaml_text(best[0].name) if best else _UNKNOWN


def _yaml(value: bool) -> str:
    return "true" if value else "false"

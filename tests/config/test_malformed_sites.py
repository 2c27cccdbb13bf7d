"""Every malformed profile of a Slurm site, and every job that it cannot run, gives one error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from malformed_files import RECIPE, Case, check_message, edited, run

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.spare_rules import SPARE_RULES
from hpcrl.config.rules.table import JOB_RULES, SITE_RULES, check_rules
from hpcrl.errors import ConfigError

SITE = """\
name: big
kind: slurm
paths: {runs_root: /shared/runs, cache: /shared/cache, scratch: /scratch}
partitions:
  gpu:
    nodes: 4
    max_time_h: 200
    node:
      gpus: 8
      cpus: 64
      memory_gib: 512
      fabric: {kind: infiniband}
      nics:
        - {name: mlx5_0, gpus: [0, 1]}
  cpu: {nodes: 2, node: {gpus: 0, cpus: 64, memory_gib: 256, fabric: {kind: ethernet}}}
placement: {default: gpu}
gres: gres
capabilities: {hetjob: true, exclusive: true, requeue: true, scontrol_on_nodes: true, accounting: true}
limits: {time_limit_h: 24}
"""

_CAN = "hetjob: true, exclusive: true"

_NODE = "cluster.partitions.gpu.node"

SITES = {
    "unknown key": Case("gres: gres", "gres: gres\ngress: none", 18, "gress", "unknown key", "'gres'"),
    "unknown key below a name": Case("gpus: 8", "gpuss: 8", 9, "partitions.gpu.node.gpuss", "unknown key", "'gpus'"),
    "key of earlier versions": Case(
        "gpus: 8", "gpus: 8\n      scratch_gb_s: 9", 10, "partitions.gpu.node.scratch_gb_s", "no such setting", "remove"
    ),
    "capability of earlier versions": Case(
        _CAN, f"{_CAN}, preempt_signal: true", 18, "capabilities.preempt_signal", "no such setting", "migrate"
    ),
    "no guess of hardware": Case("      cpus: 64\n", "", 8, "partitions.gpu.node.cpus", "is required", "CPUTot"),
    "wrong fabric": Case(
        "fabric: {kind: infiniband}", "fabric: {kind: ib}", 12, "partitions.gpu.node.fabric.kind", "one of", ""
    ),
    "unknown role": Case(
        "{default: gpu}", "{default: gpu, by_role: {router: cpu}}", 16, "placement.by_role.router", "one of", ""
    ),
    "wrong container": Case(
        "gres: gres", "gres: gres\ncontainer: {kind: docker}", 18, "container", "one of none, pyxis", ""
    ),
    "no partitions": Case(
        SITE[SITE.index("partitions:") : SITE.index("placement")], "partitions: {}\n", 4, "partitions", "at least 1", ""
    ),
    "rule: variable of hpcrl": Case(
        "gres: gres", "gres: gres\nenv: {CUDA_VISIBLE_DEVICES: '0'}", 18, "cluster.env.CUDA", "Slurm sets", "remove"
    ),
    "rule: variable by prefix": Case(
        "gres: gres",
        "gres: gres\nenv_by_role: {engine: {SBATCH_QOS: x}}",
        18,
        "cluster.env_by_role.engine.SBATCH_QOS",
        "override the script",
        "remove",
    ),
    "rule: inherited variable": Case(
        "gres: gres",
        "gres: gres\nlaunch: {inherit: [SLURM_CONF]}",
        18,
        "cluster.launch.inherit.0",
        "SLURM_CONF",
        "remove",
    ),
    "rule: variable name": Case(
        "gres: gres", "gres: gres\nenv: {A-B: x}", 18, "cluster.env.A-B", "not a name", "rename"
    ),
    "rule: placement": Case(
        "default: gpu", "default: gpus", 16, "cluster.placement.default", "not a partition", "name one"
    ),
    "rule: GPUs for all": Case(
        f"gres: gres\ncapabilities: {{{_CAN}",
        "gres: none\ncapabilities: {hetjob: true, exclusive: false",
        17,
        "cluster.gres",
        "same GPU",
        "gpus_per_node",
    ),
    "rule: no such GPU": Case("gpus: [0, 1]", "gpus: [8]", 14, f"{_NODE}.nics.0.gpus", "no GPU 8", "topo"),
    "rule: GPU twice": Case(
        "gpus: [0, 1]}",
        "gpus: [0]}\n        - {name: mlx5_1, gpus: [0]}",
        15,
        f"{_NODE}.nics.1.gpus",
        "already",
        "topo",
    ),
    "rule: adapter twice": Case(
        "gpus: [0, 1]}", "gpus: [0]}\n        - {name: mlx5_0}", 15, f"{_NODE}.nics.1.name", "twice", "topo"
    ),
    "rule: RoCE": Case("kind: infiniband", "kind: roce", 12, f"{_NODE}.fabric.gid_index", "needs it", "show_gids"),
    "rule: GID of InfiniBand": Case(
        "kind: infiniband", "kind: infiniband, gid_index: 3", 12, f"{_NODE}.fabric.gid_index", "no effect", "correct"
    ),
    "rule: adapters of ethernet": Case("kind: infiniband", "kind: ethernet", 13, f"{_NODE}.nics", "no RDMA", "correct"),
    "rule: segment": Case(
        "    nodes: 4",
        "    nodes: 4\n    block_nodes: 2",
        7,
        "cluster.partitions.gpu.block_nodes",
        "no --segment",
        "24.05",
    ),
    "rule: modules": Case(
        "gres: gres",
        "gres: gres\nlaunch: {modules: [cuda]}",
        18,
        "cluster.launch.modules",
        "not defined",
        "module_init",
    ),
    "rule: mount": Case(
        "gres: gres",
        "gres: gres\ncontainer: {kind: pyxis, image: a, mounts: ['data:/data']}",
        18,
        "cluster.container.mounts.0",
        "/SOURCE",
        "absolute",
    ),
    "rule: runs root in scratch": Case(
        "runs_root: /shared/runs", "runs_root: /scratch/runs", 3, "cluster.paths.runs_root", "scratch", "another"
    ),
    "rule: backslash": Case("/shared/runs", "'/shared/a\\b'", 3, "cluster.paths.runs_root", "cannot pass", "another"),
    "rule: port order": Case(
        "gres: gres", "gres: gres\nports: {first: 3000, last: 2000}", 18, "cluster.ports.last", "below", "swap"
    ),
    "rule: time to save": Case(
        "{time_limit_h: 24}", "{time_limit_h: 0.1}", 19, "cluster.limits.save_timeout_s", "no time", "raise"
    ),
    "rule: time limit": Case(
        "{time_limit_h: 24}",
        "{time_limit_h: 201}",
        19,
        "cluster.limits.time_limit_h",
        "after 200 h",
        "job.time_limit_h",
    ),
}

JOBS = {
    "rule: trainer restarts": Case(
        "trainer:",
        "supervision: {trainer: {restart: on-failure}}\ntrainer:",
        8,
        "supervision.trainer.restart",
        "another step",
        "retry_failures",
    ),
    "rule: workers of supervised training": Case(
        "trainer:",
        "sft: {data: a.jsonl}\nenvironment_workers: {count: 1}\ntrainer:",
        9,
        "environment_workers",
        "no environments",
        "remove",
    ),
    "rule: workers in elastic": Case(
        "trainer:",
        "job: {layout: elastic}\nenvironment_workers: {count: 1}\ntrainer:",
        9,
        "environment_workers.placement",
        "jobs of engines, which come and go",
        "trainer_node",
    ),
    "rule: part of a node": Case(
        "trainer:",
        "environment_workers: {count: 1, cpus: 2}\ntrainer:",
        8,
        "environment_workers.cpus",
        "is given without memory_gib",
        "neither",
    ),
    "rule: workers of a node": Case(
        "trainer:",
        "environment_workers: {count: 2000, per_node: 2000}\ntrainer:",
        8,
        "environment_workers.per_node",
        "2000 workers",
        "lower",
    ),
    "rule: hang limits": Case(
        "trainer:",
        "supervision: {hang_floor_s: 90.0, hang_ceiling_s: 60.0}\ntrainer:",
        8,
        "supervision.hang_floor_s",
        "more than",
        "lower",
    ),
    "rule: payload": Case(
        "trainer:",
        "job: {layout: elastic}\nengine: {prefill: {replicas: 1, nodes: 1}, decode: {replicas: 1, nodes: 1}}\ntrainer:",
        9,
        "engine.prefill",
        "does not support elastic",
        "probe",
    ),
    "rule: vLLM stands": Case(
        "trainer:",
        "engine: {backend: vllm, pause: none}\ntrainer:",
        8,
        "engine.pause",
        "layers of two versions",
        "engine.pause: keep",
    ),
    "rule: one side": Case(
        "trainer:", "engine: {prefill: {replicas: 1, nodes: 1}}\ntrainer:", 8, "engine: ", "decode is missing", "both"
    ),
    "rule: side and replicas": Case(
        "trainer:",
        "engine: {replicas: 2, prefill: {replicas: 1, nodes: 1}, decode: {replicas: 1, nodes: 1}}\ntrainer:",
        8,
        "engine.replicas",
        "no effect",
        "neither",
    ),
    "rule: embedded on nodes": Case("trainer:", "engine: {nodes: 2}\ntrainer:", 8, "engine.nodes", "one process", "1"),
    "rule: uneven ranks": Case(
        "  steps: 10", "  steps: 10\n  ranks: 3\n  nodes: 2", 10, "trainer.ranks", "each", "times"
    ),
    "rule: ranks and GPUs": Case("  steps: 10", "  steps: 10\n  ranks: 9", 10, "trainer.ranks", "8 GPUs", "times"),
    "rule: too many nodes": Case(
        "  steps: 10", "  steps: 10\n  ranks: 4\n  nodes: 4", 11, "trainer.nodes", "5 nodes of partition 'gpu'", "lower"
    ),
    "rule: time of the job": Case(
        "trainer:", "job: {time_limit_h: 0.1}\ntrainer:", 8, "job.time_limit_h", "no time", "between"
    ),
    "rule: attempts": Case(
        "trainer:", "job: {max_attempts: 2}\ntrainer:", 8, "job.max_attempts_without_progress", "3", "raise"
    ),
    "rule: replicas to wait for": Case(
        "trainer:",
        "job: {layout: elastic, min_replicas: 2}\ntrainer:",
        8,
        "job.min_replicas",
        "more than engine.replicas",
        "lower",
    ),
    "rule: options of sbatch": Case(
        "trainer:",
        "job:\n  sbatch_options: [--nice=10, --time=4]\ntrainer:",
        9,
        "job.sbatch_options.1",
        "set job.time_limit_h",
        "render",
    ),
    "partition of another type": Case(
        "trainer:", "job: {partition: 3}\ntrainer:", 8, "job.partition", "a map of roles to names", ""
    ),
    "partition of a role beside": Case(
        "trainer:",
        "job: {partition: {router: cpu}}\ntrainer:",
        8,
        "job.partition",
        "router has no nodes of its own",
        "",
    ),
    "rule: replicas that start together": Case(
        "trainer:", "job: {min_replicas: 2}\ntrainer:", 8, "job.min_replicas", "no effect", "layout"
    ),
}


@pytest.mark.parametrize("case", SITES.values(), ids=SITES.keys())
def test_malformed_site(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "big.yaml"
    recipe.write_text(RECIPE)
    path.write_text(edited(SITE, case))
    code = run(monkeypatch, "recipe", "check", str(recipe), "--cluster", str(path))
    check_message(capsys, code, f"{path}:{case.line}: {case.key}", case)


@pytest.mark.parametrize("case", JOBS.values(), ids=JOBS.keys())
def test_malformed_job(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "big.yaml"
    recipe.write_text(edited(RECIPE, case))
    path.write_text(SITE)
    code = run(monkeypatch, "recipe", "check", str(recipe), "--cluster", str(path))
    check_message(capsys, code, f"{recipe}:{case.line}: {case.key}", case)


@pytest.mark.parametrize(
    ("job", "site", "says"),
    [
        ("layout: single", ("{default: gpu}", "{default: gpu, by_role: {engine: cpu}}"), "one partition"),
        ("layout: hetjob", ("hetjob: true", "hetjob: false"), "no heterogeneous"),
        ("requeue: always", ("requeue: true", "requeue: false"), "capabilities.requeue"),
        ("requeue: always", ("scontrol_on_nodes: true", "scontrol_on_nodes: false"), "scontrol"),
    ],
)
def test_job_that_the_site_cannot_run(job: str, site: tuple[str, str], says: str, tmp_path: Path) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "big.yaml"
    recipe.write_text(RECIPE + f"job: {{{job}}}\n")
    assert site[0] in SITE
    path.write_text(SITE.replace(*site))
    with pytest.raises(ConfigError) as error:
        check_rules(load_recipe(str(recipe)), load_cluster(str(path)))
    (finding,) = error.value.findings
    assert (finding.where, finding.key) == (f"{recipe}:10", f"job.{job.partition(':')[0]}")
    assert says in finding.what


def test_every_site_rule_has_a_case(tmp_path: Path) -> None:
    """Each rule about sites and jobs is broken by one of the files above."""
    broken: set[str] = set()
    sites = [(RECIPE, edited(SITE, case)) for case in SITES.values()]
    for i, (recipe_text, site_text) in enumerate([*sites, *((edited(RECIPE, case), SITE) for case in JOBS.values())]):
        directory = tmp_path / str(i)
        directory.mkdir()
        (directory / "good.yaml").write_text(recipe_text)
        (directory / "big.yaml").write_text(site_text)
        try:
            check_rules(load_recipe(str(directory / "good.yaml")), load_cluster(str(directory / "big.yaml")))
        except ConfigError as error:
            broken.update(re.findall(r"\[([a-z-]+)\]$", str(error), re.MULTILINE))
    by_other_tests = {"local-is-one-node", "layout-possible", "requeue-possible"}
    by_other_tests |= {rule.name for rule in SPARE_RULES}  # tests/config/rules/test_rules_spares.py
    by_other_tests |= {"sandbox-fits-node"}  # tests/config/rules/test_rules_sandboxes.py
    assert {rule.name for rule in (*SITE_RULES, *JOB_RULES)} - by_other_tests <= broken

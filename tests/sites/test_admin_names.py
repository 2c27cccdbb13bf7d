"""Names and numbers that admins choose: read as Slurm means them, and written so that a draft says the same."""

from __future__ import annotations

import random
import time

import pytest
import yaml

from hpcrl.sites.profile_draft import draft_profile
from hpcrl.sites.site_facts import read_site_facts
from hpcrl.sites.yaml_text import yaml_text
from hpcrl.slurm.gres import gpus_by_type
from hpcrl.slurm.parse import parse_config, parse_node, parse_oneliner

NAMES = [
    *("on", "off", "yes", "no", "y", "n", "true", "false", "null", "~", "Null", "NO", "1e3", "0123", "0x1F", "12:30"),
    *("1_000", ".inf", ".nan", "2024-01-01", "-", "--", "=", "<<", "*", "&", "!", "%a", "@a", "|", ">", "?", ":", ","),
    *("h100", "gpu-long", "a.b", "a_b", "A100", "7", "7b", "1g.10gb", "[x]", "{x}", "a:b", "#x", "'x'", '"x"', "`"),
    *("\u00e9", "\u673a\u5668", "\U0001f600", "\x85x", "\u2028x", "\ufeffx"),
]
NAMES += ["a b", "a: b", "a #b", " a", "a ", "", "a\tb", "a\\b", "x\x7f", "x\ny"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_yaml_reads_a_name_as_it_is(name: str) -> None:
    text = yaml_text(name)
    assert yaml.safe_load(f"{text}: {{a: {text}}}\n") == {name: {"a": name}}


@pytest.mark.campaign
def test_yaml_reads_any_name_as_it_is() -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    dice, until = random.Random(seed), time.monotonic() + 10.0
    signs = [*map(chr, range(1, 0x180)), *"\u2028\u2029\ufeff\ufffe\u3000\U0001f600:#-[]{}'\"\\~onyes"]
    while time.monotonic() < until:
        name = "".join(dice.choices(signs, k=dice.randrange(1, 8)))
        text = yaml_text(name)
        assert yaml.safe_load(f"{text}: {{a: {text}}}\n") == {name: {"a": name}}, ascii(name)


#: Gres of a node as `scontrol show node` prints it, and the GPUs by type
GRES = {
    "": {},
    "(null)": {},
    "gpu:8": {"": 8},
    "gpu": {"": 1},
    "gpu:h200:8": {"h200": 8},
    "gpu:h200:8(S:0-1)": {"h200": 8},
    "gpu:8(S:0,2-3)": {"": 8},
    "gpu:a100:4(S:0,1),nvme:1": {"a100": 4},
    "gpu:a100:4(S:0),gpu:v100:2(S:1)": {"a100": 4, "v100": 2},
    "gpu:a100:2(S:0),gpu:a100:2(S:1)": {"a100": 4},
    "gpu:1g.10gb:7": {"1g.10gb": 7},
    "gpu:a100_3g.20gb:2(S:0),gpu:a100:6(S:0-1)": {"a100_3g.20gb": 2, "a100": 6},
    "gpu:nvidia_h100_80gb_hbm3:8": {"nvidia_h100_80gb_hbm3": 8},
    "gpu:tesla": {"tesla": 1},
    "gpu:0": {},
    "gpu:tesla:no_consume:2": {"tesla": 2},
    "gpu:no_consume:4": {"": 4},
    "shard:a100:32(S:0),gpu:a100:4": {"a100": 4},
    "mps:400,gpu:4": {"": 4},
    "fake-gpu:4": {},
    "vgpu:4,my_gpu:2": {},
    "bandwidth:lustre:no_consume:4G,gpu:8": {"": 8},
    "license:gpu:3": {},
    "gpu:h200:8(S:0-1,IDX:0-7)": {"h200": 8},
}


@pytest.mark.parametrize("gres", GRES)
def test_gpus_are_counted_as_slurm_writes_them(gres: str) -> None:
    assert gpus_by_type(gres) == GRES[gres]


class Site:
    """A Slurm whose records are given."""

    def __init__(self, nodes: str, partition: str) -> None:
        self._nodes, self._partition = nodes, partition

    def config(self) -> dict[str, str]:
        return {"SLURM_VERSION": "22.05.8", "SchedulerType": "sched/backfill", "GresTypes": "gpu", "ClusterName": "c"}

    def show(self, kind: str, name: str | None = None) -> list[dict[str, str]]:
        if kind == "node":
            return parse_oneliner(self._nodes)
        return [{"PartitionName": self._partition, "State": "UP", "Default": "YES"}]


@pytest.mark.parametrize("name", ["on", "no", "1e3", "0123", "12:30", "null", "gpu", "7"])
def test_a_draft_has_the_partitions_and_types_that_slurm_has(name: str) -> None:
    node = f"NodeName=n1 Gres=gpu:{name.replace(':', '.')}:4 CPUTot=8 RealMemory=2000 State=IDLE Partitions={name}"
    draft = yaml.safe_load(draft_profile(read_site_facts(Site(node, name)), "mine", runs_root="/r", fabric="ethernet"))
    assert list(draft["partitions"]) == [name]
    assert draft["placement"]["default"] == name
    assert draft["partitions"][name]["node"]["gpu_type"] == name.replace(":", ".")


def test_a_node_with_gpus_of_two_types_has_no_type_that_all_are_of() -> None:
    node = "NodeName=n1 Gres=gpu:a100:4,gpu:v100:4 CPUTot=8 RealMemory=2000 State=IDLE Partitions=gpu"
    ((shape, _),) = read_site_facts(Site(node, "gpu")).partitions[0].nodes
    assert (shape.gpus, shape.gpu_type) == (8, None)


REASONS = [
    "bad disk State=DOWN Partitions=none",
    "NodeName=n9 State=IDLE Gres=gpu:99",
    "quotes \"x\" and 'y' a=b",
    "lines\nNodeAddr=10.0.0.9 State=DOWN\n\nend",
    "Reason=again",
]


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_changes_nothing_that_stands_before_it(reason: str) -> None:
    record = "NodeName={} Gres=gpu:8 NodeAddr=a{} CPUTot=8 RealMemory=2000 State=IDLE+DRAIN Partitions=gpu Reason={}"
    first, second = parse_oneliner("\n".join(record.format(n, n, reason) for n in ("n1", "n2")))
    assert (first["NodeName"], second["NodeName"]) == ("n1", "n2")
    for each in (first, second):
        assert each["State"] == "IDLE+DRAIN"
        assert (each["Partitions"], each["Gres"]) == ("gpu", "gpu:8")
    assert second["NodeAddr"] == "an2"


#: names of jobs, all of which Slurm 22.05 takes and prints as they are
JOB_NAMES = ["plain", "x JobState=COMPLETED", "a=b NodeList=n9", "two\nlines JobState=FAILED"]
JOB_NAMES += ["y UserId=ada(1000) GroupId=ada(1000) JobState=COMPLETED"]


@pytest.mark.parametrize("reason", [*REASONS, "a [b@c] d", ""])
def test_a_reason_is_shown_whole(reason: str) -> None:
    """As Slurm 22.05 prints it, with who said it and when behind."""
    line = f"NodeName=n1 State=IDLE+DRAIN Partitions=gpu  Reason={reason} [root@1795660980]"
    (record,) = parse_oneliner(line)
    # lines are joined
    assert parse_node(record).reason.split() == f"{reason} [root@1795660980]".split()
    assert (record["State"], record["Partitions"].strip()) == ("IDLE+DRAIN", "gpu")


@pytest.mark.parametrize("name", JOB_NAMES)
def test_the_name_of_a_job_changes_nothing_that_stands_behind_it(name: str) -> None:
    line = (
        f"JobId=7 JobName={name} UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 JobState=RUNNING "
        f"Reason=None NodeList=n[1-2] Comment=JobState=PENDING NodeList=n8"
    )
    (record,) = parse_oneliner(line)
    assert (record["JobState"], record["NodeList"], record["JobId"]) == ("RUNNING", "n[1-2]", "7")
    assert record["JobName"] == name.replace("\n", " ")


def test_lines_before_the_records_are_a_sites_banner() -> None:
    assert parse_oneliner("Welcome site=alpha State=UP\nPartitionName=gpu State=DOWN\n") == [
        {"PartitionName": "gpu", "State": "DOWN"}
    ]
    assert parse_config("ClusterName = a = b\nEmpty = (null)\nClusterName = later\n") == {
        "ClusterName": "a = b",
        "Empty": "",
    }

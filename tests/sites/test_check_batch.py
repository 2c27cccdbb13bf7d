"""Which nodes try the network together, and with what the job asks for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_node_findings import GOOD

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.errors import UsageError
from hpcrl.jobplan.environment import network_variables
from hpcrl.sites import check_batch
from hpcrl.sites.check_job import _job, _questions
from hpcrl.sites.gpu_products import GpuProduct
from hpcrl.sites.library_probe import LibraryAnswer
from hpcrl.sites.network_check import NetworkPlan, NetworkReport
from hpcrl.sites.node_reach import RunAddresses
from hpcrl.sites.node_report import NodeQuestions, NodeReport
from hpcrl.sites.small_job import render_small_job


def loaded(name: str) -> SlurmCluster:
    profile = load_cluster(name).value
    assert isinstance(profile, SlurmCluster)
    return profile


@pytest.fixture
def questions() -> NodeQuestions:
    return _questions(loaded("h200-28"), "gpu", 2, {"NCCL_IB_HCA": "=mlx5_0:1"})


def report(questions: NodeQuestions, host: str, *, products: int = 8, bad: str = "", torch: str = "good") -> NodeReport:
    libraries = [
        LibraryAnswer(question=each, kind=torch if each.library == "torch" else "good") for each in questions.libraries
    ]
    its = [GpuProduct(device=i, float32=0.0, bfloat16=0.0, problem=bad if i == 5 else "") for i in range(products)]
    return replace(GOOD, host=host, libraries=libraries, products=its)


def tried(
    monkeypatch: pytest.MonkeyPatch, questions: NodeQuestions, *reports: NodeReport
) -> tuple[list[str], NetworkPlan | None, NetworkReport]:
    asked: list[tuple[list[str], NetworkPlan]] = []

    def check(nodes: list[str], plan: NetworkPlan, run: object, *, time_left: object) -> NetworkReport:
        asked.append((nodes, plan))
        return NetworkReport(backend=plan.backend)

    monkeypatch.setattr(check_batch, "check_network", check)
    addresses = RunAddresses({each.host: "10.0.0.1" for each in reports})
    found = check_batch.try_network(Path(), questions, reports, addresses, env={}, time_left=lambda: 1.0)
    nodes, plan = asked[0] if asked else ([], None)
    return nodes, plan, found


def test_gpus_talk_by_nccl_over_all_nodes(monkeypatch: pytest.MonkeyPatch, questions: NodeQuestions) -> None:
    nodes, plan, _ = tried(monkeypatch, questions, *(report(questions, host) for host in ("n1", "n2")))
    assert nodes == ["n1", "n2"]
    assert plan is not None
    assert (plan.backend, plan.ranks_per_node, plan.least_gb_s) == ("nccl", 8, 200.0)
    assert plan.step_options == ["--gres=gpu:h200:8"]
    assert plan.environ["NCCL_IB_HCA"] == "=mlx5_0:1"


def test_a_node_with_a_bad_gpu_or_without_torch_is_left_out(
    monkeypatch: pytest.MonkeyPatch, questions: NodeQuestions
) -> None:
    reports = [
        *(report(questions, host) for host in ("n1", "n2")),
        report(questions, "n3", bad="CUDA error"),
        report(questions, "n4", products=7),
        report(questions, "n5", torch="crash"),
    ]
    nodes, _, found = tried(monkeypatch, questions, *reports)
    assert nodes == ["n1", "n2"]
    assert found.left_out == ["n3", "n4", "n5"]


def test_without_a_driver_anywhere_processors_talk(monkeypatch: pytest.MonkeyPatch, questions: NodeQuestions) -> None:
    nodes, plan, _ = tried(monkeypatch, questions, *(report(questions, host, products=0) for host in ("n1", "n2")))
    assert nodes == ["n1", "n2"]
    assert plan is not None
    assert (plan.backend, plan.ranks_per_node, plan.least_gb_s, plan.step_options) == ("gloo", 1, None, [])


def test_the_reason_is_reported_if_no_node_can_take_part(
    monkeypatch: pytest.MonkeyPatch, questions: NodeQuestions
) -> None:
    *_, found = tried(monkeypatch, questions, report(questions, "n1", products=0))
    assert found.skipped == "there is one node"
    *_, found = tried(
        monkeypatch, questions, report(questions, "n1", torch="failed"), report(questions, "n2", torch="hang")
    )
    assert "no torch that loads" in found.skipped
    *_, found = tried(monkeypatch, replace(questions, network=None), report(questions, "n1"))
    assert "containers" in found.skipped


def test_the_job_asks_for_gpus_as_the_profile_writes_them(tmp_path: Path) -> None:
    def directives(name: str, partition: str, **changed: object) -> set[str]:
        site = loaded(name).model_copy(update=changed)
        text = render_small_job(site, _job(site, partition, 2, tmp_path, wait_s=1.0))
        return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}

    assert {"--gres=gpu:h200:8", "--exclusive", "--mem=0", "--time=0:20:00"} <= directives("h200-28", "gpu")
    assert "--gpus-per-node=h100:8" in directives("roce-h100", "train")
    assert not {each for each in directives("h200-28", "gpu", gres="none") if "gpu:" in each}
    shared = loaded("h200-28").capabilities.model_copy(update={"exclusive": False})
    asked = directives("h200-28", "gpu", capabilities=shared)
    assert {"--cpus-per-task=192", f"--mem={2015 * 1024}M"} <= asked
    assert "--exclusive" not in asked


@pytest.mark.parametrize("name", ["100%j", "%A_%a", "two words", "it's", "ä ö"])
def test_the_log_of_a_job_is_in_its_directory(name: str, tmp_path: Path) -> None:
    """Slurm replaces signs after a percent sign in it, and ends it at a blank."""
    site, directory = loaded("h200-28"), tmp_path / name
    text = render_small_job(site, _job(site, "gpu", 2, directory, wait_s=1.0))
    (line,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output")]
    _, option = shlex.split(line.replace("#SBATCH", "SBATCH"))
    assert option == f"--output={str(directory).replace('%', '%%')}/log"


def test_a_directory_that_slurm_cannot_be_given_is_refused(tmp_path: Path) -> None:
    site = loaded("h200-28")
    with pytest.raises(UsageError, match="backslash"):
        render_small_job(site, _job(site, "gpu", 2, tmp_path / "a\\b", wait_s=1.0))


def test_ranks_get_the_environment_of_a_trainer() -> None:
    variables = network_variables(loaded("h200-28"), "gpu")
    assert variables["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert variables["NCCL_IB_HCA"].startswith("=mlx5_0:1,mlx5_3:1")
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_rates_without_figures_are_not_judged(questions: NodeQuestions) -> None:
    assert questions.network is not None
    roce = _questions(loaded("roce-h100"), "train", 2, {}).network
    assert roce is not None
    assert roce.least_gb_s is None

"""A recipe and a profile together: one profile for all projects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.joined import for_job, load_both, unused_variables, with_account_from_env
from hpcrl.config.load import Loaded, load_cluster
from hpcrl.config.sbatch_options import option_faults, repeats_in_components
from hpcrl.errors import ConfigError
from hpcrl.jobplan import change_recipe


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The profile roce-h100 of a site that charges all its jobs to one account."""
    text = load_cluster("roce-h100").source.read_text()
    path = tmp_path_factory.mktemp("site") / "roce-h100.yaml"
    path.write_text(text.replace("    max_time_h:", "    account: research\n    max_time_h:"))
    return str(path)


def joined(profile: str, *settings: str, **environ: str) -> tuple[dict[str, dict[str, Any]], Loaded[Any]]:
    """What each partition of the profile is charged to, with its source."""
    _, site = load_both("quickstart", profile, settings, environ=environ)
    charges = {
        name: {
            key: (value, site.origin(("partitions", name, key)))
            for key in ("account", "qos", "reservation")
            if (value := getattr(partition, key)) is not None
        }
        for name, partition in site.value.partitions.items()
    }
    return charges, site


def test_recipe_before_environment_before_profile(profile: str) -> None:
    before = load_cluster(profile).origin(("partitions", "train", "account"))
    charges, _ = joined(profile)
    assert charges["train"] == {"account": ("research", before)}
    charges, _ = joined(profile, SBATCH_ACCOUNT="chem", SLURM_ACCOUNT="other", SLURM_QOS="long", SBATCH_RESERVATION="")
    assert charges["train"] == {"account": ("chem", "$SBATCH_ACCOUNT"), "qos": ("long", "$SLURM_QOS")}
    assert charges["serve"] == charges["train"]
    asked = ("job.account=bio", "job.reservation=r1")
    charges, _ = joined(profile, *asked, SBATCH_ACCOUNT="chem", SBATCH_RESERVATION="r2")
    assert charges["train"] == {"account": ("bio", "--set"), "reservation": ("r1", "--set")}


def test_the_recipe_can_ask_for_the_profile(profile: str) -> None:
    charges, _ = joined(profile, "job.account=null", SBATCH_ACCOUNT="chem")
    assert charges["train"]["account"][0] == "research"


def test_variables_of_the_job_that_we_are_in_are_not_wishes(profile: str) -> None:
    charges, site = joined(profile, SLURM_JOB_ID="7", SLURM_ACCOUNT="old", SLURM_PARTITION="gone", SBATCH_QOS="new")
    assert charges["train"] == {"account": ("research", charges["train"]["account"][1]), "qos": ("new", "$SBATCH_QOS")}
    assert site.value.partition_name("trainer") == "train"


def test_a_machine_without_slurm_takes_nothing() -> None:
    recipe, _ = load_both("quickstart", "local", environ={"SBATCH_ACCOUNT": "chem", "SBATCH_PARTITION": "x"})
    assert (recipe.value.job.account, recipe.value.job.partition) == (None, None)


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ((), {}, ("train", "serve", "serve")),
        (("job.partition=train",), {}, ("train", "train", "train")),
        (("job.partition={trainer: serve}",), {}, ("serve", "serve", "serve")),
        (("job.partition={engine: train}",), {"SBATCH_PARTITION": "serve"}, ("train", "train", "train")),
        (("job.partition={prefill: train}",), {}, ("train", "train", "serve")),
        ((), {"SBATCH_PARTITION": "serve"}, ("serve", "serve", "serve")),
    ],
)
def test_partition_of_each_role(
    profile: str, settings: tuple[str, ...], environ: dict[str, str], expected: tuple[str, str, str]
) -> None:
    _, site = joined(profile, *settings, **environ)
    names = tuple(site.value.partition_name(role) for role in ("trainer", "prefill", "decode"))
    assert names == expected


def test_engine_is_also_for_its_sides_where_the_profile_names_them(tmp_path: Path) -> None:
    recipe, _ = load_both("quickstart", "roce-h100", ["job.partition={engine: train}"], environ={})
    profile = tmp_path / "own.yaml"
    profile.write_text("extends: roce-h100\nplacement: {by_role: {prefill: serve}}\n")
    site = load_cluster(str(profile))
    assert for_job(recipe, site).value.partition_name("prefill") == "train"  # type: ignore[union-attr]


def test_doing_it_twice_changes_nothing() -> None:
    recipe, once = load_both("quickstart", "roce-h100", ["job.account=a", "job.partition={engine: train}"], environ={})
    assert for_job(recipe, once).value == once.value


@pytest.mark.parametrize(
    ("settings", "environ", "where", "says"),
    [
        (("job.partition=gpu",), {}, "--set", "'gpu' is not a partition of roce-h100 (train, serve)"),
        (("job.partition={engine: gpu}",), {}, "--set", "'gpu' is not a partition"),
        ((), {"SBATCH_PARTITION": "train,serve"}, "$SBATCH_PARTITION", "'train,serve' is not a partition"),
        ((), {"SBATCH_ACCOUNT": "two words"}, "$SBATCH_ACCOUNT", "is not valid for Slurm"),
    ],
)
def test_what_cannot_be(settings: tuple[str, ...], environ: dict[str, str], where: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_both("quickstart", "roce-h100", settings, environ=environ)
    (finding,) = caught.value.findings
    assert finding.where == where
    assert says in finding.what
    assert finding.hint


def test_jobs_that_are_no_runs_are_charged_alike() -> None:
    site = load_cluster("roce-h100").value
    assert isinstance(site, SlurmCluster)
    changed = with_account_from_env(site, {"SBATCH_ACCOUNT": "chem", "SBATCH_PARTITION": "unknown"})
    assert {partition.account for partition in changed.partitions.values()} == {"chem"}
    assert changed.placement == site.placement


def test_what_sbatch_would_read_and_a_run_does_not() -> None:
    environ = {"SBATCH_TIMELIMIT": "1", "SBATCH_ACCOUNT": "a", "SBATCH_EXPORT": "NONE", "SLURM_HINT": "x"}
    assert unused_variables(environ) == ["SBATCH_EXPORT", "SBATCH_TIMELIMIT"]


# -- options that are passed on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--job-name=x", "give --name"),
        ("--output=/tmp/x", "run directory"),
        ("--signal=USR1", "limits.save_timeout_s"),
        ("--account=a", "set job.account"),
        ("--requeue", "set job.requeue"),
        ("--mial-type=END", "did you mean --mail-type?"),
        ("--job-na=x", "did you mean --job-name?"),  # sbatch itself takes what begins like one option only
        ("--mail-type", "needs a value"),  # sbatch would take the next option as the value
        ("--mail-type=", "needs a value"),
        ("--hold=yes", "takes no value"),
        ("-A", "long name"),
        ("--nice=1 --time=3", ""),
        ("--nice=1\n#SBATCH --time=3", "not of the form"),
        ("nice=1", "not of the form"),
        (" --nice=1", "not of the form"),
        ("--", "sbatch has no option"),
    ],
)
def test_options_that_are_refused(option: str, says: str) -> None:
    faults = list(option_faults([option]))
    if says:
        ((index, fault),) = faults
        assert index == 0
        assert says in fault
    else:
        assert faults == [], "one value, blanks and all: it is quoted"


def test_options_that_are_passed_on() -> None:
    options = [
        "--nice",
        "--mail-type=END,FAIL",
        "--contiguous",
        "--switches=2@10:00",
        "--dependency=afterok:7",
        "--hold",
    ]
    assert list(option_faults(options)) == []
    assert [option for option in options if repeats_in_components(option)] == ["--contiguous", "--switches=2@10:00"]
    assert list(option_faults(["--nice=1", "--hold", "--nice=2"])) == [(2, "--nice appears twice")]


def test_settings_of_a_run_cannot_be_undone(tmp_path: Any) -> None:
    text = "name: r\nmodel: {path: m}\nenvironments: [{name: a, kind: words}]\ntrainer: {steps: 5}\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(text + "job: {account: a, partition: {engine: x, trainer: y}}\n")
    assert change_recipe(path, ["job.account=b"])[1] == ["job.account: a -> b"]
    for setting in ("job.account=null", "job.partition={engine: z}"):
        with pytest.raises(ConfigError, match="cannot be undone"):
            change_recipe(path, [setting])
    assert change_recipe(path, ["job.partition=z"])[0].value.job.partition == "z"

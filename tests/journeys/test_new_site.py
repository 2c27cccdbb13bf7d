"""An admin describes a site, and a user of it submits, looks, errs and cleans up: on a virtual cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_for
from screens import ROOT, Journey

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

PROBES = (
    "--set job.payload=probe --set job.time_limit_h=0.5 --set model.path=none --set trainer.nodes=1 "
    "--set trainer.ranks=1 --set engine.replicas=1 --set job.layout=hetjob"
)
OVERLAY = """\
extends: {below}
name: mysite
partitions: {{gpu: {{account: rl-team}}}}
"""


@pytest.fixture
def shared(tmp_path: Path, site: DevCluster) -> Iterator[Path]:
    """A directory that all nodes see; no job is left after the test."""
    yield tmp_path
    env = {**Journey(tmp_path / "nobody").env, **site.environment()}
    subprocess.run(["scancel", "--me"], env=env, check=False, capture_output=True)


def person(name: str, shared: Path, site: DevCluster) -> Journey:
    """Somebody on the login node of the site."""
    # jobs start clean: what this checkout is imported by, and how long probes stay, is named in the profile
    journey = Journey(shared / name, **site.environment(), PYTHONPATH=str(ROOT), PROBE_HOLD_S="600")
    journey.names |= {str(shared): "SHARED", str(site.paths.root): "CLUSTER"}
    return journey


def describe(grace: Journey, shared: Path) -> None:
    grace.type(f"hpcrl cluster init mysite --runs-root {shared}/runs --fabric ethernet")
    grace.type("echo 'launch: {inherit: [PYTHONPATH, PROBE_HOLD_S]}' >> clusters/mysite.yaml")
    grace.type("hpcrl cluster init mysite")
    grace.type("hpcrl cluster check mysite 2>&1 | sed 's/[0-9]* rules/RULES/'")
    grace.type("hpcrl cluster check clusters/mysit.yaml")
    grace.type("mkdir -p ~/.config/hpcrl/clusters; mv clusters/mysite.yaml ~/.config/hpcrl/clusters")
    grace.type("hpcrl cluster show mysite | grep 'nodes\\|account\\|runs_root' | tr -s ' ' | cut -d' ' -f1,2")
    grace.type("hpcrl plan quickstart --cluster mysite --set model.path=Qwen3-30B-A3B | tail -n +1 | head -3")
    grace.type("hpcrl render quickstart --cluster mysite --name try -o look; ls look")


def submit(alan: Journey, shared: Path) -> None:
    alan.write(
        ".config/hpcrl/clusters/mysite.yaml",
        OVERLAY.format(below=shared / "grace/.config/hpcrl/clusters/mysite.yaml"),
    )
    alan.type("hpcrl cluster show mysite | grep account | tr -s ' ' | cut -d' ' -f1,2")
    alan.type(f"hpcrl submit quickstart -c mysit --name night {PROBES}")
    alan.type(f"hpcrl submit quickstart -c mysite --name night {PROBES} --set engine.replicas=9")
    alan.type("hpcrl ls")
    alan.type(f"hpcrl submit quickstart -c mysite --name night {PROBES}")


def watch(alan: Journey, run: RunDir) -> None:
    wait_for(lambda: observe(run).state is RunState.RUNNING, 90.0, "a run that runs")
    alan.say("the run has its nodes")
    alan.go(alan.home / "elsewhere")
    alan.type("hpcrl status night | head -2 | cut -d. -f1")
    alan.type("hpcrl ls --cluster mysite --state running | cut -c1-22")
    alan.type("hpcrl shell night --role engine -- printenv HPCRL_ROLE HPCRL_REPLICA SLURMD_NODENAME 2> /dev/null")
    alan.type("hpcrl shell night --role engine/4 -- true")
    alan.type("hpcrl scale night engine=2")
    alan.type("hpcrl resume night 2>&1 | cut -d'(' -f1")
    alan.type("hpcrl rm night")


def end(alan: Journey, run: RunDir) -> None:
    alan.type("hpcrl cancel night 2>&1 < /dev/null | tail -n 2")
    alan.type("hpcrl cancel night --yes")
    alan.type("hpcrl status night | head -1 | cut -c1-27")
    alan.type("hpcrl why night")
    alan.type("hpcrl shell night")
    alan.type("hpcrl rm night --yes 2>&1 | tail -n 1")
    alan.type("hpcrl ls")
    assert not run.path.exists()


def test_a_new_site_from_its_profile_to_its_first_user(shared: Path, site: DevCluster) -> None:
    grace, alan = person("grace", shared, site), person("alan", shared, site)
    run = RunDir(shared / "runs/night")
    describe(grace, shared)
    grace.compare("new_admin")
    submit(alan, shared)
    watch(alan, run)
    end(alan, run)
    alan.compare("new_site_user")

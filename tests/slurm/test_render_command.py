"""``hpcrl render`` and ``hpcrl plan`` for Slurm sites."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Literal

import pytest
from chat_lab import write_model
from start_models import write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.joined import load_both
from hpcrl.config.plan import Plan
from hpcrl.jobplan import absolute_paths, absolute_site_paths, make_plan
from hpcrl.models import known
from hpcrl.runs.contents import RunContents
from hpcrl.runs.record import RunRecord
from hpcrl.slurm.errors import SlurmRejectedError
from hpcrl.slurm.scripts import STAND_IN_ID
from hpcrl.submit.submission import create_run, submit_attempt
from hpcrl.swe.task import SweTask, write_tasks


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HPCRL_RUNS_ROOT", raising=False)
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_"))]:
        monkeypatch.delenv(name)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


@pytest.mark.parametrize(
    ("layout", "scripts"),
    [
        ("hetjob", ["job.sbatch"]),
        ("single", ["job.sbatch"]),
        ("elastic", ["job.sbatch", "engine-0.sbatch", "engine-1.sbatch"]),
    ],
)
def test_render(
    layout: str, scripts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = ["--set", f"job.layout={layout}", "--set", "engine.replicas=2"]
    assert run(monkeypatch, "render", "quickstart", "-c", "devcluster", "-o", "out", "--name", "mine", *settings) == 0
    assert capsys.readouterr().out.split() == [f"out/{name}" for name in ("plan.json", *scripts)]
    plan = Plan.model_validate_json((tmp_path / "out/plan.json").read_bytes())
    assert (plan.run, plan.run_dir, plan.layout.kind) == ("mine", tmp_path / "runs/mine", layout)
    assert f"#SBATCH --output={tmp_path}/runs/mine/submitit/%j_0_log.out" in (tmp_path / "out/job.sbatch").read_text()
    # nothing but the scripts: no run directory
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "..", ".hidden", "a/b", ""])
def test_names_that_are_paths_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "render", "quickstart", "-c", "devcluster", "-o", "out", "--name", name) == 2
    assert "cannot be the name of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stub_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that takes every script and knows no job; returns the directory with what it was given."""
    taken, programs = tmp_path / "taken", tmp_path / "bin"
    taken.mkdir()
    programs.mkdir()
    for name, lines in {
        "sbatch": [
            f'cp "${{@: -1}}" {taken}/',
            f"env > {taken}/environment",
            f'printf "%s\\n" "$@" > {taken}/arguments',
            f"echo $((100 + $(ls {taken} | wc -l)))",
        ],
        "squeue": [],
        "scontrol": [],
    }.items():
        (programs / name).write_text("\n".join(["#!/bin/bash", "set -eu", *lines, ""]))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return taken


@pytest.mark.parametrize("layout", ["hetjob", "single", "elastic"])
def test_render_writes_what_submit_sends(
    layout: str, stub_slurm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SBATCH_EXPORT", "SBATCH_OUTPUT", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "x")
    settings = [f"job.layout={layout}", "engine.replicas=2", "job.account=chem", "job.sbatch_options=[--nice=5]"]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert run(monkeypatch, "render", "quickstart", "-c", "devcluster", "-o", "out", "--name", "mine", *sets) == 0
    recipe, site = load_both("quickstart", "devcluster", settings, environ={})
    resolved, profile = absolute_paths(recipe.value, tmp_path), absolute_site_paths(site.value, tmp_path)
    directory = create_run(resolved, profile, make_plan(resolved, profile, "mine", tmp_path / "runs/mine")).run
    submission = submit_attempt(RunContents.read(directory))
    run_id = RunRecord.read(directory).run_id
    assert len(run_id) == 32
    shown = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.sbatch")}
    sent = {path.name: path.read_text() for path in stub_slurm.glob("*.sbatch")}
    assert len(sent) == (3 if layout == "elastic" else 1)
    # a replica that begins first would keep its nodes from the trainer
    told = (stub_slurm / "arguments").read_text().splitlines()
    assert (f"--dependency=after:{submission.job_id}" in told) == (layout == "elastic")
    assert {name: text.replace(run_id, STAND_IN_ID) for name, text in sent.items()} == shown
    assert sent["job.sbatch"] == (directory.path / "job.sbatch").read_text()
    assert "x" not in [line.partition("=")[2] for line in (stub_slurm / "environment").read_text().splitlines()]
    # what submitit's process looks for, under the number of the job
    assert (directory.path / "submitit" / f"{submission.job_id}_submitted.pkl").is_file()
    assert [path.suffix for path in (directory.path / "submitit").iterdir()] == [".pkl"]


def test_a_refused_hand_over_leaves_nothing(stub_slurm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin/sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    recipe, site = load_both("quickstart", "devcluster", (), environ={})
    resolved, profile = absolute_paths(recipe.value, tmp_path), absolute_site_paths(site.value, tmp_path)
    directory = create_run(resolved, profile, make_plan(resolved, profile, "mine", tmp_path / "runs/mine")).run
    with pytest.raises(SlurmRejectedError, match="Invalid account"):
        submit_attempt(RunContents.read(directory))
    assert list((directory.path / "submitit").iterdir()) == []


def test_render_needs_a_site(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "render", "quickstart", "-o", "out") == 2
    assert "local is not a Slurm site" in capsys.readouterr().err


def test_plan_shows_nodes_and_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "glm5_swe", "-c", "h200-28", "--set", "job.payload=probe", "--env") == 0
    out = capsys.readouterr().out
    assert "hetjob (the recipe says so): 28 nodes, 224 GPUs" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["prefill", "1", "gpu", "4", "x", "2", "0-7", "8", "64"] in rows
    assert ["trainer", "UCX_NET_DEVICES"] not in [row[:2] for row in rows]
    assert ["decode", "NCCL_SOCKET_IFNAME", "=bond0", "cluster.partitions.gpu.node"] in rows
    assert ["decode", "UCX_RCACHE_MAX_UNRELEASED", "1024", "cluster.env_by_role.engine"] in rows


def test_plan_of_the_quickstart_is_the_same_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for cluster in ("local", "devcluster"):
        assert run(monkeypatch, "plan", "quickstart", "-c", cluster, "--json") == 0
        plans.append(json.loads(capsys.readouterr().out))
    local, site = plans
    assert [group["command"] for group in local["groups"]] == [group["command"] for group in site["groups"]]
    assert local["layout"]["components"] == []
    assert [component["nodes"] for component in site["layout"]["components"]] == [2]


def test_real_roles_of_the_reference_run_want_its_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "submit", "glm5_swe", "-c", "h200-28") == 2
    err = capsys.readouterr().err
    assert "models/GLM-5 holds no model" in err
    assert "hpcrl model get zai-org/GLM-5 --output models/GLM-5" in err


GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
{#- -#}<arg_value>{{ value | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}{# <|user|> <|endoftext|> #}"""


def _write_swe_tasks(directory: Path) -> None:
    """Write a set of two tasks."""
    (directory / "trees/one").mkdir(parents=True)
    (directory / "trees/one/test_a.py").write_text("def test_a(): pass\n")
    splits: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
    write_tasks(
        directory / "tasks.jsonl",
        [
            SweTask(id=split, instruction=split, fail_to_pass=("test_a.py::test_a",), tree="trees/one", split=split)
            for split in splits
        ],
    )


def test_a_dry_run_of_the_reference_run_is_refused_for_what_a_site_brings_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model, the package of tasks, vLLM's environment; with these it shows what would be submitted."""
    Path("tasks").mkdir()
    site = {"extends": "h200-28", "env": {"PYTHONPATH": str(Path("tasks").absolute())}}
    Path("site.yaml").write_text(json.dumps(site))
    dry_run = ("submit", "glm5_swe", "-c", "site.yaml", "--dry-run")

    def refused() -> list[str]:
        assert run(monkeypatch, *dry_run) == 2
        said = capsys.readouterr().err.splitlines()
        first, *lines = [line for line in said if not line.startswith("note: ")]
        found = [line for line in lines if line.startswith("  ") and not line.startswith("    hint")]
        assert first == f"hpcrl: {len(found)} {'problem' if len(found) == 1 else 'problems'}"
        return found

    # all of it is said at once
    model, *programs = refused()
    assert model.endswith(f"model.path: {Path.cwd() / 'models/GLM-5'} holds no model (no config.json)")
    config = json.loads((Path(known.__file__).parent / "configs/GLM-5.json").read_text())
    write_tiny_model(Path("models/GLM-5"), config)
    write_model(Path("models/GLM-5"), GLM_TEMPLATE, eos_token="<|endoftext|>")
    assert refused() == programs
    _write_swe_tasks(Path("tasks/swe"))
    without = [line for line in programs if "tasks.jsonl cannot be read" not in line]
    assert len(without) == len(programs) - 1
    assert refused() == without
    assert any("engine.router.kind: " in line and line.endswith(" has no vllm_router") for line in without)
    Path("site.yaml").write_text(json.dumps({**site, "vllm_python": "/shared/envs/vllm/bin/python"}))
    assert run(monkeypatch, *dry_run) == 0
    shown = capsys.readouterr()
    assert "28 nodes, 224 GPUs" in shown.out
    # of an environment that cannot be seen from here it says so, and of the sandboxes' memory, and nothing else
    *notes, _, last = shown.err.splitlines()
    others = [line for line in notes if "is not visible here" not in line]
    assert [line.partition(" may need ")[0] for line in others] == ["note: sandboxes"]
    assert last == "nothing was started or written (--dry-run)"


def test_dry_run_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = ("--set", "job.payload=probe", "--dry-run")
    assert run(monkeypatch, "submit", "glm5_swe", "-c", "devcluster", *settings) == 0
    assert "28 nodes, 224 GPUs" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_charged_account_and_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SBATCH_ACCOUNT": "chem", "SBATCH_TIMELIMIT": "5", "SBATCH_EXPORT": "NONE"}.items():
        monkeypatch.setenv(name, value)
    settings = ("--set", "job.payload=probe", "--set", "job.qos=long", "--set", "job.sbatch_options=[--nice=5]")
    assert run(monkeypatch, "submit", "glm5_swe", "-c", "roce-h100", *settings, "--dry-run") == 0
    shown = capsys.readouterr()
    assert "serve     account chem ($SBATCH_ACCOUNT), qos long (--set)" in shown.out
    assert "options   --nice=5" in shown.out
    assert [line for line in shown.err.splitlines() if "is ignored" in line] == [
        f"note: SBATCH_{name} is ignored: sbatch gets its options from the plan (hpcrl plan)"
        for name in ("EXPORT", "TIMELIMIT")
    ]
    assert run(monkeypatch, "recipe", "show", "glm5_swe", *settings) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["job.account", '"chem"', "$SBATCH_ACCOUNT"] in rows
    assert run(monkeypatch, "render", "glm5_swe", "-c", "roce-h100", *settings, "-o", "out") == 0
    script = Path("out/job.sbatch").read_text()
    assert script.count("#SBATCH --account=chem\n") == script.count("#SBATCH --qos=long\n") == 3
    assert "research" not in script

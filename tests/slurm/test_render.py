"""Rendered scripts: golden files, shell syntax, quoting, a user's own templates.

``HPCRL_REWRITE_GOLDEN=1 pytest tests/slurm/test_render.py`` writes the golden files again; read the diff.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from plans import APPTAINER, CWD, PYXIS, allocations_for, plan_for

from hpcrl.config.plan import Plan
from hpcrl.config.sbatch_options import option_faults
from hpcrl.errors import UsageError
from hpcrl.slurm.directives import directive
from hpcrl.slurm.launch_arguments import launch_replica, launch_shell
from hpcrl.slurm.render import Script, render_jobs

GOLDEN = Path(__file__).parent / "golden"
CONTAINERS = {"plain": {"kind": "none"}, "pyxis": PYXIS, "apptainer": APPTAINER}
COMMAND = ["/opt/hpcrl/bin/python", "-u", "-P", "-m", "submitit.core._submit", "/runs/night-1/submitit"]


def render(plan: Plan, site: object, **options: object) -> list[Script]:
    settings = {"run_id": "night-1.7f3a", "command": lambda part: COMMAND, "cwd": CWD, **options}
    return render_jobs(plan, site, **settings)  # type: ignore[arg-type]


def launches(plan: Plan) -> str:
    """All launch arguments of a plan, one a line."""
    lines = []
    for group in plan.groups:
        for replica in range(group.replicas):
            module = group.command[: group.command.index("-m") + 2]
            command = [part.replace("{python}", plan.python or "/opt/hpcrl/bin/python") for part in module]
            launch = launch_replica(plan, group, replica, command=command, cwd=CWD, allocations=allocations_for(plan))
            lines.append(shlex.join(launch.argv))
    return "\n".join(lines) + "\n"


def shells(plan: Plan, layout: str) -> str:
    """How `hpcrl shell` enters each role of a plan, on a terminal; one a line."""
    lines = []
    for group in plan.groups:
        at = group.component if layout == "hetjob" else None
        command = [plan.python or "/opt/hpcrl/bin/python", "-m", "role_shell", "7f3a", group.role.value, "0"]
        argv = launch_shell(plan, group, job_id=700, het_group=at, node="n001", command=command, terminal=True)
        lines.append(shlex.join(argv))
    return "\n".join(lines) + "\n"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HPCRL_REWRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs"


def check_shell(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        warnings.warn("shellcheck is not installed: scripts were not checked by it", stacklevel=2)
        return
    subprocess.run([shellcheck, "--shell=bash", path], check=True)


def test_shellcheck_is_there() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("NO SHELLCHECK: scripts are checked by `bash -n` only (apt-get install shellcheck)")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("layout", ["hetjob", "single", "elastic"])
def test_golden(layout: str, container: str) -> None:
    overrides = ("trainer.ranks=2", "trainer.nodes=2", "engine.replicas=2", f"job.layout={layout}")
    plan, site = plan_for("quickstart", "devcluster", *overrides, container=CONTAINERS[container])
    for script in render(plan, site):
        name = f"{layout}-{container}/{script.file_name}"
        check_golden(name, script.text)
        check_shell(GOLDEN / name)
    check_golden(f"{layout}-{container}/launch.txt", launches(plan))
    check_golden(f"{layout}-{container}/shell.txt", shells(plan, layout))


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("glm5_swe", "h200-28"),
        ("glm5_swe", "devcluster"),
        ("glm5_swe", "roce-h100"),
        ("qwen3_30b_a3b", "pyxis-site"),
        ("qwen3_30b_a3b_node", "h200-28"),
    ],
)
def test_golden_of_the_examples(recipe: str, cluster: str) -> None:
    plan, site = plan_for(recipe, cluster, "job.payload=probe")
    (script,) = render(plan, site)
    check_golden(f"{recipe}-{cluster}/job.sbatch", script.text)
    check_shell(GOLDEN / f"{recipe}-{cluster}/job.sbatch")
    check_golden(f"{recipe}-{cluster}/launch.txt", launches(plan))
    check_golden(f"{recipe}-{cluster}/plan.json", plan.model_dump_json(indent=2) + "\n")


@pytest.mark.parametrize(
    ("layout", "spares"),
    [("hetjob", "{trainer: 1, engine: 2}"), ("single", "{trainer: 1, engine: 2}"), ("elastic", "{trainer: 1}")],
)
def test_golden_with_spare_nodes(layout: str, spares: str) -> None:
    overrides = ("trainer.ranks=2", "trainer.nodes=2", "engine.replicas=2", f"job.layout={layout}")
    plan, site = plan_for("quickstart", "devcluster", *overrides, f"job.spare_nodes={spares}")
    for script in render(plan, site):
        name = f"{layout}-spares/{script.file_name}"
        check_golden(name, script.text)
        check_shell(GOLDEN / name)
        # each component of the supervisor's job, or Slurm ends all of them with the one that lacks it
        components = 1 if layout != "hetjob" else 2
        expected = components if script.part == "main" else 0
        assert script.text.count("#SBATCH --no-kill\n") == expected
    # steps of roles name the nodes that they use, as without spare ones
    check_golden(f"{layout}-plain/launch.txt", launches(plan))


def test_same_input_same_bytes() -> None:
    once, again = (render(*plan_for("glm5_swe", "h200-28", "job.payload=probe")) for _ in range(2))
    assert once == again


def test_site_without_requeue_and_exclusive() -> None:
    _, site = plan_for("quickstart", "devcluster")
    capabilities = {**site.capabilities.model_dump(), "requeue": False, "exclusive": False}
    (script,) = render(*plan_for("quickstart", "devcluster", capabilities=capabilities))
    lines = script.text.splitlines()
    # JobRequeue=1 is Slurm's default: silence would mean yes
    assert "#SBATCH --no-requeue" in lines
    assert "#SBATCH --exclusive" not in lines
    assert "#SBATCH --cpus-per-task=8" in lines


def test_failed_nodes_are_excluded() -> None:
    (script,) = render(*plan_for("quickstart", "devcluster"), exclude=("n1", "n[3-4]"))
    assert "#SBATCH --exclude='n1,n[3-4]'" in script.text.splitlines()


MORE = ("--mail-type=END", "--contiguous", "--nice=100")


def test_options_of_the_recipe_reach_every_component_and_every_job() -> None:
    """What Slurm does not pass on from component to component stands in each, the rest once."""
    setting = f"job.sbatch_options=[{', '.join(MORE)}]"
    (script,) = render(*plan_for("quickstart", "devcluster", "job.layout=hetjob", "engine.replicas=2", setting))
    first, second = script.text.split("#SBATCH hetjob\n")
    assert [f"#SBATCH {option}\n" in first for option in MORE] == [True, True, True]
    assert [f"#SBATCH {option}\n" in second for option in MORE] == [False, True, False]
    elastic = render(*plan_for("quickstart", "devcluster", "job.layout=elastic", "engine.replicas=2", setting))
    assert len(elastic) == 3
    for script in elastic:
        assert all(script.text.count(f"#SBATCH {option}\n") == 1 for option in MORE)


def test_no_option_of_hpcrl_may_be_passed_on() -> None:
    """What the scripts say themselves is refused in a recipe: nothing can say it twice."""
    plans = [plan_for("glm5_swe", "h200-28", "job.payload=probe"), plan_for("quickstart", "devcluster")]
    lines = [
        line
        for plan, site in plans
        for script in render(plan, site, exclude=["n1"])
        for line in script.text.splitlines()
    ]
    ours = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH --")}
    assert len(ours) > 15
    for option in ours:
        assert [fault for _, fault in option_faults([option]) if "hpcrl's own" in fault], option


def sbatch_words(line: str) -> str:
    """Read an option as sbatch does: quotes group, a backslash escapes everywhere, # begins a comment."""
    text, quote, escaped = "", "", False
    for sign in line:
        if escaped:
            escaped = False
        elif sign == "\\":
            escaped = True
            continue
        elif quote:
            if sign == quote:
                quote = ""
                continue
        elif sign in "\"'":
            quote = sign
            continue
        elif sign.isspace() or sign == "#":
            break
        text += sign
    return text


@pytest.mark.parametrize(
    "value", ["plain", "two words", "it's", 'a "b"', "c\\d", "$HOME", "`id`", "a#b", "ä ö", "a\tb"]
)
def test_directives_survive_sbatch(value: str) -> None:
    assert sbatch_words(directive(f"--output={value}")) == f"--output={value}"


def test_line_breaks_are_refused() -> None:
    with pytest.raises(UsageError, match="line break"):
        directive("--output=a\n#SBATCH --nodes=1000")


@pytest.mark.parametrize(
    "name", ["it's", 'a "b" c', "$(touch pwned)", "`id`", "semi;colon", "ä ö", "100%j", "a&b|c", "-x"]
)
def test_nasty_paths(name: str, tmp_path: Path) -> None:
    base = tmp_path / name
    base.mkdir()
    plan, site = plan_for("quickstart", "devcluster", run_dir=base / "run")
    printed = base / "printed.txt"
    writer = ["bash", "-c", 'printf "%s\\n" "$@" > "$0"', str(printed), name, "last one"]
    (script,) = render(plan, site, command=lambda part: writer, cwd=base)
    path = base / "job.sbatch"
    path.write_text(script.text)
    check_shell(path)
    # the script's last line runs the command with exactly these words
    subprocess.run(["bash", path], check=True, cwd=base)
    assert printed.read_text().splitlines() == [name, "last one"]
    assert {p.name for p in base.iterdir()} == {"job.sbatch", "printed.txt"}
    output = next(line for line in script.text.splitlines() if "--output" in line).removeprefix("#SBATCH ")
    assert sbatch_words(output).removeprefix("--output=").replace("%%", "%") == str(base / "run" / "main.log")


def test_clean_environment(tmp_path: Path) -> None:
    plan, site = plan_for("quickstart", "devcluster")
    site = site.model_copy(update={"launch": site.launch.model_copy(update={"inherit": ("JUDGE_API_KEY",)})})
    (script,) = render(plan, site, command=lambda part: ["env", "-0"])
    path = tmp_path / "job.sbatch"
    path.write_text(script.text)
    given = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/stale", "SLURM_JOB_ID": "7", "JUDGE_API_KEY": "key"}
    given |= {"LC_ALL": "C.UTF-8", "MULTI": "a\nb", "USER": "ada"}
    out = subprocess.run(["bash", path], env=given, check=True, capture_output=True, text=True).stdout
    found = dict(item.split("=", 1) for item in out.split("\0") if item)
    kept = {"SLURM_JOB_ID", "JUDGE_API_KEY", "LC_ALL", "USER"}
    assert set(found) - {"PWD", "SHLVL", "OLDPWD", "_"} == kept | {"PATH", "HOME", "PYTHONSAFEPATH"}
    assert {name: found[name] for name in kept} == {name: given[name] for name in kept}
    # what the script finds out where it has none, not what these tests have
    assert found["HOME"] == pwd.getpwuid(os.getuid()).pw_dir


def test_modules_are_loaded(tmp_path: Path) -> None:
    init = tmp_path / "it's init.sh"
    init.write_text('module() { LOADED="${LOADED-}$* "; export LOADED; [ "$2" != missing ]; }\necho "$NOT_SET"\n')
    plan, site = plan_for("quickstart", "devcluster")
    launch = site.launch.model_copy(update={"module_init": str(init), "modules": ("cuda/13", "hpcx")})
    site = site.model_copy(update={"launch": launch})
    path = tmp_path / "job.sbatch"
    path.write_text(render(plan, site, command=lambda part: ["printenv", "LOADED"])[0].text)
    out = subprocess.run(["bash", path], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "load cuda/13 load hpcx"
    launch = launch.model_copy(update={"modules": ("missing",)})
    path.write_text(render(plan, site.model_copy(update={"launch": launch}))[0].text)
    assert subprocess.run(["bash", path], check=False, capture_output=True).returncode == 1


def test_own_templates(tmp_path: Path) -> None:
    plan, site = plan_for("quickstart", "devcluster")
    own = tmp_path / "templates"
    own.mkdir()
    (own / "_environment.j2").write_text("# mine: {{ run }}\n")
    (script,) = render(plan, site, templates=own)
    assert "# mine: night-1" in script.text
    assert "#SBATCH --nodes=2" in script.text
    (own / "_environment.j2").write_text("{{ no_such_name }}\n")
    with pytest.raises(UsageError, match="no_such_name"):
        render(plan, site, templates=own)
    with pytest.raises(UsageError, match="is not a directory of templates"):
        render(plan, site, templates=tmp_path / "nowhere")


def test_templates_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, site = plan_for("quickstart", "devcluster")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for base, word in (("config/hpcrl", "user"), (".", "here")):
        directory = tmp_path / base / "templates/sbatch"
        directory.mkdir(parents=True)
        (directory / "_head.j2").write_text(f"# head of {word}\n")
    # the current directory is not asked
    assert "# head of user" in render(plan, site)[0].text
    assert "# head of here" in render(plan, site, templates=tmp_path / "templates/sbatch")[0].text

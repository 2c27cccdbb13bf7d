"""Sinks and notifiers of recipe, profile and the user's own file, together in a plan."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.config.user_file import load_user_notifiers, with_user_notifiers
from hpcrl.errors import ConfigError
from hpcrl.jobplan import make_plan
from hpcrl.submit.prepare import prepare

RECIPE = """\
extends: quickstart
name: mine
job: {payload: probe}
sinks: [{name: curves, sink: tensorboard}, {name: second, sink: tensorboard}]
notify: [{name: chat, notifier: command, parameters: {command: [/bin/true]}}]
"""
SITE = """\
extends: local
name: site
kind: local
sinks: [{name: of-site, sink: tensorboard}]
notify: [{name: pager, notifier: command, parameters: {command: [/bin/true]}}]
"""
#: writes what it is given on its standard input
KEEP = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, with a notifier of the recipe's name and one of its own; the other files lie here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    Path("mine.yaml").write_text(RECIPE)
    Path("site.yaml").write_text(SITE)
    path = tmp_path / "config/hpcrl/notify.yaml"
    path.parent.mkdir(parents=True)
    command = f'{{command: [{sys.executable}, -c, "{KEEP}", {tmp_path}/NAME]}}'
    path.write_text(
        "notify:\n"
        + "".join(
            f"  - {{name: {name}, notifier: command, parameters: {command.replace('NAME', name)}}}\n"
            for name in ("chat", "phone")
        )
    )
    return path


def test_a_plan_has_those_of_all_three_and_the_users_come_last(own: Path) -> None:
    recipe, cluster = load_recipe("mine.yaml"), load_cluster("site.yaml")
    check_rules(recipe, cluster)
    plan = with_user_notifiers(make_plan(recipe.value, cluster.value, "mine", Path("runs/mine")))
    assert [each.name for each in plan.sinks] == ["curves", "second", "of-site"]
    assert [each.name for each in plan.notify] == ["chat", "pager", "phone"]
    # the recipe's takes the place of the user's
    assert plan.notify[0].parameters == {"command": ["/bin/true"]}


def test_a_submit_takes_them(own: Path) -> None:
    prepared = prepare("mine.yaml", "site.yaml", environ=os.environ, cwd=Path.cwd(), name="night", programs=False)
    assert prepared.plan is not None
    assert [each.name for each in prepared.plan.notify] == ["chat", "pager", "phone"]


def test_a_mistake_is_named_with_its_line(own: Path) -> None:
    own.write_text(own.read_text() + "  - {name: third, notifier: webhook, event: [failed]}\n")
    with pytest.raises(ConfigError) as caught:
        load_user_notifiers()
    (finding,) = caught.value.findings
    assert (finding.key, finding.where) == ("notify.2.event", f"{own}:4")


def test_without_a_file_a_plan_stays_what_it_is(own: Path) -> None:
    own.unlink()
    plan = make_plan(load_recipe("quickstart").value, load_cluster("local").value, "mine", Path("runs/mine"))
    assert with_user_notifiers(plan) is plan


def test_a_test_message_is_sent_by_the_users(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "notify", "test", "quickstart"])
    with contextlib.suppress(SystemExit):
        main()
    assert capsys.readouterr().out == "chat: sent\nphone: sent\n"
    assert '"event":"test"' in (tmp_path / "phone").read_text().replace(" ", "")

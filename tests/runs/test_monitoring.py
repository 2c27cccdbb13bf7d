"""Alert rules and the dashboard: Prometheus's own tool reads them, and each name in them is one of ours."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_rules import prometheus_program

from hpcrl.inference.metrics import EngineMetrics, Gauge, Registry
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.telemetry.metrics_text import _ENGINE, _MEASURED, render_metrics
from hpcrl.runs.monitoring.targets import ALERTS, DASHBOARD

CASES = Path(__file__).with_name("alerts_test.yml")
PROMTOOL = prometheus_program("promtool")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="promtool is not there (tools/bootstrap.py --prometheus)")
#: names of Prometheus itself
OWN = {"up"}
_NAME = re.compile(r"\b(?:hpcrl|vllm)[a-z_]*:?[a-z0-9_:]+\b|\bup\b")


def promtool(*words: str, text: str = "") -> str:
    done = subprocess.run([PROMTOOL, *words], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def own_text() -> str:
    class Engine:
        version, load, stuck = 1, 2, False

    gauges = dict.fromkeys(_MEASURED, 1.0)
    return render_metrics(Counters(started=5).as_dict(), gauges, {"engine-0": Engine()})  # type: ignore[dict-item]


def known_names() -> set[str]:
    names = {line.split()[2] for line in own_text().splitlines() if line.startswith("# TYPE ")}
    assert {f"hpcrl_rollouts_engine_{name}" for name in _ENGINE} <= names
    registry = Registry({})
    EngineMetrics(registry)
    names |= {line.split()[2] for line in registry.render().splitlines() if line.startswith("# TYPE ")}
    # gauges of an engine are added by the code that knows them
    source = (Path(__file__).parents[2] / "hpcrl/inference/embedded").rglob("*.py")
    names |= {found for path in source for found in re.findall(r'Gauge\(\s*"(vllm:[a-z_]+)"', path.read_text())}
    source = (Path(__file__).parents[2] / "hpcrl/inference/embedded").rglob("*.py")
    names |= {
        f"{found}_total" for path in source for found in re.findall(r'Counter\(\s*"(vllm:[a-z_]+)"', path.read_text())
    }
    return names | {"hpcrl_part_up"} | OWN


def expressions(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "definition") if isinstance(value.get(key), str)]
        return own + [each for item in value.values() for each in expressions(item)]
    return [each for item in value for each in expressions(item)] if isinstance(value, list) else []


def names_in(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(_NAME.findall(bare))


def test_each_name_is_in_the_code() -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    used = {name for each in expressions(rules) for name in names_in(each)}
    assert len(used) > 10
    assert used - recorded - known_names() == set()
    shown = {name for each in expressions(json.loads(DASHBOARD.read_text())) for name in names_in(each)}
    assert len(shown) > 15
    assert shown - known_names() == set()


def test_each_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert {"summary", "description"} <= set(rule["annotations"]), rule
                assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_dashboard_has_no_panel_twice_and_asks_for_the_run() -> None:
    document = json.loads(DASHBOARD.read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
    assert len(set(places)) == len(places)
    assert all('run=~"$run"' in target["expr"] for panel in document["panels"] for target in panel["targets"])
    assert {panel["datasource"]["uid"] for panel in document["panels"]} == {"${datasource}"}


@needs_promtool
def test_rules_are_valid_and_fire_in_their_cases(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.read_text().replace("RULES", str(ALERTS)))
    assert "SUCCESS" in promtool("test", "rules", str(cases))
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    tested = {
        each["alertname"]
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for each in test["alert_rule_test"]
        if each.get("exp_alerts")
    }
    assert tested == alerts


@needs_promtool
def test_texts_are_clean() -> None:
    assert promtool("check", "metrics", text=own_text()) == ""
    registry = Registry({"model_name": "m", "engine": "0"})
    EngineMetrics(registry)
    registry.add(Gauge("hpcrl_engine_tests", "Tests that run.", lambda: 1.0))
    # names of vLLM's are as vLLM has them: they have a colon, and some a unit in short
    found = promtool_findings(registry.render())
    assert [line for line in found if not line.startswith("vllm:")] == []


def promtool_findings(text: str) -> list[str]:
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line]

"""A real Prometheus scrapes a run by the files that hpcrl writes for it, and evaluates the alert rules."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from free_ports import free_port
from harness import make_run, running
from patience import patience
from prometheus_rules import prometheus_program
from stub_engine import StubEngine

from hpcrl.runs.monitoring import targets
from hpcrl.runs.monitoring.targets import ALERTS, RunTarget, write_targets

PROMETHEUS = prometheus_program("prometheus")
pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="Prometheus is not there (tools/bootstrap.py --prometheus)")


@asynccontextmanager
async def prometheus(directory: Path, configuration: dict[str, Any]) -> AsyncIterator[str]:
    """A server on loopback; gives its URL."""
    port = free_port()
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    with (directory / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            [
                *(PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


async def ask(http: aiohttp.ClientSession, url: str, path: str, **parameters: str) -> Any:
    try:
        async with http.get(f"{url}/api/v1/{path}", params=parameters) as answer:
            return (await answer.json())["data"] if answer.status == 200 else None
    except aiohttp.ClientError:
        return None


async def values(http: aiohttp.ClientSession, url: str, query: str) -> dict[str, float]:
    data = await ask(http, url, "query", query=query)
    found = (data or {}).get("result") or []
    return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found}


async def test_it_scrapes_a_run_and_its_rules_see_a_lost_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = StubEngine(), StubEngine()
    run = make_run(tmp_path)
    async with running(run, one, two) as loop:
        await loop.train(1, 1)
        address = loop.dock_url.removeprefix("http://")
        labels = {"run": "run", "recipe": "r", "cluster": "local"}
        monkeypatch.setattr(targets, "target_of", lambda run: RunTarget(run, address, labels))
        assert write_targets([run], tmp_path / "out")[0].address == address
        jobs = yaml.safe_load((tmp_path / "out" / "scrape.yml").read_text())
        rules = yaml.safe_load(ALERTS.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            if "for" in rule:
                rule["for"] = "1s"  # minutes are tested by promtool, with its clock
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": [str(tmp_path / "rules.yml")],
            **jobs,
        }
        async with prometheus(tmp_path, configuration) as url, aiohttp.ClientSession() as http:
            async with asyncio.timeout(60 * patience()):
                while not await values(http, url, "hpcrl_rollouts_finished_total"):
                    await asyncio.sleep(0.2)
                (labelled,) = await values(http, url, "hpcrl_rollouts_finished_total")
                found = json.loads(labelled)
                assert (found["run"], found["role"], found["replica"]) == ("run", "orchestrator", "0")
                await two.stop()
                firing: set[str] = set()
                while "HpcrlPartDown" not in firing:
                    await asyncio.sleep(0.2)
                    data = await ask(http, url, "alerts")
                    firing = {
                        a["labels"]["alertname"] for a in (data or {"alerts": []})["alerts"] if a["state"] == "firing"
                    }
            rules_now = await ask(http, url, "rules")
            health = {rule["name"]: rule["health"] for group in rules_now["groups"] for rule in group["rules"]}
            assert set(health.values()) == {"ok"}
            down = await values(http, url, 'hpcrl_part_up{role="engine"} == 0')
            assert [json.loads(each)["replica"] for each in down] == ["1"]

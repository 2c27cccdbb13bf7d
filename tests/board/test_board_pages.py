"""What pages of a board contain: lists, logs, allocation, rollouts, and runs that are broken."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import msgspec
import pytest
from board_lab import client_of_board
from page_lab import MEMBERS, SCRIPT, make_page_run, record_ratios
from runs_testing import make_run, write_log, write_status, write_steps

from hpcrl.board import rollout_pages
from hpcrl.board.file_stamps import StampedCache, record_stamp
from hpcrl.board.run_keys import RunKeys
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus
from hpcrl.runs.token_ratios import ratios_path
from hpcrl.runs.views.rollouts import read_ledger


def living() -> ProcessId:
    me = ProcessId.of(os.getpid())
    assert me is not None
    return me


def rows_of(html: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="/run/([^"]+)"', html)


async def test_the_list_has_filters_and_a_search(tmp_path: Path) -> None:
    for age, name in enumerate(("night-1", "night-2", "day-1")):
        run = make_run(tmp_path, name)
        os.utime(run.plan_path, (1000 - age, 1000 - age))
        write_steps(run, 3)
    write_status(RunDir(tmp_path / "night-2"), RunState.COMPLETED)
    day = RunDir(tmp_path / "day-1")
    msgspec.structs.replace(RunRecord.read(day), tags=["swept", "<b>"]).write(day)
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/")
        assert rows_of(html) == ["night-1", "night-2", "day-1"]
        for query, names in {
            "q=NIGHT": ["night-1", "night-2"],
            "q=night+1": ["night-1"],
            "state=COMPLETED": ["night-2"],
            "tag=swept": ["day-1"],
            "tag=%3Cb%3E": ["day-1"],
            "cluster=local&q=day": ["day-1"],
            "cluster=other": [],
            "q=nothing": [],
        }.items():
            _, html, _ = await client.get(f"/?{query}")
            assert rows_of(html) == names, query
            assert "No run matches." in html or names
        assert "<b>" not in html


async def test_a_list_without_runs_says_so(tmp_path: Path) -> None:
    async with client_of_board(tmp_path) as client:
        status, html, _ = await client.get("/")
        assert status == 200
        assert "There is no run" in html
        assert "hpcrl submit RECIPE" in html


async def test_runs_of_one_name_in_two_directories_have_two_keys(tmp_path: Path) -> None:
    for root in ("a", "b"):
        make_run(tmp_path / root, "mine")
    make_run(tmp_path / "a", "odd name <&")
    async with client_of_board(tmp_path / "a", tmp_path / "b") as client:
        _, html, _ = await client.get("/")
        keys = rows_of(html)
        assert len(set(keys)) == 3
        for key in keys:
            assert re.fullmatch(r"[A-Za-z0-9._~-]+", key)
            status, page, _ = await client.get(f"/run/{key}")
            assert status == 200
            assert "no step yet" in page
        status, _, _ = await client.get("/run/mine")
        assert status == 404  # which of the two is not known


@pytest.mark.parametrize("broken", ["run.json", "plan.json", "status.json", "recipe.yaml"])
@pytest.mark.parametrize("content", [b"", b'{"half": ', b"\xff\x00", b"[]"])
async def test_a_damaged_run_hides_no_other_and_ends_in_words(tmp_path: Path, broken: str, content: bytes) -> None:
    for name in ("good", "broken"):
        run = make_run(tmp_path, name)
        write_steps(run, 3)
        write_status(run, RunState.COMPLETED)
    (tmp_path / "broken" / broken).write_bytes(content)
    async with client_of_board(tmp_path) as client:
        status, html, _ = await client.get("/")
        assert status == 200
        assert "good" in rows_of(html)
        assert "broken" in html
        for page in ("", "/logs", "/nodes", "/rollouts"):
            status, html, _ = await client.get(f"/run/broken{page}")
            assert status in (200, 400, 404, 503), html
            assert "defect" not in html
            assert "Traceback" not in html


async def test_a_run_that_was_removed_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    async with client_of_board(tmp_path) as client:
        assert (await client.get("/run/mine"))[0] == 200
        run.path.rename(tmp_path / "other")
        status, html, _ = await client.get("/run/mine")
        assert status == 404
        assert "there is no run mine" in html
        assert (await client.get("/run/other"))[0] == 200


async def test_the_list_is_sent_again_each_minute_and_not_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "mine")
    write_status(run, RunState.RUNNING, supervisor=living())
    created_s = observe(run).created_at_s
    status = RunStatus.read(run)
    assert status is not None
    msgspec.structs.replace(status, started_at_s=created_s).write(run)
    answers: list[tuple[int, str, dict[str, str]]] = []
    async with client_of_board(tmp_path) as client:
        for age_s in (1, 58, 61, 118, 121):
            monkeypatch.setattr(time, "time", lambda age_s=age_s: created_s + age_s)
            tag = answers[-1][2]["ETag"] if answers else ""
            answers.append(await client.get("/", **{"If-None-Match": tag}))
    assert [status for status, _, _ in answers] == [200, 304, 200, 304, 200]


async def test_pages_are_sent_again_only_after_a_change(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    write_status(run, RunState.RUNNING, supervisor=living())
    write_steps(run, 3)
    write_log(run, "one\n")
    async with client_of_board(tmp_path) as client:
        for path in ("/run/mine", "/run/mine/logs", "/run/mine/nodes", "/"):
            status, html, headers = await client.get(path)
            assert status == 200, html
            tag = headers["ETag"]
            assert (await client.get(path, **{"If-None-Match": tag}))[0] == 304, path
            assert float(headers["X-Next-Look-S"]) >= 0
        _, _, headers = await client.get("/run/mine")
        write_steps(run, 4)
        status, html, _ = await client.get("/run/mine", **{"If-None-Match": headers["ETag"]})
        assert status == 200
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
        assert {len(line["x"]) for plot in data["plots"] for line in plot["lines"] if plot["id"] == "loss"} == {4}
        # the same number of bytes, by another file of the same name
        _, _, headers = await client.get("/run/mine/logs")
        write_log(run, "two\n")
        status, html, _ = await client.get("/run/mine/logs", **{"If-None-Match": headers["ETag"]})
        assert (status, "two" in html) == (200, True)


def test_a_stamp_changes_with_each_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    write_steps(run, 3)
    stamps = {record_stamp(run)}
    (run.events_dir / "0001-new.jsonl").write_text("")
    stamps.add(record_stamp(run))
    (run.events_dir / "0001-new.jsonl").write_text("{}")
    stamps.add(record_stamp(run))
    os.utime(run.events_dir / "0001-new.jsonl", ns=(1, 1))
    stamps.add(record_stamp(run))
    assert len(stamps) == 4
    (run.path / "status.json").write_text("{}")
    assert record_stamp(run) in stamps


def test_a_kept_value_is_made_again_for_another_stamp_and_the_oldest_goes() -> None:
    cache, made = StampedCache[int](2), list[str]()

    def make(name: str) -> int:
        made.append(name)
        return len(made)

    assert cache.get("a", "1", lambda: make("a")) == cache.get("a", "1", lambda: make("a")) == 1
    assert cache.get("a", "2", lambda: make("a")) == 2
    cache.get("b", "1", lambda: make("b"))
    cache.get("a", "2", lambda: make("a"))
    cache.get("c", "1", lambda: make("c"))
    cache.get("b", "1", lambda: make("b"))
    assert made == ["a", "a", "b", "c", "b"]
    with pytest.raises(ZeroDivisionError):
        cache.get("d", "1", lambda: 1 // 0)
    assert cache.get("d", "1", lambda: 7) == 7


async def test_logs_by_role_with_a_search(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    write_status(run, RunState.COMPLETED)
    write_log(run, "".join(f"engine line {i} {SCRIPT}\n" for i in range(400)))
    write_log(run, "trainer (line) one\nother\n", role="trainer")
    write_log(run, "second\n", replica=1)
    os.mkfifo(run.log_path(1, "engine", 2, 0))  # opening it would block
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/run/mine/logs")
        assert html.count('class="who"') == 200
        assert SCRIPT not in html
        assert "&lt;script&gt;" in html
        _, html, _ = await client.get("/run/mine/logs?role=trainer")
        assert html.count('class="who">trainer 0<') == html.count('class="who"') == 2
        _, html, _ = await client.get("/run/mine/logs?role=engine/1")
        assert html.count('class="who">engine 1<') == html.count('class="who"') == 1
        # words, not an expression; in any case
        _, html, _ = await client.get("/run/mine/logs?q=(LINE)")
        assert html.count("<mark>(line)</mark>") == 1
        assert html.count('class="who"') == 1
        _, html, _ = await client.get("/run/mine/logs?q=nowhere")
        assert "No line has these words." in html
        for query in ("role=router", "attempt=7", "attempt=x"):
            status, html, _ = await client.get(f"/run/mine/logs?{query}")
            assert status == 400
            assert "cannot be shown" in html


async def test_long_logs_are_read_from_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.board.log_page.MOST_BYTES", 100_000)
    run = make_run(tmp_path, "mine")
    write_status(run, RunState.COMPLETED)
    write_log(run, "first needle\n" + "hay\n" * 50_000 + "last needle\n")
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/run/mine/logs?q=needle")
        assert "last <mark>needle</mark>" in html
        assert "first <mark>" not in html
        assert "bytes before them were not" in html
        write_log(run, "x" * 3_000_000 + "\nend\n")  # one line without a break
        _, html, _ = await client.get("/run/mine/logs")
        assert "end" in html
        assert len(html) < 50_000


async def test_the_allocation_has_nodes_roles_and_states(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    write_status(run, RunState.RUNNING, supervisor=living())
    status = RunStatus.read(run)
    assert status is not None

    def replica(role: str, number: int, state: ComponentState, *nodes: str, **more: object) -> ComponentStatus:
        return ComponentStatus(role=role, replica=number, state=state, nodes=list(nodes), **more)  # type: ignore[arg-type]

    components = [
        replica("engine", 0, ComponentState.READY, "n9"),
        replica("engine", 1, ComponentState.READY, "n10"),
        replica("engine", 2, ComponentState.RESTARTING, "n10", restarts=1, last_failure="<i>killed</i>"),
        replica("trainer", 0, ComponentState.READY, "n1", "n2"),
        replica("orchestrator", 0, ComponentState.FAILED, "n1"),
    ]
    msgspec.structs.replace(status, components=components).write(run)
    engines = [
        EngineView(replica=0, version=5, running=3),
        EngineView(replica=1, version=5, answers=False, why="no answer"),
    ]
    FleetView(time_s=time.time(), newest=5, in_flight=3, limit=8, engines=engines).write(run, 1)
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/run/mine/nodes")
        rows = dict(re.findall(r'<tr><th scope="row">(n\d+)</th>(.*?)</tr>', html, re.S))
        assert list(rows) == ["n1", "n2", "n9", "n10"]
        chips = {node: re.findall(r'chip (\w+)" title="([^"]*)">([^<]*)<', cells) for node, cells in rows.items()}
        assert chips["n9"] == [("good", "engine 0: healthy; version 5; 3 running", "0 healthy")]
        assert [(kind, text) for kind, _, text in chips["n10"]] == [("bad", "1 suspect"), ("busy", "2 restarting")]
        assert "no answer" in chips["n10"][0][1]
        assert [(kind, text) for kind, _, text in chips["n1"]] == [("good", "0 ready"), ("bad", "0 failed")]
        assert chips["n2"] == [("good", "trainer 0: ready", "0 ready")]
        assert "<i>" not in html
        assert "Spare nodes" not in html
        lost = {"n3": "the node <i>went</i> down"}
        msgspec.structs.replace(status, components=components, spare_nodes=["n4", "n5"], lost_nodes=lost).write(run)
        _, html, _ = await client.get("/run/mine/nodes")
        assert "<p>n4, n5: idle, each takes the place of a node that is lost.</p>" in html
        assert "<strong>n3</strong> is not used any more in this job: the node &lt;i&gt;went" in html
        msgspec.structs.replace(status, components=components, lost_nodes=lost).write(run)
        _, html, _ = await client.get("/run/mine/nodes")
        assert "<p>None is left.</p>" in html


async def test_rollouts_have_filters_parts_and_pages_of_their_own(tmp_path: Path) -> None:
    make_page_run(tmp_path, "mine", steps=12)
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/run/mine/rollouts")
        assert "144 of 144 finished rollouts" in html
        ids = re.findall(r'<th scope="row"><a href="/run/mine/rollouts/([^"]+)"', html)
        assert len(ids) == 100
        assert ids[0] == "47/2"
        assert "page=1" in html
        _, html, _ = await client.get("/run/mine/rollouts?page=1")
        assert len(re.findall(r'<th scope="row">', html)) == 44
        _, html, _ = await client.get("/run/mine/rollouts?step=2")
        assert "12 of 144" in html
        assert (await client.get("/run/mine/rollouts?environment=nope"))[0] == 400
        assert (await client.get("/run/mine/rollouts?state=nope"))[0] == 400
        assert (await client.get("/run/mine/rollouts?step=-1"))[0] == 400
        _, html, _ = await client.get(f"/run/mine/rollouts/47/{MEMBERS - 1}")
        assert SCRIPT not in html
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
        (rollout,) = data["runs"][0]["rollouts"]
        assert SCRIPT in "".join(token[0] for token in rollout["turns"][0]["tokens"])
        assert (await client.get("/run/mine/rollouts/470/0"))[0] == 400
        assert (await client.get("/run/mine/rollouts/x/0"))[0] == 404


async def test_a_rollout_offers_mismatch_once_it_is_recorded(tmp_path: Path) -> None:
    run = make_page_run(tmp_path, "mine", steps=12)
    option = '<option value="mismatch">'
    held = next(each for each in read_ledger(run).rollouts if each.id == (47, 0))
    async with client_of_board(tmp_path) as client:
        _, html, headers = await client.get("/run/mine/rollouts/47/0")
        assert option not in html
        wanted = record_ratios(run, held, [0.5, -0.25])
        status, html, _ = await client.get("/run/mine/rollouts/47/0", **{"If-None-Match": headers["ETag"]})
        assert status == 200
        assert option in html
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
        assert [token[3] for token in data["runs"][0]["rollouts"][0]["turns"][0]["tokens"]] == wanted
        _, html, _ = await client.get("/run/mine/rollouts/47/1")
        assert option not in html
        _, html, _ = await client.get("/run/mine/rollouts")
        assert re.search(r'href="/run/mine/rollouts/47/0">words, [a-z ]+ \(', html)
        # damaged records end no page
        ratios_path(run, 12).write_bytes(b"{")
        for path in ("/run/mine/rollouts/47/0", "/run/mine/rollouts"):
            status, html, _ = await client.get(path)
            assert (status, option in html) == (200, False)


async def test_files_of_another_user_start_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_page_run(tmp_path, "mine", steps=11)
    asked = []
    monkeypatch.setattr("hpcrl.analysis.spoken_turns._ask", lambda run, turns: asked.append(run) or [])
    assert run.is_own
    monkeypatch.setattr(os, "geteuid", lambda: run.plan_path.stat().st_uid + 1)
    assert not run.is_own
    async with client_of_board(tmp_path) as client:
        status, html, _ = await client.get("/run/mine/rollouts/1/0")
        assert status == 200
        assert "another user" in html
    assert asked == []


async def test_a_large_ledger_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_page_run(tmp_path, "mine", steps=11)
    monkeypatch.setattr(rollout_pages, "MOST_LEDGER_BYTES", 1000)
    async with client_of_board(tmp_path) as client:
        status, html, _ = await client.get("/run/mine/rollouts")
        assert status == 400
        assert "hpcrl rollouts ls mine" in html


async def test_runs_side_by_side(tmp_path: Path) -> None:
    for name, gain in (("one", 0.0), ("two", 0.2)):
        make_page_run(tmp_path, name, steps=11, gain=gain)
    make_run(tmp_path, "empty")
    async with client_of_board(tmp_path) as client:
        _, html, _ = await client.get("/compare?run=one&run=two&run=one")
        assert "A  one  COMPLETED" in html
        assert "more than noise?" in html
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
        assert [run["name"] for run in data["runs"]] == ["one", "two"]
        for query in ("", "?run=one", "?run=one&run=empty", "?" + "&".join(f"run={i}" for i in range(7))):
            status, html, _ = await client.get(f"/compare{query}")
            assert status == 400, query
        assert (await client.get("/compare?run=one&run=nope"))[0] == 404


def test_keys_are_those_of_the_list(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    keys = RunKeys([str(tmp_path)])
    assert keys.find("mine").path == run.path
    assert set(keys.all()) == {"mine"}

"""Pages are handed on and looked at by others: no secret that a program or a policy has written stands in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import page_lab
import pytest
from board_lab import client_of_board
from page_lab import make_page_run
from runs_testing import write_log

from hpcrl.analysis.page.write_html import write_page
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretScan

HUB = "hf_" + "a1B2" * 9
OWN = "the word of a sink"
ADDRESS = "ntfy-me://somewhere/else"
SAID = f"take {HUB} or {OWN} now"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(page_lab, "SCRIPT", SAID)
    run = make_page_run(tmp_path / "runs", "mine", steps=12)
    (tmp_path / "word").write_text(f"{OWN}\n")
    (tmp_path / "urls").write_text(f"{ADDRESS} {ADDRESS}2\n")
    sinks = [{"name": "own", "sink": "a.b:C", "parameters": {"nested": {"token_file": str(tmp_path / "word")}}}]
    notify = [{"name": "n", "notifier": "apprise", "parameters": {"urls_file": str(tmp_path / "urls")}}]
    plan = run.plan()
    more = type(plan).model_validate_json(json.dumps(plan.model_dump(mode="json") | {"sinks": sinks, "notify": notify}))
    run.write_configuration(run.recipe(), run.cluster(), more)
    # a colour stands in the middle of one
    write_log(run, f"header {(run.path / 'token').read_text()}\n{HUB[:9]}\x1b[1m{HUB[9:]} for {ADDRESS}\n", attempt=2)
    return run


def is_clean(text: str) -> bool:
    return not [word for word in (HUB, OWN, ADDRESS, HUB[:12], HUB[-12:]) if word in text]


def test_a_page_has_no_secrets(run: RunDir, tmp_path: Path) -> None:
    text = write_page([run], tmp_path / "report.html").read_text()
    assert is_clean(text)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert any("[secret]" in mark["what"] for mark in data["runs"][0]["marks"])
    turns = [turn for rollout in data["runs"][0]["rollouts"] for turn in rollout["turns"]]
    coloured = ["".join(token[0] for token in turn["tokens"]) for turn in turns]
    pieces = ["".join(text for _, text in turn["sampled"]) for turn in turns]
    # each character is a token here
    assert "take [secret] or [secret] now<|end|>" in coloured
    assert "take [secret] or [secret] now<|end|>" in pieces


async def test_a_board_has_no_secrets(run: RunDir) -> None:
    token = (run.path / "token").read_text()
    best = f"/run/mine/rollouts/47/{page_lab.MEMBERS - 1}"
    async with client_of_board(run.path.parent) as client:
        paths = ["/", *(f"/run/mine{part}" for part in ("", "/nodes", "/rollouts", "/logs"))]
        for path in (*paths, best):
            status, html, _ = await client.get(path)
            assert status == 200, path
            assert is_clean(html), path
            assert token not in html
        _, html, _ = await client.get("/run/mine/logs")
        assert "[secret] for [secret]" in html
        # marks of a search divide a line
        _, html, _ = await client.get("/run/mine/logs?q=a1b2")
        assert "<mark>" not in html


def test_parts_of_a_secret_are_removed_wherever_it_is_divided() -> None:
    scan = SecretScan([("a word", "geheim-ü-wort")])
    text = f"a {HUB} b geheim-ü-wort {HUB} c"
    for begin in range(len(text) + 1):
        for end in range(begin, len(text) + 1):
            parts = scan.cleaned_parts([text[:begin], text[begin:end], text[end:]])
            assert len(parts) == 3
            assert "".join(parts) == "a [secret] b [secret] [secret] c"
    assert scan.cleaned_parts(["no", "", "\ud800"]) == ["no", "", "\ud800"]


def test_a_key_in_the_lines_of_a_log_is_found_as_a_whole() -> None:
    key = ["-----BEGIN PRIVATE KEY-----", "Q1w2E3r4" * 8, "A1s2" * 3, "-----END PRIVATE KEY-----"]
    assert SecretScan().cleaned(["before", *key, "after"]) == ["before", "[secret]", "", "", "", "after"]
    # the lines that are shown begin within it
    for begin in (1, 2):
        assert SecretScan().cleaned(("\n".join(key[begin:]),)) == ("[secret]",)
        assert SecretScan().cleaned([*key[begin:], "after"])[0] == "[secret]"
        assert not {*SecretScan().cleaned([*key[begin:], "after"])} & {*key}
    assert SecretScan().cleaned(["a line\n", f"x {HUB}", ""]) == ["a line\n", "x [secret]", ""]


def test_plain_values_are_cleaned_and_the_same_object_without_a_secret() -> None:
    value = {"a": [1.0, (f"x {HUB}", None)], "b": {HUB: "kept"}}
    assert SecretScan().cleaned(value) == {"a": [1.0, ("x [secret]", None)], "b": {HUB: "kept"}}
    harmless = {"a": [1.0, ("x", None)]}
    assert SecretScan().cleaned(harmless) is harmless


@pytest.mark.parametrize("line_end", ["\n", "\\n", "\r\n"])
def test_a_private_key_is_removed_with_its_lines(line_end: str) -> None:
    lines = ["A1b2" * 16, "C3d4" * 16, "E5=="]
    begin, end = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"
    text = "before " + line_end.join([begin, *lines, end]) + " after"
    assert SecretScan().redacted(text.encode())[0] == b"before [secret] after"


@pytest.mark.parametrize("text", ["a-" * 300_000, "eyJ-" * 200_000, "x://" * 200_000, "A_" * 300_000, "sk-" * 200_000])
def test_texts_of_others_cannot_make_a_scan_endless(text: str) -> None:
    # a form that looks from each place to the end would take minutes: the limit of the test ends it
    assert not list(SecretScan().kinds(text.encode())) or text.startswith("sk-")

"""``hpcrl rollouts``: what somebody who doubts a run can look at and prove."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from numpy.typing import NDArray

from hpcrl.cli.main import main
from hpcrl.config.load import load_recipe
from hpcrl.dock.ledger.digest import digest_of
from hpcrl.dock.ledger.entries import Dropped, Finished, Kept, Taken
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.routes import RoutedExperts
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.records import Rollout, Turn, encode_rollout
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views import rollout_export, rollout_parquet

Command = Callable[..., tuple[str, str]]


def make_rollout(member: int, tokenizer: ChatTokenizer) -> Rollout:
    said = tokenizer.render_ids([{"role": "user", "content": "reverse cat"}], add_generation_prompt=True)
    sampled = [*tokenizer.encode("tac"), tokenizer.eos_token_id]
    ids, mask = [*said, *sampled], [0] * len(said) + [1] * len(sampled)
    return Rollout(
        member=member,
        token_ids=np.asarray(ids, np.int32),
        sampled=np.asarray(mask, np.uint8),
        logprobs=np.asarray(mask, np.float32) * -0.25,
        versions=np.full(len(ids), 2, np.int32),
        reward=0.5 * member,
        parts={"exact": float(member)},
        seconds=1.5,
        ended_s=100.0 + member,
        turns=[Turn(len(said), len(sampled), 0.5, 2.0)],
    )


def finish(log: RolloutLog, group: int, rollout: Rollout) -> None:
    def entry(place: Any) -> Finished:
        return Finished(
            group=group,
            member=rollout.member,
            environment="words" if group % 2 else "sums",
            prompt_index=7 * group,
            reward=rollout.reward,
            tokens=len(rollout.token_ids),
            sampled_tokens=rollout.sampled_tokens,
            first_version=0,
            last_version=0,
            ended_s=rollout.ended_s,
            payload=place,
        )

    log.finish(*encode_rollout(rollout), entry)


def record_step(run: RunDir, step: int, rollouts: list[tuple[int, int]] | None) -> None:
    """What the trainer writes of a step; None: one of an earlier version, which does not say which rollouts it had."""
    numbers = ("reward_mean", "reward_std", "loss", "entropy", "mismatch_kl", "masked_share", "ess", "staleness_mean")
    others = ("time_s", "staleness_max", "tokens", "sampled_tokens", "tokens_per_s", "grad_norm", "learning_rate")
    tables = ("reward_by_env", "reward_parts", "mismatch_kl_by_lag", "staleness_histogram", "phases_s", "rollouts")
    values: dict[str, Any] = {**dict.fromkeys((*numbers, *others), 1), **{name: {} for name in tables}}
    digest = None if rollouts is None else digest_of(rollouts)
    metrics = MetricsWriter(run, 1)
    metrics.write(StepRecord(attempt=1, step=step, rollouts_digest=digest, **values))
    metrics.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Groups 0 and 1 are trained, 2 was dropped, 3 waits, 4 is in flight."""
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.record_path.write_text("{}")
    write_character_tokenizer(tmp_path / "model")
    recipe = load_recipe("quickstart", (f"model.path={tmp_path / 'model'}",)).value
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    tokenizer = ChatTokenizer(tmp_path / "model")
    log = RolloutLog(run.rollouts_dir, attempt=1, restored=0, limit_s=5.0)
    for group in range(5):
        for member in range(2 if group < 4 else 1):
            finish(log, group, make_rollout(member, tokenizer))
        if group < 4:
            log.append(Kept(group=group))
    for step in (1, 2):
        log.append(Taken(step=step, groups=[(step - 1, [0, 1])]))
        known = {"group": step - 1, "text": "kept text", "turns": [], "parts": {}, "seconds": 1.0}
        lines = [{**known, "member": member} for member in (0, 1)]
        record_step(run, step, [(step - 1, 1), (step - 1, 0)])
        (run.rollouts_dir / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log.append(Dropped(group=2, members=[0, 1], why="too old", step=2))
    log.close()
    return run


@pytest.fixture
def rollouts(run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    def call(command: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        argv = ["hpcrl", "rollouts", command, "mine", *arguments, "--runs-root", str(run.path.parent)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        assert int(exit_info.value.code or 0) == code, err
        return out, err

    return call


def test_verify_accounts_for_every_rollout(rollouts: Command) -> None:
    out, _ = rollouts("verify")
    assert out.splitlines() == [
        "9 rollouts finished in 1 attempt",
        "          4  trained, each in one of 2 steps",
        "          2  of these steps compared with what the trainer itself recorded",
        "          2  dropped: too old",
        "          3  waiting for a step",
        "nothing was lost, and nothing trained twice",
    ]
    document = json.loads(rollouts("verify", "--json")[0])
    assert (document["trained"], document["dropped"], document["problems"]) == (4, {"too old": 2}, [])


def test_verify_says_what_was_read_from_disk(run: RunDir, rollouts: Command) -> None:
    for rank, count in ((0, 3), (1, 2)):
        events = EventWriter(run, attempt=1, writer=f"trainer-0.{rank}")
        events.emit("rollouts.read_from_disk", step=1, rollouts=count, why="")
        events.close()
    line = "          5  rollouts were read by a rank from the shared filesystem, not from memory"
    assert line in rollouts("verify")[0].splitlines()
    assert json.loads(rollouts("verify", "--json")[0])["from_disk"] == 5


def test_verify_sees_a_batch_that_had_other_rollouts(run: RunDir, rollouts: Command) -> None:
    # the newest step is in the ledger before its file is written: an earlier attempt's may be there
    newest = run.rollouts_dir / "step-000002.jsonl"
    newest.write_text(newest.read_text().replace('"member": 1', '"member": 0'))
    assert "note: step 2: batch and ledger differ in 1/1" in rollouts("verify")[0]
    path = run.rollouts_dir / "step-000001.jsonl"
    path.write_text(path.read_text().replace('"member": 1', '"member": 0'))
    out, _ = rollouts("verify", code=1)
    assert "problem: step 1: batch and ledger differ in 0/1" in out
    path.unlink()
    out, _ = rollouts("verify")
    assert "note: 1 steps have no file of consumed rollouts" in out


def test_verify_sees_what_the_trainer_says_otherwise(run: RunDir, rollouts: Command) -> None:
    """The files that the orchestrator wrote agree with its ledger: the trainer's record alone tells."""
    problem = "problem: step 2: the trainer recorded other rollouts than the ledger"
    for other in ([(1, 0), (3, 1)], [(1, 0)], [(1, 0), (1, 1), (1, 1)], []):
        record_step(run, 2, other)
        out, _ = rollouts("verify", code=1)
        assert problem in out
        assert "step 1" not in out
    record_step(run, 2, [(1, 0), (1, 1)])
    assert json.loads(rollouts("verify", "--json")[0])["compared"] == 2


def test_verify_names_steps_without_a_record_of_the_trainer(run: RunDir, rollouts: Command) -> None:
    record_step(run, 2, None)
    out, _ = rollouts("verify")
    assert "1  of these steps compared" in out
    assert "note: of 1 steps the trainer has not recorded which rollouts they were trained on" in out


def test_verify_sees_a_step_that_is_not_in_the_ledger(run: RunDir, rollouts: Command) -> None:
    path = run.rollouts_dir / "ledger" / "000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"step":1,' not in line or b"taken" not in line))
    out, _ = rollouts("verify", code=1)
    assert "problem: step 2 was taken after step 0" in out
    assert "problem: step 1 was taken, and no rollout is in it" in out


def test_verify_reads_what_waits(run: RunDir, rollouts: Command) -> None:
    (payload,) = (run.rollouts_dir / "payload").iterdir()
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    out, _ = rollouts("verify", code=1)
    assert "problem: rollout 4/0 waits, and cannot be read: the content of 000001-000001.columns at byte" in out
    assert "problem" not in rollouts("verify", "--ledger-only")[0]


def test_ls(rollouts: Command) -> None:
    out, _ = rollouts("ls")
    assert out.startswith("rollout  environment  reward")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1", "3/0", "3/1", "4/0"]
    assert rows[3][1:3] == ["words", "0.500"]
    assert "trained in step 2" in out
    assert "dropped: too old" in out
    out, err = rollouts("ls", "--sort", "reward", "-n", "2")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["2/1", "3/1"]
    assert "the last 2 of 9 (-n 0: all)" in err
    items = json.loads(rollouts("ls", "--state", "trained", "--environment", "words", "--json")[0])["rollouts"]
    assert [(item["id"], item["staleness"]) for item in items] == [("1/0", 1), ("1/1", 1)]
    assert len(json.loads(rollouts("ls", "--step", "1", "--json")[0])["rollouts"]) == 2
    assert rollouts("ls", "--step", "9") == ("", "no rollout matches\n")
    assert "hint: there are sums, words" in rollouts("ls", "--environment", "poker", code=2)[1]
    assert "hint: waiting, trained, dropped" in rollouts("ls", "--state", "lost", code=2)[1]


def test_show_has_turns_and_falls_back_on_the_text(run: RunDir, rollouts: Command) -> None:
    out, _ = rollouts("show", "3/1")
    assert "reverse cat" in out
    assert "turn 1: sampled, 4 tokens in 2.0 s, version 2, mean log-probability -0.250" in out
    assert [line.split(maxsplit=1) for line in out.splitlines()[-2:]] == [["text", "tac"], ["control", "<|end|>"]]
    assert ["said", "reverse cat"] in [line.split(maxsplit=1) for line in out.splitlines()]
    for path in (run.rollouts_dir / "payload").iterdir():
        path.unlink()
    out, _ = rollouts("show", "1/0")
    assert "no longer kept" in out
    assert "kept text" in out
    assert "hint: hpcrl rollouts ls shows their names" in rollouts("show", "77/0", code=2)[1]


def test_export(tmp_path: Path, rollouts: Command) -> None:
    lines, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    rollouts("export", "--output", str(lines))
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["id"] for row in rows][:3] == ["0/0", "0/1", "1/0"]
    assert len(rows[0]["token_ids"]) == rows[0]["tokens"]
    rollouts("export", "--output", str(table), "--state", "trained")
    back = pq.read_table(table).to_pylist()
    assert [row["id"] for row in back] == ["0/0", "0/1", "1/0", "1/1"]
    assert back[1]["token_ids"] == rows[1]["token_ids"]
    assert back[1]["parts.exact"] == 1.0
    assert "exists already" in rollouts("export", "--output", str(table), code=2)[1]


def test_an_export_has_the_same_columns_in_every_row_whether_tokens_are_kept_or_not(
    tmp_path: Path, run: RunDir, rollouts: Command
) -> None:
    for step in (1, 2):
        path = run.rollouts_dir / f"step-{step:06d}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line |= {"advantage": line["member"] - 0.5, "parts": {"exact": float(line["member"])}}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    early, late, table = tmp_path / "early.jsonl", tmp_path / "late.jsonl", tmp_path / "late.parquet"
    rollouts("export", "--output", str(early))
    for path in (run.rollouts_dir / "payload").iterdir():
        path.unlink()
    rollouts("export", "--output", str(late), "--state", "trained")
    rollouts("export", "--output", str(table), "--state", "trained")
    rows = [json.loads(line) for line in early.read_text().splitlines()]
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert {"text", "tokens", "advantage", "group", "member", "reward", "parts.exact"} <= rows[0].keys()
    assert [row["advantage"] for row in rows] == [-0.5, 0.5, -0.5, 0.5, None, None, None, None, None]
    assert [row["parts.exact"] for row in rows] == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert all("reverse cat" in row["text"] and row["token_ids"] for row in rows)
    # long afterwards tokens are gone, and nothing else of what was trained
    arrays = {"token_ids", "sampled", "logprobs", "versions", "routed_experts", "routed_present", "problem"}
    arrays |= {"starts", "shared"}
    for back in ([json.loads(line) for line in late.read_text().splitlines()], pq.read_table(table).to_pylist()):
        assert [row["text"] for row in back] == ["kept text"] * 4
        assert all(row["token_ids"] is None and row["tokens"] > 0 for row in back)
        kept = rows[0].keys() - arrays - {"text", "turns", "seconds"}
        assert [{name: row[name] for name in kept} for row in back] == [
            {name: row[name] for name in kept} for row in rows[:4]
        ]


def strict(text: str) -> Any:
    """Read JSON as others do, which knows no NaN."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_in_exports_and_end_no_command(
    tmp_path: Path, run: RunDir, rollouts: Command
) -> None:
    """Those of earlier versions, and log-probabilities of an engine."""
    odd = msgspec.structs.replace(make_rollout(0, ChatTokenizer(tmp_path / "model")), reward=math.nan)
    odd.parts["exact"] = math.inf
    odd.logprobs[-1] = -math.inf
    log = RolloutLog(run.rollouts_dir, attempt=2, restored=2, limit_s=5.0)
    finish(log, 5, odd)
    finish(log, 6, make_rollout(0, ChatTokenizer(tmp_path / "model")))
    log.close()
    path = tmp_path / "out.jsonl"
    rollouts("export", "--output", str(path))
    rows = {row["id"]: row for row in map(strict, path.read_text().splitlines())}
    assert (rows["5/0"]["reward"], rows["5/0"]["parts.exact"], rows["5/0"]["logprobs"][-1]) == (None, None, None)
    assert rows["5/0"]["logprobs"][-2] == -0.25
    assert "6/0" in rows  # an entry with null is not an end of the ledger
    assert strict(rollouts("show", "5/0", "--json")[0])["reward"] is None
    assert "5/0" in rollouts("show", "5/0")[0]
    assert "5/0" in rollouts("ls", "--sort", "reward")[0]
    assert strict(rollouts("ls", "--json")[0])["rollouts"]
    assert "11 rollouts finished in 2 attempts" in rollouts("verify")[0]


def test_a_damaged_line_of_consumed_rollouts_is_a_problem_and_ends_no_command(
    tmp_path: Path, run: RunDir, rollouts: Command
) -> None:
    path = run.rollouts_dir / "step-000001.jsonl"
    for damage in (b"7\n", b'{"group": NaN}\n', b"\xff{\n", b'{"group": 0}\n', b"[" * 100_000 + b"\n"):
        whole = path.read_bytes()
        path.write_bytes(damage + whole)
        assert (
            "problem: the file of consumed rollouts of step 1 cannot be read: line 1" in rollouts("verify", code=1)[0]
        )
        for payload in (run.rollouts_dir / "payload").iterdir():
            payload.rename(payload.with_suffix(".away"))
        assert "kept text" in rollouts("show", "0/0")[0]
        for payload in (run.rollouts_dir / "payload").iterdir():
            payload.rename(payload.with_suffix(".columns"))
        path.write_bytes(whole)


def add_routed(run: RunDir, shapes: list[tuple[int, int, int]]) -> list[NDArray[Any]]:
    """A rollout more for each shape of routed experts, `5/0` and so on; its last token has no row."""
    numbers, found = np.random.default_rng(7), []
    log = RolloutLog(run.rollouts_dir, attempt=2, restored=2, limit_s=5.0)
    for group, shape in enumerate(shapes, 5):
        tokens = shape[0]
        experts = numbers.integers(0, 300 if group % 2 else 200, shape).astype(np.uint16 if group % 2 else np.uint8)
        sampled = np.ones(tokens, np.uint8)
        sampled[0] = 0
        present = np.ones(tokens, np.uint8)
        present[-1] = 0
        rollout = Rollout(
            member=0,
            token_ids=np.full(tokens, 5, np.int32),
            sampled=sampled,
            logprobs=numbers.standard_normal(tokens).astype(np.float32) * sampled,
            versions=np.full(tokens, 2, np.int32),
            reward=1.0,
            parts={},
            seconds=1.5,
            ended_s=200.0,
            turns=[Turn(1, tokens - 1, 0.5, 2.0)],
            routed_experts=RoutedExperts.of(experts, present),
        )
        finish(log, group, rollout)
        found.append(experts)
    log.close()
    return found


def test_export_has_routed_experts(
    tmp_path: Path, run: RunDir, rollouts: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = add_routed(run, [(40, 3, 2), (30, 3, 2), (4, 4, 2), (1, 3, 3)])
    # some rows a group, some by themselves; some arrays in one piece, some in several
    monkeypatch.setattr(rollout_parquet, "_GROUP_BYTES", 1200)
    monkeypatch.setattr(rollout_export, "_JSON_NUMBERS", 7)
    lines, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    rollouts("export", "--output", str(lines))
    rollouts("export", "--output", str(table))
    routed = pq.read_schema(table).field("routed_experts").type
    assert [each.name for each in routed] == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert str(routed.field(0).type.value_type.value_type) == "uint16"
    from_json = {row["id"]: row for row in map(json.loads, lines.read_text().splitlines())}
    from_parquet = {row["id"]: row for row in pq.read_table(table).to_pylist()}
    assert list(from_json) == list(from_parquet)
    assert len(from_json) == 13
    for row in from_parquet.values():
        if (layers := row["routed_experts"]) is not None:
            known = [each for each in layers.values() if each is not None]
            row["routed_experts"] = [list(token) for token in zip(*known, strict=True)]
    assert 1 < pq.ParquetFile(table).num_row_groups < 13
    for group, experts in enumerate(added, 5):
        shown = json.loads(rollouts("show", f"{group}/0", "--json")[0])
        for row in (from_json[f"{group}/0"], from_parquet[f"{group}/0"], shown):
            assert row["routed_experts"] == experts.tolist()
            assert row["routed_present"] == [1] * (len(experts) - 1) + [0]
    for name, row in from_json.items():
        other = from_parquet[name]
        assert other == row


def test_show_sums_up_routed_experts(run: RunDir, rollouts: Command) -> None:
    add_routed(run, [(40, 3, 2)])
    out, _ = rollouts("show", "5/0")
    assert "2 a token in 3 layers, known of 39 of 40 tokens (97.5%)" in " ".join(out.split())
    assert "routed_experts" not in rollouts("show", "3/0")[0]


_PEAK = """
import re, sys
from hpcrl.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["parquet", "jsonl", "show"])
def test_memory_of_an_export_does_not_grow_with_it(tmp_path: Path, run: RunDir, how: str) -> None:
    def peak(number: int) -> int:
        one = ("show", "mine", f"{number}/0", "--json")
        all_ = ("export", "mine", "--output", str(tmp_path / f"{number}.{how}"), "--state", "waiting")
        command = [*(one if how == "show" else all_), "--runs-root", str(run.path.parent)]
        ended = subprocess.run(
            [sys.executable, "-c", _PEAK, "rollouts", *command], check=True, capture_output=True, text=True, timeout=300
        )
        return int(ended.stderr.split()[-1]) << 10

    base = peak(3)
    # as lists of Python's this is 0.7 GiB (export), and 0.2 GiB (show)
    add_routed(run, [(16384, 64, 8)] if how == "show" else [(2048, 64, 8)] * 32)
    assert peak(5) - base < (160 << 20)
    if how == "parquet":
        (large,) = add_routed(run, [(65536, 78, 8)])
        # itself, a copy with the layers one behind the other, and what Parquet's writer has of one of them
        assert peak(6) - base < 2 * large.nbytes + (64 << 20)


def test_a_run_without_a_ledger_says_so(run: RunDir, rollouts: Command) -> None:
    for path in (run.rollouts_dir / "ledger").iterdir():
        path.unlink()
    for command in (("ls",), ("verify",), ("show", "0/0"), ("export", "--output", "x.jsonl")):
        assert "has no ledger of rollouts" in rollouts(*command, code=2)[1]

"""Records of earlier versions, of other writers, and damaged ones: unknown is not torn, and no command ends by them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from runs_testing import make_run, step_record, write_event, write_status

from hpcrl.cli.output import json_text
from hpcrl.runs.lenient import convert_lenient, decode_lenient
from hpcrl.runs.metrics import MetricsWriter, StepRecord, read_metrics, read_newest
from hpcrl.runs.run_progress import Evaluation, read_evaluations, read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.report import write_report

#: lines that are no records
DAMAGED = (
    b"",
    b"7",
    b"null",
    b"[]",
    b"{}",
    b'{"step": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"step": "one"}',
    b'{"time_s": 1e999}',
    b"NaN",
    b'{"step": Infinity, "attempt": NaN}',
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED)
    run.metrics_dir.mkdir()
    return run


def write_lines(run: RunDir, *lines: bytes) -> None:
    (run.metrics_dir / "0001.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def plain(step: int) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(step_record(step))
    return found


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(StepRecord)])
def test_a_record_with_null_is_read_whatever_is_null(run: RunDir, name: str) -> None:
    odd = {**plain(2), name: None}
    if name in ("attempt", "step"):
        return  # which step it is must be known
    write_lines(run, *(json.dumps(each).encode() for each in (plain(1), odd, plain(3))))
    records = read_metrics(run)
    assert [record.step for record in records] == [1, 2, 3]
    wanted = next(field.type for field in msgspec.structs.fields(StepRecord) if field.name == name)
    value = getattr(records[1], name)
    assert wanted is not float or math.isnan(value)
    others = {key: each for key, each in msgspec.to_builtins(records[1]).items() if key != name}
    assert others == {key: each for key, each in plain(2).items() if key != name}


def test_null_within_a_table_is_left_out_and_not_zero(run: RunDir) -> None:
    odd = {**plain(1), "reward_by_env": {"a": None, "b": 0.5}, "reward_parts": {"a/x": None}}
    write_lines(run, json.dumps(odd).encode())
    (record,) = read_metrics(run)
    assert (record.reward_by_env, record.reward_parts) == ({"b": 0.5}, {})


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_are_no_json_are_unknown_numbers(word: str) -> None:
    line = json.dumps({**plain(1), "loss": "here"}).replace('"here"', word).encode()
    record = decode_lenient(line, StepRecord)
    assert record is not None
    assert math.isnan(record.loss)
    assert record.entropy == step_record(1).entropy


def test_damaged_lines_are_left_out_wherever_they_are(run: RunDir) -> None:
    good = json.dumps(plain(1)).encode()
    write_lines(run, *DAMAGED, good, *DAMAGED, json.dumps(plain(2)).encode(), *DAMAGED)
    assert [record.step for record in read_metrics(run)] == [1, 2]
    newest = read_newest(run)
    assert newest is not None
    assert newest.step == 2


def test_records_of_a_checkpoint_in_two_lines_count_once_as_earlier_versions_wrote_them(run: RunDir) -> None:
    first = {**plain(2), "phases_s": {**plain(2)["phases_s"], "checkpoint": 0.0}}
    last = {**plain(2), "phases_s": {**plain(2)["phases_s"], "checkpoint": 5.0}}
    write_lines(run, *(json.dumps(each).encode() for each in (plain(1), first, last, plain(3))))
    records = read_metrics(run)
    assert [record.step for record in records] == [1, 2, 3]
    assert records[1].phases_s["checkpoint"] == 5.0


def test_a_step_has_one_line_and_its_final_phases_in_another_file(run: RunDir) -> None:
    writer = MetricsWriter(run, 1)
    early = msgspec.structs.replace(step_record(1), phases_s={"wait_batch": 1.0}, tokens_per_s=1.0)
    writer.write(early)
    final = msgspec.structs.replace(early, phases_s={"wait_batch": 1.0, "checkpoint": 3.0}, time_s=early.time_s + 3.0)
    writer.write_final_phases(final)
    writer.write(step_record(2))
    writer.close(5.0)
    assert (run.metrics_dir / "0001.jsonl").read_bytes().count(b"\n") == 2
    assert list(run.metrics_dir.glob("*.jsonl")) == [run.metrics_dir / "0001.jsonl"]
    first, second = read_metrics(run)
    assert first.phases_s == {"wait_batch": 1.0, "checkpoint": 3.0}
    assert (first.time_s, first.tokens_per_s) == (early.time_s + 3.0, early.tokens / 4.0)
    assert second == step_record(2)
    # what says it may be damaged or gone
    (run.metrics_dir / "saved" / "0001.jsonl").write_bytes(b"\n".join(DAMAGED))
    assert read_metrics(run)[0].phases_s == {"wait_batch": 1.0}


@pytest.mark.parametrize("damage", [None, "much", [], {}, True])
def test_evaluations_with_anything_in_a_field_end_no_reader(run: RunDir, damage: Any) -> None:
    good = {"version": 10, "last_version": 10, "due": 10, "reward": 0.75, "by_env": {"a": 0.75}, "parts": {"a/b": 0.5}}
    for number, name in enumerate((*good, "prompts", "failed", "counted", "first_failure", "failures")):
        write_event(run, "evaluation", time_s=1.0 + number, **{**good, "version": 20 + number, name: damage})
    write_event(run, "evaluation", time_s=50.0, **good)
    found = read_evaluations(run)
    assert found[0].version == 10
    assert found[0].reward == 0.75
    read_progress(run)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"reward": 0.5, "by_env": {"a": math.nan, "b": 0.5}}, {"reward": 0.5, "by_env": {"b": 0.5}}),
        ({"reward": math.inf}, {"reward": math.nan}),
        ({"reward": 1, "by_env": {}}, {"reward": 1.0, "by_env": {}}),
        ({"reward": None, "by_env": {"a": None}}, {"reward": math.nan, "by_env": {}}),
        # no JSON can have these, and they are read all the same
        ({"reward": 0.25, "note": "\udc80"}, {"reward": 0.25}),
        ({"reward": 0.25, "note": object()}, {"reward": 0.25}),
    ],
)
def test_plain_values_are_converted_as_lines_are(values: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = convert_lenient({"version": 3, **values}, Evaluation)
    assert found is not None
    assert (found.version, found.by_env) == (3, wanted.get("by_env", {}))
    assert found.reward == pytest.approx(wanted["reward"], nan_ok=True)
    assert convert_lenient({**values, "version": "three"}, Evaluation) is None


def test_progress_reads_two_values_of_the_recipe_and_validates_none(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of a recipe take a fifth of the time of a command that shows where a run stands."""
    recipe = run.recipe()
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "recipe", lambda _: pytest.fail("the recipe is validated"))
        found = read_progress(run)
    assert (found.total_steps, found.staleness_bound) == (recipe.trainer.steps, recipe.rollouts.max_off_policy_steps)
    # a recipe that leaves them out has their defaults
    tree = yaml.safe_load(run.recipe_path.read_text())
    del tree["rollouts"]["max_off_policy_steps"]
    run.recipe_path.write_text(yaml.safe_dump(tree))
    os.utime(run.recipe_path, ns=(1, 1))
    assert read_progress(run).staleness_bound == run.recipe().rollouts.max_off_policy_steps


def test_documents_of_commands_hold_null_and_never_nan() -> None:
    document = {"a": math.nan, "b": [1.0, -math.inf, {"c": (math.inf, 2)}], "d": "NaN", "e": None, "f": True}
    text = json_text(document)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [1.0, None, {"c": [None, 2]}], "d": "NaN", "e": None, "f": True
    }  # fmt: skip


def test_every_view_of_a_run_with_unknown_numbers_works(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrl.cli.main import main

    numbers = [field.name for field in msgspec.structs.fields(StepRecord) if field.type is float]
    odd = {**plain(2), **dict.fromkeys(set(numbers) - {"time_s"}), "reward_by_env": {"a": None}}
    write_lines(run, json.dumps(plain(1)).encode(), json.dumps(odd).encode(), *DAMAGED)
    for kind in ("evaluation", "replica.lost", "trainer.step_skipped", "component.hung", "run.state", "store.canary",
                 "component.restarting", "attempt.changed", "nodes.excluded", "trainer.checkpoint_saved"):  # fmt: skip
        write_event(run, kind, time_s=5.0)
        write_event(run, kind, time_s=5.0, **dict.fromkeys(("what", "why", "version", "reward", "state", "nodes"), 7))
    write_event(run, "evaluation", time_s=6.0, version=0, reward=None, by_env={"a": None}, parts={"a/b": None})
    assert write_report(run).is_file()
    for command in (["status"], ["status", "--json"], ["ls"], ["ls", "--json"], ["why"], ["why", "--json"]):
        monkeypatch.setattr("sys.argv", ["hpcrl", *command[:1], "--runs-root", str(tmp_path), *command[1:]])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert not end.value.code, (command, err)
        assert "Traceback" not in err
        if "--json" in command:
            json.loads(out, parse_constant=pytest.fail)
        elif command[0] != "why":
            assert "nan" not in out.lower()

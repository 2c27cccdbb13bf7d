"""Rows of files are checked where they come in: what is wrong is named with its line, and nothing else is asked."""

from __future__ import annotations

import builtins
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from dataset_testing import OneReply, asked, config_of, make_dataset, questions, write_jsonl
from pydantic import ValidationError

from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.dataset.partition import read_partition

GOOD = '{"prompt": "What is 2 plus 2?", "answer": "4"}'


def findings(path: Path, *rewards: dict[str, Any], **changes: Any) -> list[Finding]:
    with pytest.raises(ConfigError) as caught:
        make_dataset(path, *rewards, **changes)
    return list(caught.value.findings)


def lines(path: Path, *rows: str | bytes) -> Path:
    path.write_bytes(b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "what", "hint"),
    [
        ("{", "no JSON", "one JSON object a line"),
        ('{"prompt": "a", "answer": NaN}', "no JSON", "without NaN"),
        ('{"prompt": "a", "answer": 1e999}', "no JSON", "without NaN"),
        ('{"prompt": "\\ud800", "answer": "4"}', "no JSON", "one JSON object"),
        ("[1, 2]", "no JSON object", '{"prompt"'),
        ("[" * 100_000, "nested too deeply", "flat"),
        (b'{"prompt": "caf\xe9", "answer": "4"}', "byte 16 is not UTF-8", "iconv"),
        ('{"answer": "4"}', "column 'prompt' does not exist", "there are answer"),
        ('{"prompt": " \\n ", "answer": "4"}', "column 'prompt' is empty", "columns.prompt"),
        ('{"prompt": null, "answer": "4"}', "column 'prompt' is empty", "columns.prompt"),
        ('{"prompt": 7, "answer": "4"}', "column 'prompt' is not text: 7", "columns.prompt"),
        ('{"prompt": "a"}', "column 'answer' does not exist", "there are prompt"),
        ('{"prompt": "a", "answer": ""}', "column 'answer' is empty", "columns.answer"),
        ('{"prompt": "a", "answer": ["4", ["5"]]}', "column 'answer' is neither text nor a number", "columns.answer"),
        ('{"prompt": "a", "answer": []}', "column 'answer' is a list of 0", "1 to 32 right answers"),
        ('{"prompt": "a", "answer": {"4": 5}}', "column 'answer' is neither text nor a number", "columns.answer"),
        ('{"prompt": "a", "answer": 1%s}' % ("0" * 2000), "is a number of 6644 bits", "as text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str | bytes, what: str, hint: str) -> None:
    path = lines(tmp_path / "q.jsonl", GOOD, "", row, GOOD)
    (finding,) = findings(path)
    assert finding.key == "environments.asked.path"
    assert finding.what.startswith(f"{path}, line 3: ")
    assert what in finding.what
    assert hint in finding.hint


def test_what_a_message_shows_is_short_and_can_be_printed(tmp_path: Path) -> None:
    path = lines(tmp_path / "q.jsonl", '{"prompt": "\x1b[2J' + "x" * 5000)
    (finding,) = findings(path)
    assert "\x1b" not in str(finding)
    assert "\\x1b[2J" in finding.what
    assert len(finding.what) < 400


def test_many_bad_lines_are_named_together_and_the_rest_is_not_read(tmp_path: Path) -> None:
    few = findings(lines(tmp_path / "few.jsonl", "{", GOOD, "[]"))
    assert [each.what.partition(", ")[2].partition(":")[0] for each in few] == ["line 1", "line 3"]
    many = findings(lines(tmp_path / "many.jsonl", *["{"] * 1000))
    assert len(many) == 11
    assert many[-1].what == "the rest was not checked"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (gone,) = findings(tmp_path / "gone.jsonl")
    assert "cannot be read: No such file or directory" in gone.what
    (other,) = findings(lines(tmp_path / "q.txt", GOOD))
    assert "an unknown suffix" in other.what
    assert ".parquet" in other.hint
    (empty,) = [each for each in findings(lines(tmp_path / "empty.jsonl")) if "training" in each.what]
    assert "gives no training question" in empty.what


def test_jsonl_with_a_byte_order_mark_and_numbers_as_answers(tmp_path: Path) -> None:
    rows = [json.dumps(row | {"answer": int(row["answer"])}).encode() for row in questions(50)]
    rows[0] = b"\xef\xbb\xbf" + rows[0] + b"\r"
    environment = make_dataset(lines(tmp_path / "q.jsonl", *rows))
    prompts = [environment.prompt("train", index) for index in range(200)]
    assert {int(p.data.answer) for p in prompts} < set(range(1, 51))
    assert all(p.messages[0]["content"] == f"What is {int(p.data.answer) - 1} plus 1?" for p in prompts)


@pytest.mark.parametrize("name", ["q.jsonl.gz", "Q.JSONL", "q.csv.gz", "q.TSV.GZ"])
def test_packed_files_and_suffixes_in_capitals(tmp_path: Path, name: str) -> None:
    rows = questions(60)
    if "json" in name.lower():
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        between = "\t" if "TSV" in name else ","
        text = "".join(f"{row[0]}{between}{row[1]}\n" for row in [["prompt", "answer"], *([*r.values()] for r in rows)])
    data = gzip.compress(text.encode()) if name.lower().endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    partition = read_partition(config_of(tmp_path / name))
    assert len(partition.train[""]) + len(partition.held_out) == 60
    if name.endswith("gz"):
        (tmp_path / name).write_bytes(data[:-20])
        assert "is not a whole gzip file" in findings(tmp_path / name)[0].what
        (tmp_path / name).write_bytes(text.encode())
        assert "cannot be read: Not a gzipped file" in findings(tmp_path / name)[0].what


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["q.jsonl", "q.csv"])
def test_another_encoding_is_one_finding(tmp_path: Path, encoding: str, name: str) -> None:
    (tmp_path / name).write_bytes("".join(f"{GOOD}\n" for _ in range(20)).encode(encoding))
    (finding,) = findings(tmp_path / name)
    assert f"{name} is text in {encoding[:6].upper()}, not in UTF-8" in finding.what
    assert f"iconv -f {encoding[:6].upper()} -t UTF-8" in finding.hint


def test_one_json_document_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps(questions(3)))
    (finding,) = findings(tmp_path / "q.json")
    assert "is one JSON document" in finding.what
    assert ".jsonl" in finding.hint


def test_identifiers_are_unique(tmp_path: Path) -> None:
    rows = [{**row, "id": f"q{i % 3}"} for i, row in enumerate(questions(4))]
    (finding,) = findings(write_jsonl(tmp_path / "q.jsonl", rows), columns={"id": "id"})
    assert "line 4: column 'id' is q0, as in" in finding.what
    assert "line 1" in finding.what


def test_csv(tmp_path: Path) -> None:
    text = 'question,answer\r\n"What is\n2, plus 2?",4\r\nWhat is 3 plus 3?,6\r\n'
    (tmp_path / "q.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    config = {"columns": {"prompt": "question"}, "held_out_path": str(tmp_path / "h.tsv")}
    (tmp_path / "h.tsv").write_text('question\tanswer\nWhat is "5"?\t5\n'.replace('"5"', "5"))
    environment = make_dataset(tmp_path / "q.csv", **config)
    assert {*asked(environment, "train", 2)} == {"What is\n2, plus 2?", "What is 3 plus 3?"}
    assert asked(environment, "heldout", 1) == ["What is 5?"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"prompt,answer\na,1,2\nb,2\n", "line 2: 3 fields, and the first line has 2: a,1,2"),
        (b"prompt,answer\nb,2\na\n", "line 3: 1 fields, and the first line has 2: a"),
        (b'prompt,answer\nb,2\n"a,1\nc,3\n', "line 3: no CSV (unexpected end of data)"),
        (b"prompt;answer\na;1\n", "line 1: columns are separated by semicolons: prompt;answer"),
        (b"prompt\tanswer\na\t1\n", "line 1: columns are separated by tabs: prompt\\tanswer"),
        (b"prompt,prompt\nb,2\n", "line 1: a column appears twice: prompt,prompt"),
        (b"prompt,answer\nb,2\n\xff,3\n", "line 3: byte 1 is not UTF-8"),
        (b"prompt,answer\nb,\n", "line 2: column 'answer' is empty"),
    ],
)
def test_bad_csv(tmp_path: Path, text: bytes, what: str) -> None:
    (tmp_path / "q.csv").write_bytes(text)
    assert what in findings(tmp_path / "q.csv")[0].what


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    columns = [pyarrow.array(["a", "b"]), pyarrow.array(["c", "d"]), pyarrow.array([1, 2])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["prompt", "prompt", "answer"]), path)
    assert "a column appears twice: prompt,prompt,answer" in findings(path)[0].what
    text = pyarrow.array([b"a", b"\xff"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table([text, columns[1]], names=["prompt", "answer"]), path)
    assert "behind row 0: text is not UTF-8" in findings(path)[0].what


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions(3000)), path)
    partition = read_partition(config_of(path))
    assert len(partition.train[""]) + len(partition.held_out) == 3000
    rows = [{"prompt": "a", "answer": math.nan}, {"prompt": "b", "answer": 1.5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (finding,) = findings(path)
    assert "row 1: column 'answer' is nan, which is not finite" in finding.what
    path.write_bytes(b"PAR1 nothing")
    assert "is not a Parquet file" in findings(path)[0].what


def test_a_library_that_is_missing_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] in ("datasets", "pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    (tmp_path / "q.parquet").write_bytes(b"")
    monkeypatch.setattr(builtins, "__import__", without)
    (parquet,) = findings(tmp_path / "q.parquet")
    (directory,) = findings(tmp_path)
    assert "'pyarrow'" in parquet.what
    assert "[export]'" in parquet.hint
    assert "'datasets'" in directory.what
    assert "pip install" in directory.hint
    assert "[datasets]'" in directory.hint


def test_messages(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "What is 1 plus 1?", "name": None},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And plus 3?"},
    ]
    rows = [{"talk": turns if i % 2 else json.dumps(turns[2:]) if i == 0 else turns[2:], "answer": "5"} for i in (0, 1)]
    config = {"columns": {"messages": "talk"}, "system": "Be brief.", "held_out_share": 0.5}
    rows += [{"talk": [{"role": "user", "content": f"What is {i}?"}], "answer": "5"} for i in range(20)]
    environment = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows), **config)
    prompts = [environment.prompt(split, i).messages for split in ("train", "heldout") for i in range(20)]
    assert all(messages[0] == {"role": "system", "content": "Be brief."} for messages in prompts)
    assert [len(messages) for messages in prompts].count(4) >= 1
    assert ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "And plus 3?"}) in prompts


@pytest.mark.parametrize(
    ("talk", "what"),
    [
        ("hello", "is text, and no JSON list"),
        ([], "is not a list of messages"),
        (["hello"], "message 1 of column 'talk' is not a mapping"),
        ([{"role": "human", "content": "a"}], "message 1 of column 'talk' has the role human"),
        ([{"role": "user", "content": ""}], "message 1 of column 'talk' has no text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 of column 'talk' has no text"),
        ([{"role": "user", "content": "a", "tool_calls": []}], "message 1 of column 'talk' has tool_calls"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "is of 'assistant'"),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "begins with a system message"),
    ],
)
def test_bad_messages_in_a_row(tmp_path: Path, talk: Any, what: str) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"talk": talk, "answer": "5"}])
    (finding,) = findings(path, columns={"messages": "talk"}, system="Be brief.")
    assert what in finding.what


def test_templates(tmp_path: Path) -> None:
    rows = [{"context": f"Box {i} {{x}}.", "question": "Which?", "n": i, "answer": str(i)} for i in range(30)]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    environment = make_dataset(
        path,
        template="{context}\n{question} ({n}) {{A}}",
        demonstration="It is \\boxed{{{answer}}}.",
        system="Think.",
    )
    prompt = environment.prompt("train", 0)
    number = prompt.data.answer
    assert prompt.messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": f"Box {number} {{x}}.\nWhich? ({number}) {{A}}"},
    )
    assert prompt.data.demonstration == f"It is \\boxed{{{number}}}."
    (finding, *_) = findings(path, template="{contexts}")
    assert "line 1: column 'contexts' does not exist" in finding.what
    # words around the columns move no question to the other side
    other = make_dataset(path, template="Read: {question} {n} {context}")
    assert {p.split()[-2] for p in asked(environment, "heldout", 9)} <= {
        f"({p.split()[2]})" for p in asked(other, "heldout", 9)
    }


def test_optional_columns_of_templates(tmp_path: Path) -> None:
    codes = ["x", "", None, " "]
    rows = [{"question": f"Which {i} ?", "code": codes[i % 4], "answer": "1"} for i in range(40)]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    for prompt in asked(make_dataset(path, template="{question}{code:optional}"), "train", 30):
        assert prompt.split()[2] == ("?x" if int(prompt.split()[1]) % 4 == 0 else "?")
    for template in ("{question}{code}", "{question}{code:optional}{code}"):
        (finding, *_) = findings(path, template=template)
        assert "line 2: column 'code' is empty" in finding.what
    (finding, *_) = findings(path, template="{code:optional}")
    assert "line 2: each column of template is empty" in finding.what
    (finding, *_) = findings(path, template="{codes:optional}")
    assert "line 1: column 'codes' does not exist" in finding.what
    with pytest.raises(ValidationError, match=r"only \{column\} and \{column:optional\} are known"):
        config_of(path, template="{code:>9}")


@pytest.mark.parametrize(
    ("reward", "answer", "what"),
    [
        ({"kind": "numeric"}, "four", "column 'answer' has no part 'last_number' (for the part 'numeric'"),
        ({"kind": "numeric", "extract_answer": "hashes"}, "2+2=4", "column 'answer' has no part 'hashes'"),
        ({"kind": "numeric", "extract_answer": "hashes"}, "#### four", "column 'answer' has no number"),
        (
            {"kind": "numeric", "extract_answer": "all"},
            r"2\sqrt{3}",
            "column 'answer' has more than one number; kind: math",
        ),
        ({"kind": "numeric", "extract_answer": "boxed"}, r"\boxed{12:30}", "column 'answer' has more than one number"),
        ({"kind": "numeric", "extract_answer": "hashes"}, "2+2\n#### 1.234,50", "column 'answer' has more than one"),
        ({"kind": "exact", "extract_answer": "boxed"}, "4", "column 'answer' has no part 'boxed'"),
        ({"kind": "exact", "ignore_punctuation": True}, "!?", "column 'answer' is empty after normalisation"),
        ({"kind": "regex"}, "(", "column 'answer' is not a regular expression"),
    ],
)
def test_an_answer_that_no_reply_can_match_is_named(
    tmp_path: Path, reward: dict[str, Any], answer: str, what: str
) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "What is 2 plus 2?", "answer": answer}])
    (finding,) = findings(path, reward)
    assert f"line 1: {what}" in finding.what


def test_what_no_function_can_get_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "image": b"\xff"}]), path)
    (finding,) = findings(path, {"kind": "function", "function": "operator:length_hint"})
    assert "row 1: column 'image' holds" in finding.what


@pytest.mark.parametrize("reward", [{"kind": "exact", "ignore_case": True}, {"kind": "regex"}])
async def test_any_answer_of_a_list_counts(tmp_path: Path, reward: dict[str, Any]) -> None:
    rows = [{"prompt": f"Is it {i}?", "answer": [True, "yes", 1]} for i in range(2)]
    held_out = write_jsonl(tmp_path / "h.jsonl", rows[1:])
    environment = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows[:1]), reward, held_out_path=str(held_out))
    prompt = environment.prompt("train", 0)
    assert (prompt.data.answer, prompt.data.others, prompt.data.demonstration) == ("true", ["yes", "1"], "true")
    for said, score in (("true", 1.0), ("yes", 1.0), ("1", 1.0), ("no", 0.0)):
        assert (await environment.rollout(prompt, OneReply(said))).reward == score
    environment.close()


def test_a_list_of_answers_is_checked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "a", "answer": ["4", "four"]}])
    (finding,) = findings(path, {"kind": "numeric"})
    assert "has no part 'last_number'" in finding.what
    function = {"kind": "function", "function": "operator:length_hint"}
    (finding,) = findings(path, {"kind": "exact"}, function)
    assert "a part of the reward needs one answer" in finding.what


def test_answers_whose_last_number_is_not_their_value_are_noted(tmp_path: Path) -> None:
    answers = [r"2\sqrt{3}", "5 dollars", "2^{10}", "7 dollars and 50 cents", "She has 3 and 4.\n#### 7", "x = 8"]
    rows = [{"prompt": f"a {i}", "answer": answer} for i, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    held_out = {"held_out_path": str(write_jsonl(tmp_path / "h.jsonl", questions(1)))}
    (note,) = read_partition(config_of(path, {"kind": "numeric"}, **held_out)).notes
    assert note.startswith("3 answers may be more than a number, and their last number is compared")
    assert "line 1 has more than one number (2\\sqrt{3})" in note
    assert "line 4" in note
    assert read_partition(config_of(path, **held_out)).notes == []


@pytest.mark.parametrize("column", ["messages", "tools", "more"])
def test_what_is_nested_too_deeply_is_named(tmp_path: Path, column: str) -> None:
    """JSON can be read much deeper than code that copies it reaches."""
    deep: Any = "x"
    for _ in range(600):
        deep = [deep]

    def value(inner: Any) -> Any:
        return {
            "messages": [{"role": "user", "content": inner}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": inner}}}],
            "more": inner,
        }[column]

    rows = [*questions(30, **{column: value("x")}), *questions(1, **{column: value(deep)})]
    file = write_jsonl(tmp_path / "q.jsonl", rows)
    columns = {"columns": {column: column}} if column != "more" else {}
    found = findings(file, {"kind": "function", "function": "operator:length_hint"}, **columns)
    assert any(f"column '{column}' is nested deeper than 100 levels" in each.what for each in found)
